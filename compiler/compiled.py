"""``compile()`` returns the program of a key: loaded from a store, or built and published there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .. import ops
from ..config import CompileConfig
from .artifacts.artifact import Artifact, Refusal, printable
from .artifacts.key import Wanted
from .artifacts.store import Store
from .capture.source import Source
from .lowering.check_kernels import called, check_used
from .record import Record
from .run.load import load
from .run.plan import Plan
from .run.program import Program
from .timer import Timer

LOOKUPS = ("find artifact", "load")
"""The phases of a start that compiles nothing."""
_log = logging.getLogger(__name__)
_MOST_SAID = 500
"""Characters of a log line on why an artifact does not fit."""


@dataclass
class Compiled:
    """A program, and how it was made; at ``-O0`` there is only the program.

    ``report`` is what the artifact says about its build: passes, choices, pieces, seconds.
    """

    program: Program
    plan: Plan | None = None
    artifact: Artifact | None = None
    built: bool = False
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def report(self) -> Mapping[str, Any]:
        return self.artifact.manifest.report if self.artifact else {}


def compile(
    source: Callable[[], Source],
    config: CompileConfig,
    wanted: Wanted,
    store: Store,
    *,
    require: bool = False,
    on_phase: Callable[[str], None] = lambda phase: None,
    record: Record | None = None,
) -> Compiled:
    """Return the program of ``wanted``, from ``store`` or built and published there.

    Args:
        source: makes what is compiled; called only if there is no artifact.
        config: level, passes, kernel choices.
        require: refuse to build.
        on_phase: called with the name of each phase as it starts.
        record: build in any case and show it what each phase made.

    Raises:
        UserError: there is no artifact that may be used and ``require`` is set, with the reason;
            or the store cannot be written.
        MachineError: there is no C++ compiler that works, or no space for compilers' files.
        TraceError, RequiredFusionError, VerificationError, LoweringError, EmitError: see the
            phases.
    """
    timer = Timer(on_phase)
    compiled = _find(wanted, store, require, timer) if record is None else None
    if compiled is None:
        if require:
            raise store.missing(*wanted.keys)
        with store.lock(wanted.key, on_wait=lambda: on_phase("another process compiles this")):
            compiled = _find(wanted, store, require, timer) if record is None else None
            if compiled is None:
                compiled = _make(source, config, wanted, store, timer, record or Record())
    _check_report(compiled.report, config)
    return compiled


def _find(wanted: Wanted, store: Store, require: bool, timer: Timer) -> Compiled | None:
    """The program of the first artifact that can be used.  An artifact that cannot be loaded is
    refused, as a damaged one is."""
    while True:
        with timer.phase("find artifact"):
            artifact = store.find(*wanted.keys)
        if artifact is None:
            return None
        try:
            return _load(artifact, require, timer)
        except Refusal as refusal:
            store.refuse(artifact, refusal)


def _make(
    source: Callable[[], Source],
    config: CompileConfig,
    wanted: Wanted,
    store: Store,
    timer: Timer,
    record: Record,
) -> Compiled:
    """Build the artifact, publish it, and load it as any other."""
    if _log.isEnabledFor(logging.INFO):
        why = store.explain_miss(*wanted.keys)
        why = why if len(why) <= _MOST_SAID else f"{why[:_MOST_SAID]}…"
        _log.info("compiling, since no artifact fits: %s", why)
    for refusal in store.refusals:
        _log.warning("%s: %s; compiling anew", printable(str(refusal.path)), refusal.reason)
    from .emit.cpp_compiler import compiler_files

    with compiler_files():
        with timer.phase("import compiler"):
            from .build import build
        with timer.phase("make model"):
            model = source()
        proof: Mapping[str, Any] = {}
        if model.prove is not None:
            with timer.phase("prove"):
                proof = model.prove()
        files, report = build(model, config, wanted, timer=timer, record=record)
        report |= {"proof": dict(proof)} if proof else {}
        with timer.phase("describe"):
            files |= model.describe()
    with timer.phase("publish"):
        artifact = store.publish(wanted.key, files, report, wanted.label)
    return replace(_load(artifact, False, timer), built=True)


def _load(artifact: Artifact, require: bool, timer: Timer) -> Compiled:
    with timer.phase("load"):
        ops.KERNELS.sealed = require
        plan, program = load(artifact)
    return Compiled(program, plan, artifact, seconds=timer.seconds)


def _check_report(report: Mapping[str, Any], config: CompileConfig) -> None:
    """Raise if kernels or fusions that the options ask for are not in the artifact."""
    if config.named_kernels:
        check_used(config.named_kernels, called(report["choices"], report["outside"]))
    if config.required:
        from ..passes import PassReport, check_required

        check_required(map(PassReport.from_json, report["passes"]), config.required)
