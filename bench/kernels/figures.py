"""Kernel benchmarks as data: what pytest-benchmark measured, kept and compared."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ...config import UserError
from ...config.device_table import ceilings, shipped
from ..compare import Change, largest_first

_H200 = next(ceilings(table) for table in shipped() if table.gpu == "NVIDIA H200")
COPY_TB_S, BF16_TFLOP_S, FP8_TFLOP_S = _H200.copy_tb_s, _H200.bfloat16_tflop_s, _H200.fp8_tflop_s


@dataclass(frozen=True)
class Figure:
    """One contender on one work: median microseconds a call, and the least it must do; the number
    of rounds and what they differed by, as a share of the median, where it was recorded."""

    op: str
    label: str
    contender: str
    library: bool
    us: float
    bytes: float
    flops: float
    n: int = 0
    spread: float = 0.0

    @property
    def gb_s(self) -> float:
        return self.bytes / self.us / 1e3

    @property
    def tflop_s(self) -> float:
        return self.flops / self.us / 1e6

    @property
    def share(self) -> float:
        """Share of the ceiling that this work meets first: the copy rate, or the peak FLOP/s."""
        peak = FP8_TFLOP_S if "fp8" in f"{self.op} {self.label}".lower() else BF16_TFLOP_S
        return max(self.gb_s / (COPY_TB_S * 1e3), self.tflop_s / peak)

    @property
    def key(self) -> tuple[str, str, str]:
        """Identifies the figure in another run, whichever of our kernels was chosen there."""
        return self.op, self.label, self.contender if self.library else "ours"


def figure_of(extra: Mapping[str, Any], rounds: Sequence[float]) -> Figure:
    """A figure from what ``harness.measure`` left with a benchmark, and the rounds' seconds."""
    seconds = statistics.median(rounds)
    named = {f.name: extra[f.name] for f in fields(Figure) if f.name in extra}
    spread = round((max(rounds) - min(rounds)) / seconds, 4)
    us = round(seconds * 1e6 / extra["calls"], 3)
    return Figure(**named, us=us, n=len(rounds), spread=spread)


def save(path: Path, environment: Mapping[str, Any], figures: Iterable[Figure]) -> None:
    """One JSON object a line: the environment, then each figure."""
    path.write_text(json.dumps({"environment": dict(environment)}) + "\n")
    for figure in figures:
        add(path, figure)


def add(path: Path, figure: Figure) -> None:
    """Append a figure as soon as it is measured, so that a run that is cut short loses nothing."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(figure)) + "\n")


def load(path: Path) -> tuple[dict[str, Any], list[Figure]]:
    """(environment, figures) of a file that ``save`` wrote.

    Raises:
        UserError: it cannot be read, or is not such a file.
    """
    try:
        lines = path.read_text().splitlines(keepends=True)
        head, *rest = [json.loads(line) for line in lines if line.endswith("\n")]
        return head["environment"], [Figure(**figure) for figure in rest]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not a result of `fusewright bench kernels --output`: {error}"
        ) from error


def compare(old: Path, new: Path) -> list[Change]:
    """The figures that both runs have, the largest slowdown first.

    Raises:
        UserError: as ``load``; or they measured nothing in common.
    """
    before = {figure.key: figure for figure in load(old)[1]}
    changes = [
        Change(f"{figure.op} {figure.label}", f"{figure.contender}, us", was.us, figure.us)
        for figure in load(new)[1]
        if (was := before.get(figure.key))
    ]
    return largest_first(changes, old, new)
