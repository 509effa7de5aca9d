"""Keeps the account of a start: begin and length of every phase, from the birth of the process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def process_age_s() -> float:
    """Seconds since this process was started, to 10 ms; what the kernel says."""
    # Field 22, counted after the parenthesized name, which may hold spaces (proc(5)).
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


@dataclass(frozen=True)
class StartupPhase:
    """``begin_s`` counts from the start of the process; ``beside``: while other phases ran."""

    name: str
    begin_s: float
    seconds: float
    beside: bool


@dataclass
class StartupReport:
    """Phases in order of their end."""

    begin_s: float = field(default_factory=process_age_s)
    phases: list[StartupPhase] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str, *, beside: bool = False) -> Iterator[None]:
        """Time a phase; ``beside``: in a thread of its own, while others run."""
        begin_s, start = process_age_s(), time.perf_counter()
        yield
        self.phases.append(StartupPhase(name, begin_s, time.perf_counter() - start, beside))

    @property
    def seconds(self) -> dict[str, float]:
        return {phase.name: phase.seconds for phase in self.phases}

    def to_json(self) -> dict[str, Any]:
        """Plain data: ``imports_s`` is what passed before the engine, in a process of its own."""
        return {
            "imports_s": round(self.begin_s, 3),
            "phases": [
                {
                    "name": phase.name,
                    "begin_s": round(phase.begin_s, 3),
                    "seconds": round(phase.seconds, 4),
                    "beside": phase.beside,
                }
                for phase in sorted(self.phases, key=lambda phase: phase.begin_s)
            ],
        }
