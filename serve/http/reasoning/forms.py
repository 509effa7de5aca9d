"""Lets a form of the output begin behind the thinking, as a grammar of both."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....engine.frontend.grammar import json_grammar
from .marks import Marks, Opening

FORM = "answer_form"
TEXT = "/(?s:.+)/"
IdsOf = Callable[[str], list[int]]
"""The token ids of a text."""


@dataclass(frozen=True)
class Form:
    """What the output must be.

    Attributes:
        grammar: of the form, as llguidance reads it.
        functions: those of which one must be called; none: the form is none of a call.
    """

    grammar: str
    functions: Sequence[Mapping[str, Any]] = ()


def behind_thinking(grammar: str, marks: Marks, opening: Opening, ids_of: IdsOf) -> str:
    """A grammar by which an output may think, or goes on thinking, before it keeps to a form.

    Args:
        grammar: of the form, as llguidance reads it.
        ids_of: tells which marks are tokens of their own.
    """
    if opening is Opening.CLOSED:
        return grammar
    end = marks.ends[0]
    if (token := _token(end, ids_of)) is not None:
        thought = f"thought: THOUGHT? {token}\nTHOUGHT: {TEXT}"
    else:
        thought = f"thought[suffix={_quoted(end)}]: /(?s:.*)/"
    start = _token(marks.starts[0], ids_of) or _quoted(marks.starts[0])
    lead = f"{start}? thought LINES?" if opening is Opening.OPEN else f"({start} thought LINES?)?"
    lark = f"start: {lead} @{FORM}\n{thought}\nLINES: /\\x20|\\n{{1,4}}/"
    first, *others = parts_of(grammar)
    return json.dumps({"grammars": [{"lark_grammar": lark}, {**first, "name": FORM}, *others]})


def schema_part(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The grammar of JSON that a schema permits, as one of several."""
    (part,) = parts_of(json_grammar(schema))
    return part


def parts_of(grammar: str) -> list[dict[str, Any]]:
    """The grammars of which llguidance's form consists; the first is where the text begins."""
    if grammar.lstrip().startswith("{"):
        parts: list[dict[str, Any]] = json.loads(grammar)["grammars"]
        return parts
    return [{"lark_grammar": grammar}]


def _token(mark: str, ids_of: IdsOf) -> str | None:
    """A mark as a token, in Lark; None if it is several."""
    ids = ids_of(mark)
    return f"<[{ids[0]}]>" if len(ids) == 1 else None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
