"""``compile()`` returns the program of a key: loaded from a store, or built and published there.

``compile_kernels()`` does so with kernels that no program holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from .. import ops
from ..config import CompileConfig
from .artifacts.artifact import Artifact, Refusal, printable
from .artifacts.key import Wanted
from .artifacts.store import Store
from .capture.source import OutsideCalls, Source
from .lowering.check_kernels import called, check_used
from .record import Record
from .run.load import load, load_kernels
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


@dataclass
class CompiledKernels:
    """Kernels that are in ``ops.KERNELS`` now, and how they were made."""

    artifact: Artifact
    built: bool = False
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def report(self) -> Mapping[str, Any]:
        return self.artifact.manifest.report


_L = TypeVar("_L", Compiled, CompiledKernels)
_Load: TypeAlias = Callable[[Artifact, bool, Timer], _L]
"""Loads an artifact; takes whether nothing may be compiled."""
_Made: TypeAlias = tuple[Mapping[str, bytes], dict[str, Any]]
"""An artifact's files, by name, and its report."""


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

    def make() -> _Made:
        return _built(source, config, wanted, timer, record or Record())

    anew = record is not None
    compiled = _obtained(wanted, store, _load, make, require=require, timer=timer, anew=anew)
    _check_report(compiled.report, config)
    return compiled


def compile_kernels(
    calls: OutsideCalls,
    config: CompileConfig,
    wanted: Wanted,
    store: Store,
    *,
    require: bool = False,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> CompiledKernels:
    """Put the Triton kernels of calls beside a program into ``ops.KERNELS``, from an artifact of
    ``store`` that has nothing else, or built and published there.

    Args:
        calls: made only by engines with some option, whose programs are those without it.
        config, wanted, store, require, on_phase: as of ``compile()``.

    Raises:
        UserError, MachineError: as of ``compile()``.
    """
    timer = Timer(on_phase)

    def make() -> _Made:
        from .emit.cpp_compiler import compiler_files

        with compiler_files():
            with timer.phase("import compiler"):
                from .build_kernels import build_kernels
            return build_kernels(calls, config, wanted, timer)

    return _obtained(wanted, store, _load_kernels, make, require=require, timer=timer)


def _obtained(
    wanted: Wanted,
    store: Store,
    load: _Load[_L],
    make: Callable[[], _Made],
    *,
    require: bool,
    timer: Timer,
    anew: bool = False,
) -> _L:
    """The loaded artifact of ``wanted``: found, unless it is to be made ``anew``, or made and
    published."""
    loaded = None if anew else _find(wanted, store, load, require, timer)
    if loaded is not None:
        return loaded
    if require:
        raise store.missing(*wanted.keys)
    with store.lock(wanted.key, on_wait=lambda: timer.say("another process compiles this")):
        loaded = None if anew else _find(wanted, store, load, require, timer)
        if loaded is None:
            _say_why(wanted, store)
            files, report = make()
            with timer.phase("publish"):
                artifact = store.publish(wanted.key, files, report, wanted.label)
            loaded = load(artifact, False, timer)
            loaded.built = True
    return loaded


def _find(wanted: Wanted, store: Store, load: _Load[_L], require: bool, timer: Timer) -> _L | None:
    """The first artifact that can be used, loaded.  One that cannot be loaded is refused, as a
    damaged one is."""
    while True:
        with timer.phase("find artifact"):
            artifact = store.find(*wanted.keys)
        if artifact is None:
            return None
        try:
            return load(artifact, require, timer)
        except Refusal as refusal:
            store.refuse(artifact, refusal)


def _say_why(wanted: Wanted, store: Store) -> None:
    if _log.isEnabledFor(logging.INFO):
        why = store.explain_miss(*wanted.keys)
        why = why if len(why) <= _MOST_SAID else f"{why[:_MOST_SAID]}…"
        _log.info("compiling %s, since no artifact fits: %s", wanted.label, why)
    for refusal in store.refusals:
        _log.warning("%s: %s; compiling anew", printable(str(refusal.path)), refusal.reason)


def _built(
    source: Callable[[], Source],
    config: CompileConfig,
    wanted: Wanted,
    timer: Timer,
    record: Record,
) -> _Made:
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
    return files, report


def _load(artifact: Artifact, require: bool, timer: Timer) -> Compiled:
    with timer.phase("load"):
        ops.KERNELS.sealed = require
        plan, program = load(artifact)
    return Compiled(program, plan, artifact, seconds=timer.seconds)


def _load_kernels(artifact: Artifact, require: bool, timer: Timer) -> CompiledKernels:
    with timer.phase("load"):
        load_kernels(artifact)
    return CompiledKernels(artifact, seconds=timer.seconds)


def _check_report(report: Mapping[str, Any], config: CompileConfig) -> None:
    """Raise if kernels or fusions that the options ask for are not in the artifact."""
    if config.named_kernels:
        check_used(config.named_kernels, called(report["choices"], report["outside"]))
    if config.required:
        from ..passes import PassReport, check_required

        check_required(map(PassReport.from_json, report["passes"]), config.required)
