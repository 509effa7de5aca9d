"""Converts the values of options to the types that ``EngineOptions`` declares, and reads those that
are JSON; whatever is wrong with one is one line with its name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any

from .errors import UserError

_MOST_SHOWN = 200
"""Characters of a wrong text that an error repeats."""


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


def read_text(name: str, text: str, example: str = "") -> Any:
    """The value that the JSON text of an option stands for.

    Args:
        example: a right text, which the errors show; empty: none.

    Raises:
        UserError: it is not JSON, is nested too deeply, or has a key twice, of which one would be
            read and the other would not.
    """
    hint = f"; expected an object, such as {example}" if example else ""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise UserError(f"{name}: has {twice!r} twice; leave one of them out")
        return values

    try:
        return json.loads(text, object_pairs_hook=once)
    except RecursionError:
        raise UserError(f"{name}={_shown(text)}: nested too deeply{hint}") from None
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{name}={_shown(text)}: not JSON: {error}{hint}") from None


def read_object(name: str, text: str, example: str) -> dict[str, Any]:
    """The same for an option that is an object.

    Raises:
        UserError: it is something else too.
    """
    value = read_text(name, text, example)
    if not isinstance(value, dict):
        raise UserError(f"{name}={_shown(text)}: expected an object, such as {example}")
    return value


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "…")
