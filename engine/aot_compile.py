"""Compiles a model without starting it: for images, and for GPUs that are not on this machine.

``aot_compile`` resolves the options as a start does, finds or builds the artifact for the target
GPU, and says what is left to the first start.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..compiler.artifacts.store import Store
from ..compiler.compiled import LOOKUPS, Compiled, CompiledKernels
from ..compiler.record import Record
from ..config import EngineOptions, Hardware, ResolvedConfig, UserError, make_output_folder
from ..model_executor.captured.described import raw_headers
from ..model_executor.spec import stage_of
from .worker.hardware import detect_hardware
from .worker.progress import show_progress
from .worker.source import (
    artifact_label,
    configured_store,
    drafts_on_gpu,
    find_or_compile,
    find_or_compile_drafts,
    model_source,
)
from .worker.startup import read_model
from .worker.startup_report import StartupReport

if TYPE_CHECKING:
    from ..compiler.build import Lowered
    from ..compiler.capture.source import Source
    from ..compiler.lowering.tune import Tuner
    from ..model_executor.spec import ModelSpec


@dataclass(frozen=True)
class AotResult:
    """An artifact that is now in a store, and what is left to the first start.  ``dump`` is the
    folder in which each phase left what it made."""

    compiled: Compiled | CompiledKernels
    label: str
    startup: StartupReport
    left: tuple[str, ...]
    dump: Path | None


def lowered_model(
    spec: ModelSpec,
    config: ResolvedConfig,
    say: Callable[[str], None],
    record: Record,
    tuner: Tuner | None = None,
) -> tuple[Source, Lowered, bool]:
    """A model traced, rewritten and lowered as for a build, but not compiled.

    Returns:
        its source, its lowered program, and whether the GPU is not the one here: then the kernels
        of csrc are taken to be there.
    """
    from ..compiler.build import lower_model
    from ..compiler.timer import Timer

    absent = is_absent(config.hardware)
    source = model_source(spec, config)
    lowered = lower_model(
        source,
        config.compile,
        sm=config.hardware.sm,
        timer=Timer(say),
        record=record,
        csrc=True if absent else None,
        tuner=tuner,
    )
    return source, lowered, absent


def is_absent(hardware: Hardware) -> bool:
    """Whether programs are for a GPU that is not the one here."""
    return hardware.device == "cuda" and detect_hardware("auto").sm != hardware.sm


def aot_compile(
    options: EngineOptions, *, target_sm: int | None = None, dump: Path | None = None
) -> list[AotResult]:
    """Compile the programs that ``options`` would run, and keep them in the store.

    Args:
        options: as for a start; a model folder with ``config.json`` is enough.
        target_sm: compute capability to compile for, such as 90; that of the GPU here if None.
        dump: write what each phase made into this folder, or for several programs into one in it
            for each.

    Returns:
        One for each pipeline stage, then one for the model or head that drafts, if there is one.
        On a GPU the kernels of drafts follow each stage, and a drafter of several KV groups.

    Raises:
        UserError: the options compile nothing, or not without the GPU; the artifact cannot be kept.
    """
    startup = StartupReport()
    with startup.phase("config"):
        hardware = target_hardware(options, target_sm)
        model, whole, config = read_model(options, hardware)
        num_stages = whole.pipeline_parallel_size
        programs = {
            f"stage-{number}": (model, stage_of(whole, number), config)
            for number in range(num_stages)
        }
        programs |= _drafter(options, config, whole, hardware)
    absent = is_absent(hardware)
    results: list[AotResult] = []
    for name, (source, spec, own) in programs.items():
        folder = dump / name if dump and len(programs) > 1 else dump
        _check(own, absent, folder)
        store = configured_store(own.store)
        with (
            show_progress() as progress,
            startup.phase("compile"),
            progress.status("Compiling", quiet=LOOKUPS) as say,
        ):
            compiled = find_or_compile(spec, own, store, on_phase=say, record=_record(folder))
        label, left = artifact_label(spec, own), _left(hardware, absent)
        if spec.captured and spec.quant is None and raw_headers(source) is None:
            why = f"{source} has no weights, whose names and shapes a start without it has to know"
            left += (f"import of transformers: {why}; compile the folder with its weights",)
        results.append(AotResult(compiled, label, startup, left, folder))
        startup = StartupReport()
        if drafts_on_gpu(spec, own):
            results.append(_compile_drafts(spec, own, store, startup))
            startup = StartupReport()
    return results


def _compile_drafts(
    spec: ModelSpec, config: ResolvedConfig, store: Store, startup: StartupReport
) -> AotResult:
    with startup.phase("compile"):
        require = config.store.require
        drafts = find_or_compile_drafts(
            spec, config, store, require=require, on_phase=lambda phase: None
        )
    return AotResult(drafts, drafts.artifact.manifest.label, startup, (), None)


def _drafter(
    options: EngineOptions, config: ResolvedConfig, whole: ModelSpec, hardware: Hardware
) -> dict[str, tuple[Path, ModelSpec, ResolvedConfig]]:
    """The program of the model or head that drafts, by its name, if the options ask for one."""
    from .read_draft import read_draft_model

    parts = read_draft_model(options, config, whole, hardware, weights=False)
    return {"draft": (parts.folder, parts.spec, parts.config)} if parts else {}


def target_hardware(options: EngineOptions, target_sm: int | None) -> Hardware:
    """The hardware to compile for: this machine's, or a GPU of ``target_sm``.

    Raises:
        UserError: the two contradict each other.
    """
    if target_sm is None:
        return detect_hardware(options.device)
    if options.device == "cpu":
        raise UserError(f"target_sm={target_sm} contradicts device=cpu: give one of them")
    if not 80 <= target_sm <= 121:
        raise UserError(f"target_sm={target_sm}: expected a compute capability such as 90")
    target = Hardware(device="cuda", name=f"sm_{target_sm}", sm=target_sm, graphs="cuda")
    here = detect_hardware("auto")
    return here if here.sm == target_sm else target


def _record(dump: Path | None) -> Record | None:
    if dump is None:
        return None
    from ..compiler.inspect.dump import Dump

    return Dump(dump)


def _check(config: ResolvedConfig, absent: bool, dump: Path | None) -> None:
    if not config.compile.trace:
        raise UserError("compile: -O0 compiles nothing; use -O1 or higher")
    if not config.store.enabled:
        raise UserError("compile: no_cache would throw the artifact away; drop it")
    if absent and config.compile.tune:
        raise UserError(
            f"compile: -O3 measures kernels on the GPU, and there is no sm_{config.hardware.sm} "
            "here; use -O2, or compile there"
        )
    if config.hardware.device == "cuda" and os.environ.get("TRITON_INTERPRET") == "1":
        raise UserError("TRITON_INTERPRET=1: nothing can be compiled for a GPU; unset it")
    if dump is None:
        return
    if config.store.require:
        raise UserError("dump: needs a build, which require_cache forbids: give one of them")
    make_output_folder("dump", dump)


def _left(hardware: Hardware, absent: bool) -> tuple[str, ...]:
    if hardware.device == "cpu":
        return ()
    left = ["capture of CUDA graphs", "cuBLAS's choice of GEMM kernels"]
    if absent:
        left.append(f"a run on a real sm_{hardware.sm}: nothing has been executed there yet")
    if torch.version.cuda is None:
        left.append(
            f"compilation: an artifact serves the torch that made it, and {torch.__version__} "
            "cannot use a GPU; compile with the torch that will serve"
        )
    return tuple(left)
