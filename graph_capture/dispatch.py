"""``Dispatcher`` chooses the graph that a step replays: FULL first, else PIECEWISE, else none.

A step's numbers of tokens and sequences go in; the sizes that it runs at come out, padded up to
those that were captured.  Every choice is counted.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from dataclasses import asdict, dataclass
from enum import StrEnum

from ..config import CudagraphMode

_log = logging.getLogger(__name__)


class GraphKind(StrEnum):
    """How a step runs."""

    FULL = "FULL"
    PIECEWISE = "PIECEWISE"
    NONE = "NONE"


@dataclass(frozen=True)
class Dispatch:
    """The choice for one step: the kind of graph, and the sizes at which it runs, with padding.
    ``query_len`` is the number of tokens of every sequence in a FULL graph of decodes, otherwise 0.
    """

    kind: GraphKind
    num_tokens: int
    num_seqs: int
    query_len: int = 0


_MOST_PROMPT_TOKENS = 256
"""Longest prompt that has FULL graphs.  With more tokens, the gaps between pieces are under 3 % of
the step."""


@dataclass
class Outside:
    """Counts the steps of a kind that have more tokens than the largest captured size."""

    steps: int = 0
    most_tokens: int = 0


class Dispatcher:
    """Chooses graphs by batch shape; ``counters[step kind, graph kind]`` counts the choices.

    FULL graphs of decodes have a token a sequence. FULL graphs of mixed steps (mode FULL) have a
    fixed number of sequences; those that a step does not need are empty. This number never equals
    the number of tokens, which attention would take for decodes. In mode FULL_AND_PIECEWISE a
    prompt by itself has FULL graphs too, of up to ``_MOST_PROMPT_TOKENS`` tokens: a piecewise graph
    would leave the device idle twice a layer, before and after attention.

    A step beyond the captured sizes runs without a graph; ``outside`` counts such steps by kind,
    and the first of a kind is logged.
    """

    def __init__(self, mode: CudagraphMode, sizes: tuple[int, ...], max_num_seqs: int) -> None:
        self.decode_sizes: tuple[int, ...] = ()
        self._mixed_sizes: tuple[int, ...] = ()
        self._prompt_sizes: tuple[int, ...] = ()
        self.piecewise_sizes = sizes if mode.piecewise else ()
        self._max_num_seqs = max_num_seqs
        if mode.full_decode:
            self.decode_sizes = tuple(s for s in sizes if s <= max_num_seqs)
        if mode is CudagraphMode.FULL:
            self._mixed_sizes = sizes
        if mode is CudagraphMode.FULL_AND_PIECEWISE:
            self._prompt_sizes = tuple(s for s in sizes if 1 < s <= _MOST_PROMPT_TOKENS)
        self.mode = mode
        self.counters: Counter[tuple[str, str]] = Counter()
        self.outside: dict[str, Outside] = {}

    @property
    def full_sizes(self) -> list[tuple[int, int]]:
        """(tokens, sequences) of every FULL graph but those of ``prompt_sizes``."""
        decode = [(size, size) for size in self.decode_sizes]
        return decode + [(size, self._mixed_seqs(size)) for size in self._mixed_sizes]

    @property
    def prompt_sizes(self) -> list[tuple[int, int]]:
        """(tokens, sequences) of every FULL graph of a prompt by itself."""
        return [(size, 1) for size in self._prompt_sizes]

    @property
    def num_graphs(self) -> int:
        return len(self.full_sizes) + len(self.prompt_sizes) + len(self.piecewise_sizes)

    @property
    def max_seqs(self) -> int:
        """Number of rows that the static buffers need."""
        return max([self._max_num_seqs, *(seqs for _, seqs in self.full_sizes)])

    def choose(self, num_tokens: int, num_seqs: int, *, query_len: int) -> Dispatch:
        """Choose the graph of a step, the smallest that holds it, and count the choice.

        Args:
            query_len: number of tokens of every sequence, if it is the same; else 0.
        """
        decode = query_len == 1
        kind, step = GraphKind.NONE, "decode" if decode else "mixed"
        single = num_seqs == 1 and not decode
        uniform = 0
        if decode and (size := _round_up(num_seqs, self.decode_sizes)):
            kind, num_tokens, num_seqs, uniform = GraphKind.FULL, size, size, 1
        elif single and (size := _round_up(num_tokens, self._prompt_sizes)):
            kind, num_tokens = GraphKind.FULL, size
        elif size := _round_up(num_tokens, self._mixed_sizes):
            kind, num_tokens, num_seqs = GraphKind.FULL, size, self._mixed_seqs(size)
        elif size := _round_up(num_tokens, self.piecewise_sizes):
            kind, num_tokens = GraphKind.PIECEWISE, size
        if kind is GraphKind.NONE:
            self._count_outside(step, num_tokens)
        self.counters[step, kind.value] += 1
        return Dispatch(kind, num_tokens, num_seqs, uniform)

    def _count_outside(self, step: str, num_tokens: int) -> None:
        own = self.decode_sizes if step == "decode" else ()
        largest = max((*own, *self._mixed_sizes, *self.piecewise_sizes), default=0)
        if not largest:
            return  # the mode has no graphs for such steps
        if step not in self.outside:
            # A large prefill keeps the GPU busy anyway; a decode then waits for launches.
            _log.log(
                logging.WARNING if step == "decode" else logging.INFO,
                "a %s step of %d tokens is beyond the largest captured size, %d, and runs without "
                "a graph, as others of its size will: add it to --cudagraph-sizes, or lower %s",
                step,
                num_tokens,
                largest,
                "--max-num-seqs" if step == "decode" else "--max-num-batched-tokens",
            )
        entry = self.outside.setdefault(step, Outside())
        entry.steps += 1
        entry.most_tokens = max(entry.most_tokens, num_tokens)

    def report_outside(self) -> dict[str, dict[str, int]]:
        return {step: asdict(entry) for step, entry in self.outside.items()}

    def _mixed_seqs(self, num_tokens: int) -> int:
        return self._max_num_seqs + (num_tokens == self._max_num_seqs)

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
