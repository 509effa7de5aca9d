"""Builds grammars, in llguidance's form, of what requests ask for: JSON schemas, regular
expressions and choices."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...config import MachineError, UserError
from .json_schema import plain_schema

_JSON = {
    "whitespace_flexible": True,
    # Not without end, or a model could write nothing else.
    "whitespace_pattern": r"[\x20\x0A\x09]{0,20}",
    # That no second alternative holds as well cannot be known before the text is complete.
    "coerce_one_of": True,
}
"""Options with which llguidance reads JSON schemas."""
_ESCAPES = {
    "d": "[0-9]",
    "w": "[0-9A-Za-z_]",
    "s": r"[\t\n\x0B\f\r\x20]",
    "D": "[^0-9]",
    "W": "[^0-9A-Za-z_]",
    "S": r"[^\t\n\x0B\f\r\x20]",
    "\n": r"\n",
}
_ANY_OBJECT = {"type": "object"}
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_TOKEN = re.compile(r"\\(.)|/", re.DOTALL)
"""Matches what changes between slashes: an escaped character, and a slash."""


def form_grammar(
    *,
    json: Mapping[str, Any] | str | None = None,
    regex: str | None = None,
    choice: Sequence[str] | None = None,
    grammar: str | None = None,
    json_object: bool | None = None,
) -> str:
    """The grammar of the one form that is given, under vLLM's names.

    Raises:
        UserError: none is given, or several are, or it is bad.
    """
    forms = (json, regex, choice, grammar, json_object or None)
    if sum(form is not None for form in forms) != 1:
        raise UserError("expected one of json, regex, choice, grammar, json_object")
    if json is not None:
        return json_grammar(json)
    if regex is not None:
        return regex_grammar(regex)
    if choice is not None:
        return choice_grammar(choice)
    return lark_grammar(grammar) if grammar is not None else json_grammar(_ANY_OBJECT)


def lark_grammar(grammar: str) -> str:
    """A grammar as llguidance reads it; rules of GBNF (``name ::= …``) are rewritten.

    Raises:
        UserError: they cannot be read.
        MachineError: llguidance is not installed.
    """
    if not _GBNF.search(grammar):
        return grammar
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark
    except ModuleNotFoundError as error:
        raise MachineError(
            "grammars need the package llguidance: pip install 'fusewright[serve]'"
        ) from error
    try:
        lark: str = gbnf_to_lark(grammar)
    except Exception as error:  # of many kinds
        raise UserError(f"grammar: its rules (name ::= …) cannot be read: {error}") from error
    return lark


def json_grammar(schema: Mapping[str, Any] | str) -> str:
    """The grammar of JSON that a schema permits.  Schemas within it may be ``Document``s.

    Raises:
        UserError: the schema is no JSON object, or has a reference to nothing in it.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise UserError(f"grammar: the JSON schema is not JSON: {error}") from error
    if not isinstance(schema, Mapping):
        raise UserError("grammar: the JSON schema is no object")
    plain = {**plain_schema(schema), "x-guidance": _JSON}
    try:
        return json.dumps({"grammars": [{"json_schema": plain}]})
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"grammar: the JSON schema cannot be written as JSON: {error}") from error


def regex_grammar(pattern: str) -> str:
    r"""The grammar of texts that a regular expression matches as a whole.  ``\d``, ``\w`` and
    ``\s`` are of ASCII, as in vLLM, whose default is xgrammar."""

    def in_slashes(token: re.Match[str]) -> str:
        escaped = token[1] or token[0]
        return r"\/" if escaped == "/" else _ESCAPES.get(token[1] or "", token[0])

    return f"start: /{_TOKEN.sub(in_slashes, pattern)}/"


def choice_grammar(choices: Sequence[str]) -> str:
    """The grammar of some texts: one terminal, which has no limit of alternatives.

    Raises:
        UserError: there are none, or one is empty or no Unicode.
    """
    if not choices or not all(choices):
        raise UserError("grammar: expected choices that are not empty")
    texts = [json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices)]
    grammar = f"start: CHOICE\nCHOICE: {' | '.join(texts)}".replace("\x7f", r"\u007f")
    try:
        grammar.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"grammar: a choice is not valid Unicode: {error}") from error
    return grammar
