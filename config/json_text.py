"""Reads JSON that an option holds as text; whatever is wrong with it is one line with its name."""

from __future__ import annotations

import json
from typing import Any

from .errors import UserError

_MOST_SHOWN = 200
"""Characters of a wrong text that an error repeats."""


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
