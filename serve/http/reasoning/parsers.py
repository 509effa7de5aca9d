"""How models mark their thinking: a table, under the names of vLLM's ``--reasoning-parser``."""

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
        shown_by: a text in chat templates that tells of these marks; "": none does.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    implicit: bool = False
    shown_by: str = ""

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
_THINK = ("<think>",), ("</think>",)
PARSERS: dict[str, Marks] = {
    "qwen3": Marks(*_THINK, shown_by="<think>"),
    "deepseek_r1": Marks(*_THINK, implicit=True),
    "deepseek_v3": Marks(*_THINK),
    "glm45": Marks(*_THINK),
    "granite": Marks(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        shown_by="Here is my thought process:",
    ),
    "mistral": Marks(("[THINK]",), ("[/THINK]",), shown_by="[THINK]"),
    "olmo3": Marks(*_THINK),
    "seed_oss": Marks(("<seed:think>",), ("</seed:think>",), shown_by="<seed:think>"),
}
"""Marks by the names of vLLM's ``--reasoning-parser``, in the order of detection."""


def detect(template: str) -> str | None:
    """The name of the marks that a chat template shows; None if it shows none.

    A name that is detected changes only outputs that begin with a start mark, or whose prompt ends
    with one.
    """
    return next(
        (name for name, marks in PARSERS.items() if marks.shown_by and marks.shown_by in template),
        None,
    )
