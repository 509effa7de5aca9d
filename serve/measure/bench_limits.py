"""``fusewright bench limits``: what bounds each step of a model on a GPU, and where time goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...config import UserError
from ...config.numbers import MOST_REQUESTS, check_counts
from ..console.flags import TargetSm, model_flags
from ..console.options import check_to_measure, checked
from ..console.table import table
from .bench_engine import llm_to_measure
from .measured import Result

if TYPE_CHECKING:
    from ...bench.limits.beside import Beside, GpuLimits, Measured
    from ...compiler.inspect.limits import StepSize

_ROWS = (1, 8, 17, 32, 64, 128, 256, 512)
_PREFILLS = (2048, 8192)
_ROWS_LISTED, _PREFILLS_LISTED = (", ".join(map(str, each)) for each in (_ROWS, _PREFILLS))
_MOST_TOKENS = 1 << 20


_LIMIT = (
    "limit: each call takes the longer time of its bytes and of its arithmetic, and calls run one "
    "after the other; overlapped: all bytes beside all arithmetic. * bound by arithmetic."
)
_COUNTED = (
    "Of experts, those count that the tokens choose on average if all are equally likely. "
    "Transfers between ranks are not counted."
)


@dataclass(frozen=True)
class Steps:
    """Flags of the steps whose limits are asked for, and of the GPU.

    Raises:
        UserError: a count is out of its range, or sizes are given beside those of a result.
    """

    target_sm: TargetSm = None
    gpu: Annotated[
        str | None,
        typer.Option(help="Part of a GPU's name, such as H200, in place of the one here."),
    ] = None
    batch_size: Annotated[
        list[int] | None, typer.Option(help=f"Requests of a decode step. [default: {_ROWS_LISTED}]")
    ] = None
    context: Annotated[int | None, typer.Option(help="KV positions of each. [default: 192]")] = None
    prefill: Annotated[
        list[int] | None,
        typer.Option(help=f"Tokens of a prefill step. [default: {_PREFILLS_LISTED}]"),
    ] = None
    input_len: Annotated[
        int | None, typer.Option(help="Tokens of each prompt of a prefill step. [default: 128]")
    ] = None
    measured: Annotated[
        Path | None,
        typer.Option(help="Result of bench latency: its steps, with their times beside."),
    ] = None

    measure: Annotated[
        bool,
        typer.Option(help="Time the decode steps, and their prefill, on the GPU here first."),
    ] = False

    def __post_init__(self) -> None:
        sizes = {
            "measure": self.measure,
            "batch_size": self.batch_size,
            "context": self.context,
            "prefill": self.prefill,
            "input_len": self.input_len,
        }
        chosen = [name for name, size in sizes.items() if size]
        if self.measured is not None and chosen:
            raise UserError(f"{chosen[0]}: the steps are those of --measured; give one of them")
        if self.measure and (others := {*chosen} - {"measure", "batch_size"}):
            raise UserError(f"{min(others)}: --measure has steps of its own; give --batch-size")
        if self.measure and self.target_sm is not None:
            raise UserError("target_sm: --measure is for the GPU here; drop one of them")
        for count in self.batch_size or ():
            check_counts(1, MOST_REQUESTS, batch_size=count)
        for count in self.prefill or ():
            check_counts(2, _MOST_TOKENS, prefill=count)
        if self.context is not None:
            check_counts(1, context=self.context)
        if self.input_len is not None:
            check_counts(2, _MOST_TOKENS, input_len=self.input_len)
        for tokens in self.prefills:
            if tokens % min(self.prompt_len, tokens):
                raise UserError(
                    f"prefill={tokens}: expected a multiple of {self.prompt_len}, the "
                    "tokens of each prompt (--input-len)"
                )

    @property
    def prefills(self) -> Sequence[int]:
        return self.prefill or _PREFILLS

    @property
    def prompt_len(self) -> int:
        return self.input_len or 128

    def sizes(self) -> list[StepSize]:
        """The steps that are asked for."""
        from ...compiler.inspect.limits import equal_steps

        rows, context = self.batch_size or _ROWS, self.context or 192
        return equal_steps(rows, context, self.prefills, self.prompt_len)


@model_flags
def limits(
    engine: dict[str, Any],
    *,
    of: Steps,
    result: Result,
    plot: Annotated[Path | None, typer.Option(help="Draw the limits to this PNG.")] = None,
) -> None:
    """What bounds each step size of a model on a GPU, by bytes and by arithmetic.

    No GPU is needed, nor weights.  --measured puts times of bench latency beside.
    """
    result.check(plot)
    options = checked(engine)
    from ...bench.limits.beside import Measured, on_gpu, read_measured
    from ...config.device_table import shipped
    from ...engine.limits import ceilings_for, step_works

    measured = Measured("", {})
    if of.measured is not None:
        measured = read_measured(of.measured, engine)
    elif of.measure:
        measured = _timed(engine, of.batch_size or _ROWS)
    pairs = ceilings_for(of.gpu or measured.gpu or None, of.target_sm, shipped())
    if measured.gpu and [t.gpu for t, _ in pairs] != [measured.gpu]:
        raise UserError(f"gpu={of.gpu}: the steps were measured on {measured.gpu}; drop --gpu")
    steps = list(measured.ms) or of.sizes()
    told = []
    labels = {}
    for sm in dict.fromkeys(device.sm for device, _ in pairs):
        labels[sm], works = step_works(options, sm, steps)
        told += [on_gpu(each, works, measured.ms) for device, each in pairs if device.sm == sm]
    unknown = sum(work.unknown for work in works[:1])
    for label in labels.values():
        result.say(label)
    for each in told:
        result.say(f"\n{_text(each)}")
    result.say(_notes(told, unknown))
    result.keep(engine, plot, label=next(iter(labels.values())), limits=[t.to_json() for t in told])


def _timed(engine: dict[str, Any], batches: Sequence[int]) -> Measured:
    """The steps of the GPU here.  The engine has ended when its limits are read."""
    from ...bench.limits.beside import measure_here
    from ...engine.worker.hardware import detect_hardware

    if detect_hardware("auto").device != "cuda":
        raise UserError(
            "measure: there is no GPU here; keep a result of bench latency on one by --output, and "
            "give it as --measured"
        )
    check_to_measure(engine)
    with llm_to_measure(engine) as llm:
        return measure_here(llm, batches)


def _text(gpu: GpuLimits) -> str:
    rates = gpu.ceilings
    head = (
        f"{rates.gpu}: copies {rates.copy_tb_s:g} TB/s, multiplies {rates.bfloat16_tflop_s:g} "
        f"TFLOP/s in 16 bits and {rates.fp8_tflop_s:g} in FP8. Times in ms."
    )
    families = list(gpu.steps[0].limit.families)
    has_times = any(step.ms is not None for step in gpu.steps)
    columns = ["step", "context", "limit", "bound by", *families, "overlapped", "GB", "TFLOP"]
    columns += ["measured", "of limit", "difference", "launches", "other"] if has_times else []
    rows = [columns]
    for step in gpu.steps:
        limit = step.limit
        parts = [_part(each.ms, each.bound) for each in limit.families.values()]
        row = [str(limit.step), str(limit.step.context), f"{limit.ms:.3f}", limit.bound, *parts]
        row += [f"{limit.overlapped_ms:.3f}", f"{limit.bytes / 1e9:.3f}"]
        row.append(f"{limit.flops / 1e12:.3f}")
        rows.append(row + (_difference(step) if has_times else []))
    return f"{head}\n{table(rows)}"


def _part(ms: float, bound: str) -> str:
    return "-" if not ms else f"{ms:.3f}{'*' if bound == 'arithmetic' else ''}"


def _difference(step: Beside) -> list[str]:
    """Measured, its share that the limit explains, and where the difference goes."""
    if step.ms is None or step.difference_ms is None or step.of_limit is None:
        return ["-"] * 5
    cells = [f"{step.ms:.3f}", f"{step.of_limit:.1%}", f"{step.difference_ms:.3f}"]
    if step.launches_ms is None:
        return [*cells, "?", "?"]
    return [*cells, f"{step.launches_ms:.3f}", f"{step.difference_ms - step.launches_ms:.3f}"]


def _notes(told: list[GpuLimits], unknown: int) -> str:
    from ...bench.limits.beside import LAUNCH_US

    has_times = any(step.ms is not None for gpu in told for step in gpu.steps)
    notes = [
        "",
        _LIMIT,
        _COUNTED,
    ]
    if has_times:
        notes.append(
            f"launches: {LAUNCH_US} us each, as tiny kernels take inside a CUDA graph; large ones "
            "hide a part of it in each other. other: kernels below their ceiling, and the host."
        )
    if unknown:
        calls = (
            "1 call of a step is an ATen op" if unknown == 1 else f"{unknown} calls are ATen ops"
        )
        notes.append(f"{calls}, whose cost is not known.")
    return "\n".join([*notes, *dict.fromkeys(note for gpu in told for note in gpu.ceilings.notes)])
