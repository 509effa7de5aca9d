"""Where the time of a run goes: every step with its device time and the device's pause before it,
summed by what the step computes and how it ran.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..engine.engine import Engine
from ..engine.messages.step import Batch, PendingStep, StepResult


@dataclass
class StepTimes:
    """One step.  ``begun`` and ``ended``: events on a GPU, seconds of the host's clock on a CPU;
    ``waited_s``: what the host waited for its result."""

    decode: bool
    graph: str
    num_seqs: int
    num_tokens: int
    padded_tokens: int
    begun: Any
    ended: Any = None
    waited_s: float = 0.0


@dataclass(frozen=True)
class _Timed:
    pending: PendingStep
    times: StepTimes

    @property
    def has_run(self) -> bool:
        return self.pending.has_run

    def result(self) -> StepResult:
        start = time.perf_counter()
        result = self.pending.result()
        self.times.waited_s = time.perf_counter() - start
        return result


@contextmanager
def recorded(engine: Engine) -> Iterator[list[StepTimes]]:
    """The steps that ``engine`` launches inside the block."""
    steps: list[StepTimes] = []
    runner, dispatcher = engine.core.runner, engine.dispatcher
    launch, choose = runner.launch, dispatcher.choose
    on_gpu = engine.config.hardware.device == "cuda"
    chosen: list[Any] = []

    def now() -> Any:
        if not on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def noted(*args: Any, **kwargs: Any) -> Any:
        chosen[:] = [choose(*args, **kwargs)]
        return chosen[0]

    def timed(batch: Batch) -> PendingStep:
        begun = now()
        pending = launch(batch)
        times = StepTimes(
            batch.query_len == 1,
            chosen[0].kind.value,
            batch.num_seqs,
            batch.num_tokens,
            chosen[0].num_tokens,
            begun,
            now(),
        )
        steps.append(times)
        return _Timed(pending, times)

    vars(dispatcher)["choose"], vars(runner)["launch"] = noted, timed
    try:
        yield steps
    finally:
        del vars(dispatcher)["choose"], vars(runner)["launch"]


def _ms(begun: Any, ended: Any) -> float:
    if not isinstance(begun, torch.cuda.Event):
        return float(ended - begun) * 1e3
    ended.synchronize()
    return float(begun.elapsed_time(ended))


def account(steps: Sequence[StepTimes]) -> list[dict[str, Any]]:
    """A row for each kind of step and of graph, in s: ``device_s`` of steps, by events around their
    launches, ``pause_s`` of the device before them, ``waited_s`` of the host for results.  ``seqs``
    and ``tokens`` are sums; ``padding`` is the share of computed tokens that nobody asked for.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    before: StepTimes | None = None
    for step in steps:
        kind = "decode" if step.decode else "mixed"
        fresh = {"kind": kind, "graph": step.graph, "steps": 0, "seqs": 0, "tokens": 0}
        row = rows.setdefault(
            (kind, step.graph),
            {**fresh, "padding": 0, "device_s": 0.0, "pause_s": 0.0, "waited_s": 0.0},
        )
        row["steps"] += 1
        row["seqs"] += step.num_seqs
        row["tokens"] += step.num_tokens
        row["padding"] += step.padded_tokens - step.num_tokens
        row["device_s"] += _ms(step.begun, step.ended) / 1e3
        if before is not None:
            row["pause_s"] += max(0.0, _ms(before.ended, step.begun) / 1e3)
        row["waited_s"] += step.waited_s
        before = step
    for row in rows.values():
        row["padding"] = round(row["padding"] / (row["padding"] + row["tokens"]), 4)
        row |= {name: round(row[name], 4) for name in ("device_s", "pause_s", "waited_s")}
    return list(rows.values())
