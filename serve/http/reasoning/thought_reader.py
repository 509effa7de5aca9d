"""Divides an output into thinking and answer, as it comes.

White space around the thinking belongs to neither, nor do empty lines before the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .marks import Marks, Opening


@dataclass(frozen=True)
class Thought:
    """A piece of the thinking."""

    text: str


Part: TypeAlias = str | Thought


class ThoughtReader:
    """Reads the thinking with which an output may begin; all behind it is the answer.

    Args:
        opening: where the output begins.
    """

    def __init__(self, marks: Marks, opening: Opening) -> None:
        self._marks, self._is_open = marks, opening is Opening.OPEN
        self._text = ""
        self._has_thought = False
        self._parts: list[Part] = []
        self._read: Callable[[], bool] = self._read_start

    def push(self, text: str) -> list[Part]:
        """The thinking and the answer that are certain behind this text, in their order."""
        if self._read == self._read_answer:  # most of the time
            return [text]
        self._text += text
        while self._text and self._read():
            pass
        return self._certain()

    def finish(self) -> list[Part]:
        """The rest, when nothing more will come."""
        if self._read == self._read_start:
            self._begin()
        if self._read == self._read_thought:
            self._think(self._text.rstrip())
        elif self._read == self._read_answer and self._text:
            self._parts.append(self._text)
        self._text = ""
        return self._certain()

    def _certain(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    # Each of these reads the beginning of self._text, and returns False if it needs more.

    def _read_start(self) -> bool:
        """A start mark, white space aside."""
        text = self._text.lstrip()
        for start in self._marks.starts:
            if text.startswith(start):
                self._text, self._read = text[len(start) :], self._read_thought
                return True
            if start.startswith(text):
                return False
        self._begin()
        return True

    def _begin(self) -> None:
        """Begin without a start mark."""
        self._read = self._read_thought if self._is_open else self._read_answer

    def _read_thought(self) -> bool:
        """The thinking, as far as an end mark."""
        end, mark = first_of(self._text, self._marks.ends)
        if mark:
            self._think(self._text[:end].rstrip())
            self._text, self._read = self._text[end + len(mark) :], self._read_behind
            return True
        certain = self._text[: len(self._text) - held_back(self._text, self._marks.ends)].rstrip()
        self._think(certain)
        self._text = self._text[len(certain) :]
        return False

    def _read_behind(self) -> bool:
        """White space before the answer."""
        answer = self._text.lstrip()
        if not answer:
            return False
        blanks = self._text[: len(self._text) - len(answer)]
        self._text = blanks[blanks.rfind("\n") + 1 :] + answer
        self._read = self._read_answer
        return True

    def _read_answer(self) -> bool:
        self._parts.append(self._text)
        self._text = ""
        return False

    def _think(self, text: str) -> None:
        if not self._has_thought:
            text = text.lstrip()
        if text:
            self._parts.append(Thought(text))
            self._has_thought = True


def first_of(text: str, marks: Sequence[str], at: int = 0) -> tuple[int, str]:
    """Where the first of some marks stands in ``text[at:]``, and which; (-1, "") if none does."""
    places = [(place, mark) for mark in marks if (place := text.find(mark, at)) >= 0]
    return min(places, default=(-1, ""))


def held_back(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of a text may begin one of some marks."""
    longest = max(map(len, marks)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
