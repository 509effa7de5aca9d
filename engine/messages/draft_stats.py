"""``DraftStats``: what the core counts of tokens that were guessed ahead."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class DraftStats(Struct, frozen=True):
    """Counts since the start.

    Attributes:
        method: who drafts, as in ``speculative_config``.
        most: most drafts of a request in a step.
        num_steps: how often a request had drafts in a step.
        num_tokens: tokens that these brought: the drafts that were right, and one more each.
        drafted, accepted: [most] drafts that were tried, and those that were right, by position.
        without: reason -> how often a decode had no drafts.
        error: why the drafter was switched off, or "".
        policy: how many drafts were chosen and by what, as plain data; empty where their number is
            fixed.
        is_replayed: drafts are judged by an acceptance that was asked for, and outputs are not the
            model's.
    """

    method: str
    most: int
    num_steps: int
    num_tokens: int
    drafted: list[int]
    accepted: list[int]
    without: dict[str, int]
    error: str = ""
    policy: dict[str, Any] = {}
    is_replayed: bool = False

    @property
    def num_drafted(self) -> int:
        return sum(self.drafted)

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted)

    def report(self) -> dict[str, Any]:
        """Plain data, as ``report()`` has it.  ``mean_length``: tokens of a step with drafts."""
        return {
            "method": self.method,
            "num_speculative_tokens": self.most,
            "steps": self.num_steps,
            "drafted": self.num_drafted,
            "accepted": self.num_accepted,
            "drafted_by_position": list(self.drafted),
            "accepted_by_position": list(self.accepted),
            "mean_length": self.num_tokens / self.num_steps if self.num_steps else 0.0,
            "without": dict(self.without),
            "error": self.error,
            "policy": self.policy,
            "replayed": self.is_replayed,
        }
