"""Shows the limits of a model's steps on a GPU, beside what ``bench latency`` measured there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...compiler.inspect.limits import StepLimit, StepSize, StepWork, limit_of
from ...config import UserError
from ...config.device_table import Ceilings
from ..result_file import read_results

if TYPE_CHECKING:
    from ...engine.llm import LLM

Record = dict[str, Any]
LAUNCH_US = 0.93
"""A tiny kernel inside a CUDA graph, back to back with others, on an H200; 2026-11-21."""
_SAME = ("quantization", "kv_cache_dtype", "tensor_parallel_size", "dtype")


@dataclass(frozen=True)
class Measured:
    """Steps that were timed.

    Attributes:
        gpu: where; "" if the result does not say.
        ms: by the step: time per output token, or to the first token of all requests.
    """

    gpu: str
    ms: Mapping[StepSize, float]


def read_measured(path: Path, options: Mapping[str, Any]) -> Measured:
    """The steps of a result of ``bench latency``.

    Raises:
        UserError: it cannot be read, is no such result, or is of another precision or number of
            ranks than ``options``.
    """
    return read_results(path, "bench latency", lambda records: _measured(records, options, path))


def measure_here(llm: LLM, batches: Sequence[int], **how: int) -> Measured:
    """Time the decode steps of so many requests, and their prefill, as ``bench latency`` does;
    ``how`` are options of ``measure_latency``."""
    from ..latency import measure_latency

    rows = [measure_latency(llm, batch, **how) for batch in batches]
    return Measured(str(llm.report()["hardware"]), measured_rows([{"rows": rows}]))


def measured_rows(records: Iterable[Record]) -> dict[StepSize, float]:
    """A step for each TPOT, at the middle of its output, and one for each TTFT."""
    steps: dict[StepSize, float] = {}
    for row in (row for record in records for row in record["rows"]):
        batch, inputs, outputs = (row[name] for name in ("batch", "input_len", "output_len"))
        steps[StepSize(batch, 1, inputs + outputs // 2)] = row["tpot_ms"]
        steps[StepSize(batch, inputs, inputs)] = row["ttft_ms"]
    return dict(sorted(steps.items(), key=lambda each: (not each[0].decode, each[0].num_tokens)))


def _measured(records: Sequence[Record], options: Mapping[str, Any], path: Path) -> Measured:
    for record in records:
        for name in _SAME:
            was, asked = record["options"].get(name), options.get(name)
            if was != asked:
                raise UserError(
                    f"{path}: measured with {name}={was}, asked is {name}={asked}; give the same"
                )
    gpus = {str(record["environment"].get("device", "")) for record in records}
    if len(gpus) != 1:
        raise UserError(f"{path}: measured on {' and '.join(sorted(gpus))}; give one GPU's result")
    return Measured(gpus.pop(), measured_rows(records))


@dataclass(frozen=True)
class Beside:
    """A step's limit beside its measured time.

    Attributes:
        ms: measured; None: not.
    """

    limit: StepLimit
    ms: float | None = None

    @property
    def of_limit(self) -> float | None:
        """The share of the measured time that the limit explains."""
        return None if self.ms is None else self.limit.ms / self.ms

    @property
    def difference_ms(self) -> float | None:
        return None if self.ms is None else self.ms - self.limit.ms

    @property
    def launches_ms(self) -> float | None:
        """Least time of the step's launches, some of which overlap."""
        count = self.limit.launches
        return None if count is None else count * LAUNCH_US / 1e3

    def to_json(self) -> Record:
        measured: Record = {}
        if self.ms is not None:
            assert self.of_limit is not None
            launches = self.launches_ms
            measured = {
                "measured_ms": self.ms,
                "of_limit": round(self.of_limit, 4),
                "difference_ms": {"launches": launches, "all": self.difference_ms},
            }
        return {**self.limit.to_json(), **measured}


@dataclass(frozen=True)
class GpuLimits:
    """The steps on one GPU."""

    ceilings: Ceilings
    steps: tuple[Beside, ...]

    def to_json(self) -> Record:
        return {**asdict(self.ceilings), "steps": [step.to_json() for step in self.steps]}


def on_gpu(
    ceilings: Ceilings, works: Sequence[StepWork], measured: Mapping[StepSize, float]
) -> GpuLimits:
    """The limits of all steps, with what was measured of them there."""
    steps = (Beside(limit_of(work, ceilings), measured.get(work.step)) for work in works)
    return GpuLimits(ceilings, tuple(steps))
