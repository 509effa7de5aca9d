"""Ends the thinking of an output when its budget is spent, by forcing the tokens that close it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..messages.token_ids import ThinkingTokens

_LEAD = 4
"""Tokens that may come before a start mark: white space.  Behind them an output does not think."""


@dataclass(slots=True)
class Thinking:
    """Follows the thinking of one output.

    Attributes:
        budget: tokens of thinking behind which the end is forced.
        opened_at: number of output tokens behind which the thinking begins; -1: it has not begun.
        is_over: it has been closed, or never begins.
        forced_at: index of the output token from which on tokens are forced; -1: none are.
        num_written: how many of them the model had written itself by then.
    """

    tokens: ThinkingTokens
    budget: int
    opened_at: int = -1
    is_over: bool = False
    forced_at: int = -1
    num_written: int = 0

    def __post_init__(self) -> None:
        if self.tokens.is_open:
            self.opened_at = 0

    def take(self, output: Sequence[int]) -> None:
        """Look at the newest token of an output."""
        if self.is_over:
            return
        num, start, end = len(output), self.tokens.start_ids, self.tokens.end_ids
        if self.opened_at < 0:
            if _ends(output, start):
                self.opened_at = num
            else:
                self.is_over = num >= len(start) + _LEAD
        elif num - self.opened_at >= len(end):
            self.is_over = _ends(output, end)

    def waits(self, num_known: int, num_in_flight: int) -> bool:
        """Whether the token behind those in flight depends on what they are."""
        if num_in_flight == 0 or self.is_over or self.forced_at >= 0:
            return False
        earliest = self.opened_at if self.opened_at >= 0 else num_known + 1
        return num_known + num_in_flight - earliest >= self.budget

    def forced(self, output: Sequence[int], index: int) -> int | None:
        """The token that is forced as output token ``index``, or None.  The tokens before it are
        known where it matters, see ``waits``."""
        forced = self.tokens.forced_ids
        if self.forced_at < 0:
            if self.is_over or self.opened_at < 0 or index - self.opened_at < self.budget:
                return None
            thought = output[self.opened_at :]
            self.forced_at = index
            self.num_written = next(
                (n for n in range(len(forced) - 1, 0, -1) if _ends(thought, forced[:n])), 0
            )
        place = index - self.forced_at + self.num_written
        return forced[place] if place < len(forced) else None


def _ends(tokens: Sequence[int], mark: Sequence[int]) -> bool:
    return len(tokens) >= len(mark) and [*tokens[-len(mark) :]] == [*mark]
