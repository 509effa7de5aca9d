"""Drafts of a replayed acceptance, so that the speed of drafts is measured without a drafter that
is right so often.

The worker judges them by chance (``ops.accept_tokens``) in place of what the model samples.
Outputs are then not those of the model; steps, rows and their times are.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..request import Request


class AlwaysDrafts:
    """A drafter that always has drafts: n-grams repeat where a text does, and a text
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
