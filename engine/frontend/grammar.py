"""Grammars of structured output as llguidance reads them, made of JSON schemas, regular expressions
and choices."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...config import UserError

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
