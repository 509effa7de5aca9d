"""The token ids around a model's thinking, and what counts as token ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...config import UserError


def is_int(value: object) -> bool:
    """Whether it is an integer that a message can carry, of 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def are_ids(values: Iterable[Any]) -> bool:
    """Whether all are integers of at least 0."""
    return all(is_int(value) and value >= 0 for value in values)


@dataclass(frozen=True, kw_only=True)
class ThinkingTokens:
    """The tokens around a model's thinking.

    Attributes:
        start_ids: those that open it.
        end_ids: those that close it.
        forced_ids: those that are forced when a budget is spent; none: ``end_ids``.
        is_open: the prompt has opened it.

    Raises:
        UserError: one is no list of token ids, or those of the end are missing.
    """

    start_ids: Sequence[int] = ()
    end_ids: Sequence[int]
    forced_ids: Sequence[int] = ()
    is_open: bool = False

    def __post_init__(self) -> None:
        for name in ("start_ids", "end_ids", "forced_ids"):
            ids = getattr(self, name)
            if isinstance(ids, str) or not isinstance(ids, Sequence) or not are_ids(ids):
                raise UserError(f"ThinkingTokens: {name}={ids!r}: expected token ids of at least 0")
            object.__setattr__(self, name, tuple(ids))
        if not self.end_ids or not (self.start_ids or self.is_open):
            raise UserError("ThinkingTokens: expected end_ids, and start_ids unless is_open")
        if not self.forced_ids:
            object.__setattr__(self, "forced_ids", self.end_ids)

    @property
    def all_ids(self) -> tuple[int, ...]:
        return (*self.start_ids, *self.end_ids, *self.forced_ids)
