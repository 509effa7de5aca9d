"""``PassSizes`` chooses the numbers of sequences for which graphs of draft passes are captured.

A graph is for a number of sequences, a number of drafts and a form of drawing.  Some numbers of
sequences have all of theirs for certain; others have the graphs that are asked for first, as long
as there is memory for more.  None is dropped for another, so whatever comes, there is an end to
captures: what has no graph of its own is padded to the next larger number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from enum import StrEnum
from math import inf

_CERTAIN_BYTES, _MORE_BYTES = 1 << 29, 1 << 28
"""Bytes that the graphs which are certain may take, and bytes of the others."""


class Form(StrEnum):
    """How the drafts of a batch are drawn: the likeliest; by temperature; or by that, filters and
    changed logits, of which a request may have some."""

    LIKELIEST = "likeliest"
    DRAWN = "drawn"
    CHANGED = "changed"


class PassSizes:
    """The numbers of sequences of graphs, each of which is captured once it is chosen.

    Args:
        sizes: numbers of sequences that a graph may be for, ascending.
        most_depth: most drafts of a sequence.
        bytes_of: predicts the bytes of a graph of so many passes.
    """

    def __init__(
        self, sizes: Sequence[int], most_depth: int, bytes_of: Callable[[int], int]
    ) -> None:
        self._sizes, self._bytes_of = sizes, bytes_of
        each = len(Form) * sum(map(bytes_of, range(1, most_depth + 1)))
        self._certain = _thinned(sizes, max(1, _CERTAIN_BYTES // max(each, 1)))
        rest = (len(sizes) - len(self._certain)) * each
        self.most_bytes = len(self._certain) * each + min(rest, _MORE_BYTES)
        """Bytes that all graphs may take."""
        self.forget()

    def forget(self) -> None:
        """No graph is left."""
        self._more, self._left = set[tuple[int, int, Form]](), _MORE_BYTES

    def choose(self, least: int, depth: int, form: Form) -> int:
        """The number of sequences of the graph for at least so many; 0: there is none."""
        for size in self._sizes[bisect_left(self._sizes, least) :]:
            key = (size, depth, form)
            if size in self._certain or key in self._more:
                return size
            if (needed := self._bytes_of(depth)) <= self._left:
                self._more.add(key)
                self._left -= needed
                return size
        return 0


def up_to(most_seqs: int, decode_sizes: Sequence[int]) -> list[int]:
    """The sizes of decodes for which there are graphs, ascending, up to the most sequences of a
    batch, and that number itself, so that a full batch has a graph."""
    if most_seqs > max(decode_sizes, default=0):
        return [*decode_sizes]
    return [*(size for size in decode_sizes if size < most_seqs), most_seqs]


def _thinned(sizes: Sequence[int], count: int) -> set[int]:
    """So many of the sizes at most, with the largest, that padding multiplies sequences by as
    little as it can, up to 5 %."""
    kept, ratio = list(sizes), 1.0
    while len(kept) > count:
        kept, fewest, ratio = [], 1, ratio * 1.05
        for size, following in zip(sizes, [*sizes[1:], inf], strict=True):
            if following > ratio * fewest:
                kept.append(size)
                fewest = size + 1
    return {*kept}
