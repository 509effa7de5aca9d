"""Divides an output into thinking, content and calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from ..tool_calls.call_reader import Call, CallReader
from .thought_reader import Thought, ThoughtReader

Part: TypeAlias = str | Thought | Call


class Reader(Protocol):
    """Reads one output as it comes."""

    @property
    def num_calls(self) -> int:
        """Calls so far."""
        ...

    def push(self, text: str) -> Sequence[Part]:
        """The parts that are certain behind this text, in their order."""
        ...

    def finish(self) -> Sequence[Part]:
        """The rest, when nothing more will come."""
        ...

    def finish_reason(self, reason: str | None) -> str | None:
        """The reason to give for an output that ended for ``reason``, once it is finished."""
        ...


class OutputReader:
    """Reads one output: its thinking first, then content and calls.

    Args:
        thoughts: finds the thinking; None where none is looked for.
        calls: finds calls behind it; None if there are no tools.
    """

    def __init__(self, thoughts: ThoughtReader | None, calls: CallReader | None) -> None:
        self._thoughts, self._calls = thoughts, calls

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls if self._calls else 0

    def push(self, text: str) -> Sequence[Part]:
        if self._thoughts is None:
            return [text] if self._calls is None else self._calls.push(text)
        return self._with_calls(self._thoughts.push(text))

    def finish(self) -> Sequence[Part]:
        parts = [] if self._thoughts is None else self._with_calls(self._thoughts.finish())
        return parts if self._calls is None else [*parts, *self._calls.finish()]

    def finish_reason(self, reason: str | None) -> str | None:
        return self._calls.finish_reason(reason) if self._calls else reason

    def _with_calls(self, parts: Iterable[str | Thought]) -> list[Part]:
        if self._calls is None:
            return [*parts]
        divided: list[Part] = []
        for part in parts:
            divided += [part] if isinstance(part, Thought) else self._calls.push(part)
        return divided


class WithoutThoughts:
    """A reader whose parts of thinking are left out."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    @property
    def num_calls(self) -> int:
        return self._reader.num_calls

    def push(self, text: str) -> Sequence[Part]:
        return [part for part in self._reader.push(text) if not isinstance(part, Thought)]

    def finish(self) -> Sequence[Part]:
        return [part for part in self._reader.finish() if not isinstance(part, Thought)]

    def finish_reason(self, reason: str | None) -> str | None:
        return self._reader.finish_reason(reason)


@dataclass
class Message:
    """What a reader has read, or a part of it."""

    content: str = ""
    thinking: str = ""
    calls: list[Call] = field(default_factory=list)

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Message:
        """Join parts, in their order."""
        content, thinking, calls = [], [], []
        for part in parts:
            if isinstance(part, str):
                content.append(part)
            elif isinstance(part, Thought):
                thinking.append(part.text)
            else:
                calls.append(part)
        return cls("".join(content), "".join(thinking), calls)
