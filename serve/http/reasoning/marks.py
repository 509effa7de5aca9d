"""The texts around a model's thinking, and where outputs begin among them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Opening(Enum):
    """Where an output begins."""

    OPEN = auto()
    """Within the thinking: the prompt has opened it, or the model never opens it."""
    FREE = auto()
    """With a start mark, or with the answer."""
    CLOSED = auto()
    """Behind the thinking, which the prompt has closed."""


@dataclass(frozen=True)
class Marks:
    """The texts around a model's thinking.

    Attributes:
        starts: texts that open it; prompts and grammars use the first.
        ends: texts that close it; the first is forced when a budget is spent.
        implicit: whether an output begins within the thinking, though nothing opens it.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    implicit: bool = False

    def opening(self, prompt: str, continued: str | None = None) -> Opening:
        """Where the output behind a prompt begins.

        Args:
            prompt: as the chat template made it.
            continued: the text of the last message, if the output goes on with it.
        """
        if continued is not None:
            start = max(continued.rfind(each) for each in self.starts)
            end = max(continued.rfind(each) for each in self.ends)
            return Opening.OPEN if start > end else Opening.CLOSED
        tail = prompt[-_TAIL:].rstrip()
        if tail.endswith(self.ends):
            return Opening.CLOSED
        is_open = self.implicit or tail.endswith(self.starts)
        return Opening.OPEN if is_open else Opening.FREE


_TAIL = 200
"""Characters at the end of a prompt that are looked at; more white space is in no template."""
