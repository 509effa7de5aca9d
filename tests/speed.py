"""How slow this machine is at the moment, for the few tests whose point is a bound on time."""

from __future__ import annotations

import time
from collections.abc import Callable

_ROUND_S = 44e-6
"""Of ``_round`` on the two idle cores on which the bounds were met."""


def _round() -> int:
    """Some of what Python spends its time on: dicts, lists, tuples, strings, calls."""
    table: dict[int, tuple[int, str]] = {}
    out = []
    for i in range(400):
        table[i] = (i, str(i))
        out.append(table[i // 2])
    return sum(len(text) for _, text in out)


def slowness(seconds: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """How many times as long as there plain Python takes here and now, at least 1.

    Args:
        seconds: what to spend on finding out, on that machine: about as long as what is bounded,
            so that both meet as much of what else runs.
    """
    rounds = max(1, round(seconds / _ROUND_S))
    start = clock()
    for _ in range(rounds):
        _round()
    return max(1.0, (clock() - start) / (rounds * _ROUND_S))
