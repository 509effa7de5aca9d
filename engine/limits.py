"""``fusewright bench limits`` asks here what bounds a model's steps on a GPU, present or not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..compiler.record import Record
from ..config import EngineOptions, Hardware, UserError
from ..config.device_table import Ceilings, DeviceTable, ceilings
from .aot_compile import lowered_model, target_hardware
from .worker.hardware import detect_hardware
from .worker.progress import show_progress
from .worker.source import artifact_label
from .worker.startup import read_model

if TYPE_CHECKING:
    from ..compiler.inspect.limits import StepSize, StepWork


def ceilings_for(
    gpu: str | None, sm: int | None, tables: Sequence[DeviceTable]
) -> list[tuple[DeviceTable, Ceilings]]:
    """The device tables that are asked for, each with the ceilings of its GPU.

    Args:
        gpu: a part of the GPU's name, in any case; None: of the GPU here, else of all of ``sm``.
        sm: compute capability; None: any.

    Raises:
        UserError: no table is of such a GPU, or the one that is lacks a ceiling.
    """
    here = detect_hardware("auto")
    known = ", ".join(table.gpu for table in tables)
    if gpu is None and sm is None and here.device == "cpu":
        raise UserError(f"limits: there is no GPU here; name one by --gpu, of {known}")
    if gpu is None and here.device == "cuda" and sm in (None, here.sm):
        gpu = here.name
    chosen = [
        table
        for table in tables
        if (gpu is None or gpu.lower() in table.gpu.lower()) and sm in (None, table.sm)
    ]
    if not chosen:
        values = {"gpu": gpu, "target_sm": sm}
        asked = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
        raise UserError(
            f"{asked}: no device table has the ceilings of such a GPU; there are those of {known}; "
            "python -m fusewright.bench.ops.tune_linear measures one on its GPU"
        )
    pairs = [(table, ceilings(table)) for table in chosen]
    for table, each in pairs:
        if not (each.copy_tb_s and each.bfloat16_tflop_s):
            raise UserError(f"{table.name}: lacks copy_tb_s or matrix_tflop_s; measure them")
    return pairs


def step_works(
    options: EngineOptions, sm: int, steps: Iterable[StepSize]
) -> tuple[str, list[StepWork]]:
    """The model's label for a compute capability, and what each step has to do on one rank.

    Args:
        options: as for a start; a folder with ``config.json`` is enough.

    Raises:
        UserError: the options compile nothing, compute in float32, or make a pipeline.
    """
    from ..compiler.inspect.limits import step_work

    hardware: Hardware = target_hardware(options, sm)
    _, spec, config = read_model(options, hardware)
    if not config.compile.trace:
        raise UserError("limits: -O0 compiles nothing; use -O1 or higher")
    if config.precision.dtype == "float32":
        raise UserError(
            "dtype=float32: the rates of a GPU are known for 16 bits and FP8; give --dtype bfloat16"
        )
    if spec.pipeline_parallel_size > 1:
        raise UserError(
            f"pipeline_parallel_size={spec.pipeline_parallel_size}: limits are those of a whole "
            "model; drop it, or divide by --tensor-parallel-size"
        )
    with show_progress() as progress, progress.status("Reading the model's costs") as say:
        source, lowered, _ = lowered_model(spec, config, say, Record())
        works = [step_work(lowered, source.outside, step) for step in steps]
    return artifact_label(spec, config), works
