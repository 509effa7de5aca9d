"""Reads ``speculative_config``: who drafts tokens, and how many, under vLLM's names."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from .errors import UserError

METHODS = ("ngram",)
MOST_DRAFTS = 64
"""Most drafts of a request in a step."""
_MOST_LOOKUP = 64
_LOOKUP = 5
"""Tokens of an n-gram if neither bound is given, as in vLLM."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """Who drafts tokens.

    Attributes:
        method: the drafter.
        num_speculative_tokens: most drafts of a request in a step.
        prompt_lookup_max, prompt_lookup_min: ``ngram`` looks for the longest run of so many last
            tokens that the sequence has had before.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int = _LOOKUP
    prompt_lookup_min: int = _LOOKUP


_FIELDS = tuple(field.name for field in fields(SpeculativeConfig))
_RANGES = {
    "num_speculative_tokens": MOST_DRAFTS,
    "prompt_lookup_max": _MOST_LOOKUP,
    "prompt_lookup_min": _MOST_LOOKUP,
}


def read_speculative(text: str | None) -> SpeculativeConfig | None:
    """The config of a JSON object; None if there is none.

    Raises:
        UserError: it is no object, or a field is unknown, missing or out of range.
    """
    if not text:
        return None
    try:
        values = json.loads(text)
    except ValueError as error:
        raise UserError(f"speculative_config={text!r}: not JSON: {error}") from None
    if not isinstance(values, dict):
        raise UserError(
            f"speculative_config={text!r}: expected an object, such as "
            '{"method": "ngram", "num_speculative_tokens": 4}'
        )
    if unknown := sorted(set(values) - set(_FIELDS)):
        raise _wrong(unknown[0], values[unknown[0]], f"one of the fields {', '.join(_FIELDS)}")
    values = {name: value for name, value in values.items() if value is not None}
    if values.get("method") not in METHODS:
        raise _wrong("method", values.get("method"), f"one of {', '.join(METHODS)}")
    if "num_speculative_tokens" not in values:
        raise _wrong("num_speculative_tokens", None, "how many tokens are drafted, such as 4")
    for name, most in _RANGES.items():
        value = values.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise _wrong(name, value, f"an integer in [1, {most}]")
    longest = values.get("prompt_lookup_max", values.get("prompt_lookup_min", _LOOKUP))
    shortest = values.get("prompt_lookup_min", longest)
    if shortest > longest:
        raise _wrong("prompt_lookup_min", shortest, f"prompt_lookup_max={longest} or less")
    return SpeculativeConfig("ngram", values["num_speculative_tokens"], longest, shortest)


def _wrong(name: str, value: Any, expected: str) -> UserError:
    return UserError(f"speculative_config: {name}={value!r}: expected {expected}")
