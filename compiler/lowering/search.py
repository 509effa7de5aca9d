"""The searcher of everything that is chosen by measurement.

A point is what a choice is made for, such as a weight and a range of rows, or a number of tokens.
A measure times the candidates of a point, the incumbent first: what runs without the measurement.
``-O3``, ``fusewright tune moe`` and ``bench/ops/tune_linear.py``, which wrote the shipped tables,
search through ``tune.py``, ``tune_experts.py`` and ``tune_library.py``.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from ... import ops
from ...config.device_table import DeviceTable, Measured, file_name
from ...config.expert_tables import installed_triton
from ...ops.core.device_table import gpu_of, num_sms

LEAST_GAIN = 0.02
"""The share of the incumbent's time that a candidate must save to take its place."""
CALLS, ROUNDS = 20, 5

Point = TypeVar("Point", bound=Hashable)
Candidate = TypeVar("Candidate", bound=Hashable)
Times: TypeAlias = Mapping[Candidate, float]
"""Microseconds of each candidate, the incumbent first; infinite for one that does not run."""


@dataclass
class Found(Generic[Point, Candidate]):
    """The outcome of a search: the times at each point that was measured, points whose answer was
    known, and points for which no time was left."""

    times: dict[Point, Times[Candidate]] = field(default_factory=dict)
    known: int = 0
    skipped: list[Point] = field(default_factory=list)

    def winners(self) -> dict[Point, Candidate]:
        return {point: winner(times) for point, times in self.times.items()}

    def us(self, point: Point) -> tuple[float, float]:
        """Microseconds of the winner and of the incumbent."""
        times = self.times[point]
        return times[winner(times)], next(iter(times.values()))

    def to_json(self) -> dict[str, Any]:
        us = {str(point): list(self.us(point)) for point in self.times}
        return {"us": us, "known": self.known, "skipped": [*map(str, self.skipped)]}


def winner(times: Times[Candidate]) -> Candidate:
    """The fastest candidate, if it gains enough; else the incumbent."""
    incumbent, best = next(iter(times)), min(times, key=times.__getitem__)
    return best if times[best] < times[incumbent] * (1 - LEAST_GAIN) else incumbent


def search(
    points: Iterable[Point],
    measures: Sequence[Callable[[Point], Times[Candidate] | None]],
    *,
    seconds: float,
    on_point: Callable[[int, int], None] = lambda done, total: None,
    on_done: Callable[[Point, Found[Point, Candidate]], None] = lambda point, search: None,
    clock: Callable[[], float] = time.monotonic,
) -> Found[Point, Candidate]:
    """Measure each point, until the time is up.

    Args:
        measures: one for each GPU.  Each takes the next point when it is free; None: no result.
        on_point: called before each point with the number that were begun and of all.
        on_done: called after each point that was measured, one call at a time.

    Raises:
        Exception: that of a measure, after the others have finished what they were at.
    """
    end, outcome, lock = clock() + seconds, Found[Point, Candidate](), Lock()
    left = deque(points)
    total = len(left)

    def take() -> Point | None:
        with lock:
            if left and clock() >= end:
                outcome.skipped.extend(left)
                left.clear()
            if not left:
                return None
            on_point(total - len(left), total)
            return left.popleft()

    def work(measure: Callable[[Point], Times[Candidate] | None]) -> None:
        while (point := take()) is not None:
            try:
                times = measure(point)
            except BaseException:
                with lock:
                    left.clear()
                raise
            if times is not None:
                with lock:
                    outcome.times[point] = times
                    on_done(point, outcome)

    first, *others = measures  # the first in this thread, whose modes and device hold
    with ThreadPoolExecutor(max(len(others), 1)) as pool:
        started = [pool.submit(work, measure) for measure in others]
        work(first)
    for each in started:
        each.result()
    return outcome


def table_here(commit: str = "", how: str = "", **sections: Any) -> DeviceTable:
    """Make a device table of the sections that are not empty, measured on this GPU with these
    libraries; ``commit`` and ``how`` as of ``Measured``."""
    device = torch.device("cuda")
    (gpu, sm), memory = gpu_of(device), 0
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(device).total_memory
    versions = {"torch": str(torch.__version__), "cuBLASLt": ops.installed_cublaslt()}
    versions["Triton"] = installed_triton()
    held = {name: content for name, content in sections.items() if content}
    measured = dict.fromkeys(held, Measured(gpu, versions, commit, how))
    return DeviceTable(file_name(gpu), gpu, sm, num_sms(device), memory, measured, **held)


def graph_us(
    fns: Sequence[Callable[[], Any]], *, calls: int = CALLS, rounds: int = ROUNDS
) -> float:
    """Median microseconds of a call inside a CUDA graph of ``calls``, taking turns over ``fns``."""
    with torch.inference_mode():
        fns[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(calls):
                fns[i % len(fns)]()
        times = []
        for _ in range(rounds):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / calls)
    return float(statistics.median(times))
