"""Grammars of structured output as llguidance reads them, made of JSON schemas, regular expressions
and choices, and checked before anything is queued."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...config import MachineError, UserError

_MOST_CHARACTERS = 256 * 1024
_WHITESPACE = r"[\x20\x0A\x09]{0,20}"
"""Between the tokens of JSON: not without end, or a model could write nothing else."""


def json_grammar(schema: Mapping[str, Any] | str) -> str:
    """The grammar of JSON that a schema permits.

    Raises:
        UserError: the schema is no JSON object.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise UserError(f"grammar: the JSON schema is not JSON: {error}") from error
    if not isinstance(schema, Mapping):
        raise UserError("grammar: the JSON schema is no object")
    options = {"whitespace_flexible": True, "whitespace_pattern": _WHITESPACE}
    return json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": options}}]})


def regex_grammar(pattern: str) -> str:
    """The grammar of texts that a regular expression matches as a whole."""
    escaped = pattern.replace("/", r"\/").replace("\n", r"\n")
    return f"start: /{escaped}/"


def choice_grammar(choices: Sequence[str]) -> str:
    """The grammar of some texts.

    Raises:
        UserError: there are none, or one is empty.
    """
    if not choices or not all(choices):
        raise UserError("grammar: expected choices that are not empty")
    return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def check_grammar(grammar: str) -> None:
    """Compile a grammar without a tokenizer; the work is limited.

    Raises:
        UserError: it is bad, or too large.
        MachineError: llguidance is not installed.
    """
    if len(grammar) > _MOST_CHARACTERS:
        raise UserError(f"grammar: {len(grammar)} characters, expected {_MOST_CHARACTERS} at most")
    try:
        from llguidance import LLMatcher
    except ModuleNotFoundError as error:
        raise MachineError(
            "a grammar needs the package llguidance: pip install 'fusewright[serve]'"
        ) from error
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_error:
        raise UserError(f"grammar: {' '.join(messages[0].split())[:500]}")
