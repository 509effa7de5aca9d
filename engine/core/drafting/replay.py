"""Replays an acceptance that is given by position, so that the speed of drafts is measured without
a drafter that is right so often.

Drafts are judged by chance in place of what the model samples.  Outputs are then not those of the
model; steps, rows and their times are.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..request import Request

_MASK = (1 << 64) - 1


class Judge:
    """Judges drafts by chance, the same at every run.

    Args:
        acceptance: probability of each position that its draft counts as right if those before it
            do.
    """

    def __init__(self, acceptance: Sequence[float], seed: int = 0) -> None:
        self._acceptance, self._seed = acceptance, seed

    def accepts(self, request: Request, start: int, number: int) -> bool:
        """Whether draft ``number`` of a request, which is at position ``start``, counts as right;
        all before it did if the tokens up to there are known."""
        if request.num_known_tokens != start + 1:
            return False
        word = _mixed(self._seed + _mixed(request.arrival + 1) + start)
        return (word >> 11) * 2.0**-53 < self._acceptance[number]


def _mixed(word: int) -> int:
    """A hash of 64 bits (splitmix64: Steele, Lea and Flood, 2014)."""
    word = (word + 0x9E3779B97F4A7C15) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


class AlwaysDrafts:
    """A drafter that always has drafts, for ``Judge``: n-grams repeat where a text does, and a text
    that is judged by chance is none."""

    method, is_quick, stores_drafts = "ngram", True, False

    def wants(self, request: Request) -> bool:
        return True

    def propose(self, requests: Sequence[Request], most: int) -> list[list[int]]:
        lasts = [request.num_known_tokens - 1 for request in requests]
        return [
            request.tokens(last, last + 1) * most
            for request, last in zip(requests, lasts, strict=True)
        ]

    def settle(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """What became of its drafts says nothing of the next."""

    def forget(self, request: Request) -> None:
        """It remembers nothing."""
