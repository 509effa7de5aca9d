"""The tables list by this form how each argument of vLLM is treated here.

The names are those of vLLM 0.20, and of older versions where scripts still have them.
``config/ports.py`` and ``serve/console/ports.py`` read arguments by these tables, and
``tools/vllm_page.py`` renders ``docs/coming-from-vllm.md`` from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Port(StrEnum):
    """The ways in which an argument of vLLM is treated."""

    SAME = "same"
    OTHER = "other name"
    IGNORED = "accepted without effect"
    REFUSED = "refused"


@dataclass(frozen=True)
class Argument:
    """One of vLLM's arguments.

    Attributes:
        says: how the argument differs, its other name, or why it is ignored or refused and what to
            use instead.
        off: values that ask for nothing, beside None, False, 0 and what is empty: they are accepted
            also where the argument is refused.
        switch: its flag has no value.
    """

    name: str
    port: Port
    says: str = ""
    off: tuple[Any, ...] = ()
    switch: bool = False

    def asks_nothing(self, value: Any) -> bool:
        if isinstance(value, dict | list):  # of a request's body, which may be large
            return not value or value in self.off
        text = str(value)
        return not value or text.lower() in _NOTHING or text in map(str, self.off)


_NOTHING = ("none", "null", "false", "0", "0.0", "{}", "[]")


def same(names: str, says: str = "", switch: bool = False) -> Iterator[Argument]:
    return (Argument(name, Port.SAME, says, switch=switch) for name in names.split())


def other(**names: str) -> Iterator[Argument]:
    return (Argument(name, Port.OTHER, says) for name, says in names.items())


def ignored(
    says: str, names: str, off: tuple[Any, ...] = (), switch: bool = False
) -> Iterator[Argument]:
    return (Argument(name, Port.IGNORED, says, off, switch) for name in names.split())


def refused(
    says: str, names: str, off: tuple[Any, ...] = (), switch: bool = False
) -> Iterator[Argument]:
    return (Argument(name, Port.REFUSED, says, off, switch) for name in names.split())


def table(*groups: Iterator[Argument]) -> dict[str, Argument]:
    return {argument.name: argument for group in groups for argument in group}
