"""Converts the values of options to the types that ``EngineOptions`` declares."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any

from .errors import UserError


def typed(name: str, kind: str, value: Any) -> Any:
    """Convert ``value`` to the type ``kind``, such as "int | None".  A text that stands for several
    values is split at its commas, as on the command line.

    Raises:
        UserError: it is of another type.
    """
    if value is None and kind.endswith(" | None"):
        return None
    expected, convert = _KINDS[kind.removesuffix(" | None")]
    try:
        return convert(value)
    except TypeError:
        optional = " or None" if kind.endswith(" | None") else ""
        raise UserError(f"{name}={value!r}: expected {expected}{optional}") from None


def _text(value: Any) -> str:
    path = os.fspath(value)
    if not isinstance(path, str):
        raise TypeError
    return path


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    return float(value)


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str | os.PathLike):
        return tuple(item.strip() for item in _text(value).split(",") if item.strip())
    return tuple(_text(item) for item in _items(value))


def _integers(value: Any) -> tuple[int, ...]:
    return tuple(_integer(item) for item in _items(value))


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError
    return value


_KINDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "str": ("text", _text),
    "int": ("an integer", _integer),
    "float": ("a number", _number),
    "bool": ("True or False", _bool),
    "tuple[str, ...]": ("a list of texts", _texts),
    "tuple[int, ...]": ("a list of integers", _integers),
}
