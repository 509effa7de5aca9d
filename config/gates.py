"""Decides which passes run on which GPU, from one measured table, ``gates.json``.

``fusewright bench passes --update-gates`` writes it: for each pass, the time of a whole step with
the pass and without, at several numbers of rows.  One graph serves every number of rows, so a pass
is on or off for all of them; where a fused op can select a kernel by row count, it does so when it
is called.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

GATES = Path(__file__).with_name("gates.json")
LEAST_NOISE = 0.005
"""A smaller difference decides nothing, however well it is measured: machines differ by more."""
MOST_NOISE = 0.01
"""A larger loss counts, however badly it is measured."""


@dataclass(frozen=True)
class Measured:
    """The gain of one pass in a whole model.

    Attributes:
        name: of the pass.
        sm: compute capability that the figures apply to; a baked artifact knows nothing else of
            its GPU.
        dtype: of the weights, or how they are quantized.
        gpu, model, commit, source: where they come from.
        on_ms, off_ms: what was run -> ms a step with and without the pass: ``decode 64`` has 64
            rows, ``prefill 2048`` has 2048.
        noise: for each of these, the share of a step by which rounds, and two captures of one
            program, differed.
    """

    name: str
    sm: int
    dtype: str
    gpu: str
    model: str
    commit: str
    source: str
    on_ms: Mapping[str, float]
    off_ms: Mapping[str, float]
    noise: Mapping[str, float]

    @property
    def ratios(self) -> dict[str, float]:
        """Time with the pass over time without: below 1 it gains."""
        return {work: self.on_ms[work] / self.off_ms[work] for work in self.on_ms}

    @property
    def losses(self) -> list[str]:
        """The steps that are slower by more than the noise, or by more than ``MOST_NOISE`` whatever
        the noise."""
        most = {work: min(MOST_NOISE, self._noise(work)) for work in self.on_ms}
        return [work for work, ratio in self.ratios.items() if ratio > 1 + most[work]]

    def _noise(self, work: str) -> float:
        return max(LEAST_NOISE, self.noise[work])

    def __str__(self) -> str:
        figures = ", ".join(
            f"{work} {self.on_ms[work]:.3f} against {self.off_ms[work]:.3f} ms ({ratio - 1:+.1%} "
            f"± {self.noise[work]:.1%})"
            for work, ratio in self.ratios.items()
        )
        return f"on against off: {figures}; {self.gpu}, {self.dtype}"


@cache
def measured_passes(path: Path = GATES) -> tuple[Measured, ...]:
    """The table."""
    return tuple(Measured(**entry) for entry in json.loads(path.read_text())["measured"])


def find(name: str, sm: int, dtype: str, path: Path = GATES) -> Measured | None:
    """The gate of a pass on a GPU; None if nothing is known."""
    known = (m for m in measured_passes(path) if (m.name, m.sm, m.dtype) == (name, sm, dtype))
    return next(known, None)


def why_off(name: str, sm: int, dtype: str, path: Path = GATES) -> str:
    """Why a level leaves a pass out, or an empty string."""
    measured = find(name, sm, dtype, path)
    return verdict(measured) if measured else ""


def verdict(measured: Measured) -> str:
    """Why a pass with these figures is off, or an empty string: it loses somewhere by more than the
    noise."""
    return f"it loses: {measured}" if measured.losses else ""


def update(new: Iterable[Measured], path: Path = GATES) -> None:
    """Put figures into the table, in place of those of the same pass, GPU and dtype."""
    table: dict[tuple[str, int, str], Any] = {
        (m.name, m.sm, m.dtype): m for m in (*measured_passes(path), *new)
    }
    entries = [asdict(table[key]) for key in sorted(table)]
    path.write_text(json.dumps({"measured": entries}, indent=1) + "\n")
    measured_passes.cache_clear()
