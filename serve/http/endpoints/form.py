"""The form of an output: ``response_format`` of OpenAI, ``structured_outputs`` of vLLM."""

from __future__ import annotations

from typing import Any

from ....config import UserError
from ....engine.frontend.grammar import choice_grammar, json_grammar, regex_grammar
from ..intake.errors import ApiError
from ..intake.protocol import Generation, StructuredOutputs

_ANY_OBJECT = {"type": "object"}


def grammar_of(body: Generation) -> str | None:
    """The grammar that a body asks for.

    Raises:
        ApiError: it asks for two, or for a form that is unknown.
    """
    try:
        found = _of_format(body.response_format or {})
    except UserError as error:
        raise ApiError(400, str(error), param="response_format") from error
    if body.structured_outputs is None:
        return found
    if found is not None:
        message = "structured_outputs and response_format: expected one of them"
        raise ApiError(400, message, param="structured_outputs")
    try:
        return _of_outputs(body.structured_outputs)
    except UserError as error:
        raise ApiError(400, str(error), param="structured_outputs") from error


def _of_format(given: dict[str, Any]) -> str | None:
    kind = given.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return json_grammar(_ANY_OBJECT)
    if kind == "json_schema":
        described = given.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if not isinstance(schema, dict):
            raise UserError("response_format.json_schema.schema: expected a JSON schema")
        return json_grammar(schema)
    raise UserError(
        f"response_format.type={str(kind)[:50]!r}: expected text, json_object or json_schema"
    )


def _of_outputs(given: StructuredOutputs) -> str:
    forms = [name for name, value in given if value is not None and value is not False]
    if len(forms) != 1:
        raise UserError("expected one of json, regex, choice, grammar, json_object")
    if given.json_schema is not None:
        return json_grammar(given.json_schema)
    if given.regex is not None:
        return regex_grammar(given.regex)
    if given.choice is not None:
        return choice_grammar(given.choice)
    return given.grammar if given.grammar is not None else json_grammar(_ANY_OBJECT)
