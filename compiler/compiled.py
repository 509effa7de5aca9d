"""``compile()`` returns the program of a key: loaded from a store, or built and published there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import ops
from ..config import CompileConfig
from .artifacts.artifact import Artifact, Refusal, printable
from .artifacts.key import Key
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
    *,
    key: Key,
    as_good: Sequence[Key] = (),
    store: Store,
    require: bool = False,
    label: str = "",
    device: str = "cpu",
    sm: int = 0,
    on_phase: Callable[[str], None] = lambda phase: None,
    record: Record | None = None,
) -> Compiled:
    """Return the program of ``key``, from ``store`` or built and published there.

    Args:
        source: makes what is compiled; called only if there is no artifact.
        config: level, passes, kernel choices.
        key: names everything that the compiled code depends on.
        as_good: keys of other artifacts that serve as well, if the store has them.
        require: refuse to build.
        label: what the artifact is, for people.
        device: "cpu" or "cuda".
        sm: compute capability of the target GPU, such as 90; 0 for none.
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
    built = False
    found = _find(store, (key, *as_good), require, timer) if record is None else None
    if found is None:
        if require:
            raise store.missing(key, *as_good)
        with store.lock(key, on_wait=lambda: on_phase("another process compiles this")):
            found = _find(store, (key, *as_good), require, timer) if record is None else None
            if found is None:
                for refusal in store.refusals:
                    _log.warning(
                        "%s: %s; compiling anew", printable(str(refusal.path)), refusal.reason
                    )
                from .emit.cpp_compiler import compiler_files

                with compiler_files():
                    with timer.phase("import compiler"):
                        from .build import build
                    with timer.phase("make model"):
                        model = source()
                    files, report = build(
                        model,
                        config,
                        device=device,
                        sm=sm,
                        label=label,
                        timer=timer,
                        record=record or Record(),
                    )
                built = True
                with timer.phase("publish"):
                    artifact = store.publish(key, files, report, label)
                found = artifact, *_load(artifact, require, timer)
    artifact, plan, program = found
    compiled = Compiled(program, plan, artifact, built, timer.seconds)
    said = compiled.report
    if config.named_kernels:
        check_used(config.named_kernels, called(said["choices"], said["outside"]))
    if config.required:
        from ..passes import PassReport, check_required

        check_required(map(PassReport.from_json, said["passes"]), config.required)
    return compiled


def _find(
    store: Store, keys: Sequence[Key], require: bool, timer: Timer
) -> tuple[Artifact, Plan, Program] | None:
    """The first artifact that can be used, and its program.  An artifact that cannot be loaded is
    refused, as a damaged one is."""
    while True:
        with timer.phase("find artifact"):
            artifact = store.find(*keys)
        if artifact is None:
            return None
        try:
            return artifact, *_load(artifact, require, timer)
        except Refusal as refusal:
            store.refuse(artifact, refusal)


def _load(artifact: Artifact, require: bool, timer: Timer) -> tuple[Plan, Program]:
    with timer.phase("load"):
        ops.KERNELS.sealed = require
        return load(artifact)
