"""Which graph a step replays: FULL first, else PIECEWISE, else none; every choice is counted."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from ..config import CaptureConfig


class GraphKind(StrEnum):
    """How a step runs."""

    FULL = "FULL"
    PIECEWISE = "PIECEWISE"
    NONE = "NONE"


@dataclass(frozen=True)
class Dispatch:
    """The choice for one step: ``num_tokens`` includes padding up to the captured size."""

    kind: GraphKind
    num_tokens: int


class Dispatcher:
    """Chooses by batch shape alone; ``counters[(step kind, graph kind)]`` says what happened."""

    def __init__(self, config: CaptureConfig, max_num_seqs: int) -> None:
        mode = config.mode
        decode_sizes = tuple(s for s in config.sizes if s <= max_num_seqs)
        self.full_sizes = decode_sizes if mode.full_decode else ()
        self.piecewise_sizes = config.sizes if mode.piecewise else ()
        self.counters: Counter[tuple[str, str]] = Counter()

    @property
    def num_graphs(self) -> int:
        """How many sizes are to be captured."""
        return len(self.full_sizes) + len(self.piecewise_sizes)

    def choose(self, num_tokens: int, *, uniform_decode: bool) -> Dispatch:
        """Pick the graph of a step of ``num_tokens`` tokens, and count it."""
        dispatch = Dispatch(GraphKind.NONE, num_tokens)
        if uniform_decode and (size := _round_up(num_tokens, self.full_sizes)):
            dispatch = Dispatch(GraphKind.FULL, size)
        elif size := _round_up(num_tokens, self.piecewise_sizes):
            dispatch = Dispatch(GraphKind.PIECEWISE, size)
        self.counters["decode" if uniform_decode else "mixed", dispatch.kind.value] += 1
        return dispatch

    def report(self) -> dict[str, dict[str, int]]:
        """Counters as nested plain data: step kind -> graph kind -> steps."""
        table: dict[str, dict[str, int]] = {}
        for (step, graph), count in sorted(self.counters.items()):
            table.setdefault(step, {})[graph] = count
        return table


def _round_up(num_tokens: int, sizes: tuple[int, ...]) -> int:
    """The smallest size that holds ``num_tokens``; 0 when none does."""
    index = bisect_left(sizes, num_tokens)
    return sizes[index] if index < len(sizes) else 0
