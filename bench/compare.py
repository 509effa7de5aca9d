"""Two results of one bench beside each other: what got slower."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import UserError
from .result_file import read_result

_WORK = ("batch", "input_len", "output_len", "workload", "request_rate")
_RATES = ("requests_per_s", "output_tokens_per_s", "goodput_per_s")


@dataclass(frozen=True)
class Change:
    """One figure of one work in two runs; ``slower`` is above 1 when the new one is worse."""

    work: str
    figure: str
    old: float
    new: float

    @property
    def slower(self) -> float:
        return self.old / self.new if self.figure in _RATES else self.new / self.old


def load(path: Path) -> list[dict[str, Any]]:
    """The rows of a result of ``fusewright bench latency`` or ``throughput``.

    Raises:
        UserError: it cannot be read, or is no such file.
    """

    def rows(record: dict[str, Any]) -> list[dict[str, Any]]:
        for row in record["rows"]:
            _work(row)
        return list(record["rows"])

    return read_result(path, "bench latency` or `throughput", rows)


def compare(old: Path, new: Path) -> list[Change]:
    """Every figure that both have, the largest loss first.

    Raises:
        UserError: they measured nothing in common.
    """
    before = {_work(row): dict(_figures(row)) for row in load(old)}
    changes = [
        Change(_work(row), figure, before[_work(row)][figure], value)
        for row in load(new)
        for figure, value in _figures(row)
        if before.get(_work(row), {}).get(figure) and value
    ]
    return largest_first(changes, old, new)


def largest_first(changes: Sequence[Change], old: Path, new: Path) -> list[Change]:
    """Sorted by loss.

    Raises:
        UserError: there are none.
    """
    if not changes:
        raise UserError(f"{old} and {new} measured nothing in common")
    return sorted(changes, key=lambda change: -change.slower)


def _work(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {row[name]}" for name in _WORK if row.get(name) is not None)


def _figures(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Rates, and times in ms: those that are one number, and the medians of the others."""
    for name, value in row.items():
        if name in _RATES or (name in ("tpot_ms", "ttft_ms") and isinstance(value, float)):
            yield name, value
        elif name.endswith("_ms") and isinstance(value, dict) and "p50" in value:
            yield f"{name} p50", value["p50"]
