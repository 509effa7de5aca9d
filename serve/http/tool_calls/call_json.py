"""Calls as JSON: ``{"name": …, "arguments": {…}}``, alone or in a list."""

from __future__ import annotations

import json
from typing import Any

import msgspec

_ARGUMENTS = ("arguments", "parameters")
_Members = dict[str, msgspec.Raw]


def strict_json(text: str) -> str:
    """JSON that every parser reads: the text itself if it is such.

    Half of a surrogate pair, which no UTF-8 has, becomes U+FFFD.

    Raises:
        ValueError: it is no JSON, or a number is beyond the range of doubles.
        RecursionError: it is nested too deep.
    """
    try:
        msgspec.json.decode(text)
        return text
    except ValueError:
        value = json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
        text = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        msgspec.json.decode(text)
        return text


def calls_of_json(text: str, *, needs_arguments: bool) -> list[tuple[str, str]]:
    """Name and arguments of each call; none if one of them is no call.

    Args:
        needs_arguments: whether an object without arguments is no call.

    Raises:
        ValueError: it is no JSON that all parsers read.
        RecursionError: it is nested too deep.
    """
    text = strict_json(text)
    is_list = text.lstrip().startswith("[")
    objects = (
        msgspec.json.decode(text, type=list[_Members])
        if is_list
        else [msgspec.json.decode(text, type=_Members)]
    )
    calls = []
    for members in objects:
        name = _value(members.get("name"))
        arguments = next((members[key] for key in _ARGUMENTS if key in members), None)
        if not isinstance(name, str) or not name or (arguments is None and needs_arguments):
            return []
        calls.append((name, _arguments(arguments)))
    return calls


def _arguments(raw: msgspec.Raw | None) -> str:
    """Arguments as JSON; some models write them as a string that holds an object."""
    value = _value(raw)
    if value in (None, ""):
        return "{}"
    if isinstance(value, str):
        try:
            inner = strict_json(value)
        except (ValueError, RecursionError):
            inner = ""
        if inner.lstrip().startswith("{"):
            return inner
    return bytes(raw or b"{}").decode()


def _value(raw: msgspec.Raw | None) -> Any:
    return None if raw is None else msgspec.json.decode(raw)
