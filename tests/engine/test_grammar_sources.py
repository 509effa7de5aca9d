"""Claims about the grammars that are built of schemas, expressions and choices: they permit what
was asked for and nothing else, however it is written."""

from __future__ import annotations

import json
import random
import re
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from llguidance import LLMatcher, LLTokenizer

from fusewright.config import UserError
from fusewright.engine.frontend.grammar import (
    check_grammar,
    choice_grammar,
    json_grammar,
    regex_grammar,
)
from fusewright.engine.frontend.json_schema import FORMATS, Document

BYTES = LLTokenizer("byte")
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}


def matcher(grammar: str) -> Any:
    check_grammar(grammar)
    return LLMatcher(BYTES, grammar, log_level=0)


def permits(grammar: str, text: str) -> bool:
    found, ids = matcher(grammar), list(text.encode())
    return bool(found.try_consume_tokens(ids) == len(ids) and found.is_accepting())


def obj(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


OF_A: dict[str, Any] = {"$ref": "#/$defs/a", "$defs": {"a": {"const": 1}}}
REFERENCES: list[tuple[dict[str, Any], str, str]] = [
    ({"$ref": "#/$defs/p", "$defs": {"p": POINT}}, '{"x":1}', '{"x":"1"}'),
    ({"$ref": "#/definitions/p", "definitions": {"p": POINT}}, '{"x":1}', "{}"),
    (obj(a={"type": "integer"}, b={"$ref": "#/properties/a"}), '{"a":1,"b":2}', '{"a":1,"b":"2"}'),
    ({"anyOf": [{"const": 1}, {"type": "array", "items": {"$ref": "#"}}]}, "[1,[[1]]]", "[2]"),
    ({"$ref": "#/$defs/a~1b~0c%25d", "$defs": {"a/b~c%d": {"const": 1}}}, "1", "2"),
    ({"$ref": "#/$defs/%C3%A9", "$defs": {"é": {"const": 1}}}, "1", "2"),
    ({"$ref": "#/x-more/schemas/0", "x-more": {"schemas": [{"const": 1}]}}, "1", "2"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"const": 1}}}, "1", "2"),
    ({**OF_A, "$id": "https://e.org/s.json", "$ref": "https://e.org/s.json#/$defs/a"}, "1", "2"),
    ({"$id": "https://e.org/s", "$ref": "p", "$defs": {"b": {**OF_A, "$id": "p"}}}, "1", "2"),
    ({**OF_A, "$id": "urn:s", "$ref": "urn:s#/$defs/a"}, "1", "2"),
    ({"$ref": "#here", "$defs": {"a": {"$anchor": "here", "const": 1}}}, "1", "2"),
    ({"$ref": "#here", "definitions": {"a": {"$id": "#here", "const": 1}}}, "1", "2"),
    (obj(**{"$ref": {"const": 1}, "$id": {"const": 2}}), '{"$ref":1,"$id":2}', "{}"),
    ({"$ref": "#/$defs/a", "maximum": 5, "$defs": {"a": {"type": "integer"}}}, "5", "6"),
]  # fmt: skip


@pytest.mark.parametrize("schema, right, wrong", REFERENCES)
def test_references_are_found_also_in_a_schema_within_another(
    schema: dict[str, Any], right: str, wrong: str
) -> None:
    alone = json_grammar(schema)
    other = Document({"$ref": "#/$defs/a", "$defs": {"a": {"const": 7}}})
    within = json_grammar(
        {"$defs": {"a": False}, **obj(one=Document(schema), two=other, three=Document(schema))}
    )
    for text, is_right in ((right, True), (wrong, False)):
        assert permits(alone, text) == is_right
        outer = '{"one":%s,"two":7,"three":%s}'
        assert permits(within, outer % (right, text)) == is_right
        assert permits(within, outer % (text, right)) == is_right


@pytest.mark.parametrize(
    "schema, message",
    [
        ({"$ref": "#/$defs/a"}, "no '\\$defs' there"),
        ({"$ref": "#/$defs/a", "$defs": {"a": 3}}, "3 in the JSON schema: expected a schema"),
        ({"$ref": "other.json#/a"}, "expected a reference to a part of it"),
        ({"$ref": "#nowhere"}, "expected a reference to a part of it"),
        ({"$ref": "http://[/"}, "grammar: "),
        ({"$ref": 3}, "expected text"),
        ({"$ref": "#"}, "leads only to itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "leads only to itself"),
        ({"items": {"items": 3}}, "expected a schema"),
        ({"const": 2**53 + 1}, "const has 9007199254740993"),
        ({"enum": [[{"a": -(10**30)}]]}, "enum has -1"),
        ({"const": float("nan")}, "const has nan"),
        ({"minimum": 10**40}, "minimum=an integer of 133 bits"),
        ({"maximum": -1e308}, "maximum=-1e\\+308"),
        ({"minimum": float("nan")}, "minimum=nan"),
        ({"minimum": True}, "expected a number"),
        ({"minimum": "1"}, "expected a number"),
        ({"enum": [{1, 2}]}, "cannot be written as JSON"),
    ],
)
def test_a_schema_that_says_nothing_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"grammar: .*{message}|{message}"):
        json_grammar(schema)


@pytest.mark.parametrize("schema", [{"anyOf": {}}, {"properties": []}, {"not": {}}, {"format": 3}])
def test_what_is_not_kept_to_is_not_dropped(schema: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="grammar: "):
        check_grammar(json_grammar(schema))


def test_too_much_is_refused_before_it_is_built() -> None:
    wide: dict[str, Any] = {"anyOf": [{} for _ in range(20_000)]}
    deep: dict[str, Any] = {}
    for _ in range(500):
        deep = {"items": deep}
    for schema in (wide, deep):
        with pytest.raises(UserError, match="make it smaller"):
            json_grammar(schema)
    with pytest.raises(UserError, match="name fewer"):
        json_grammar({"enum": [1] * 200_000})


@pytest.mark.parametrize(
    "schema, right, wrong",
    [
        ({"type": "string", "format": "path"}, '"/a"', "1"),
        ({"type": "string", "deprecated": True, "x-y": {"z": 1}}, '"a"', "1"),
        ({"type": "string", "format": "ipv4"}, '"1.2.3.4"', '"a"'),
        ({"type": "string", "maxLength": 2**63}, '"aaa"', "1"),
        ({"type": "string", "maxLength": 2.0}, '"aa"', '"aaa"'),
        ({"oneOf": [obj(a={"const": 1}), obj(b={"const": 1})]}, '{"b":1}', '{"c":1}'),
        ({"type": "integer", "maximum": 2**63 - 1}, "1234567890123456789", str(2**63)),
        ({"type": "integer", "minimum": -(2**63)}, "-1234567890123456789", str(-(2**63) - 1)),
        ({"type": "integer", "minimum": 2**53 + 1}, str(2**53 + 2), str(2**53)),
        ({"type": "integer", "exclusiveMinimum": 2**53}, str(2**53 + 2), str(2**53)),
        ({"type": "integer", "exclusiveMaximum": -(2**60)}, str(-(2**60) - 256), str(-(2**60))),
        ({"type": "integer", "minimum": 10**18}, str(10**18 + 256), "5"),
        ({"type": "integer", "maximum": 2**64 - 1}, "5", str(2**64)),
        ({"type": "number", "minimum": -1e308, "maximum": 1e308}, "-5.25", '"a"'),
        ({"type": "number", "exclusiveMinimum": 1e-308}, "0.5", "-0.5"),
        ({"type": "number", "maximum": -5e-324}, "-0.5", "0.5"),
        ({"type": "integer", "minimum": 5, "exclusiveMinimum": True}, "6", "5"),
        ({"const": 2**53}, str(2**53), str(2**53 + 1)),
    ],
)
def test_annotations_and_far_bounds(schema: dict[str, Any], right: str, wrong: str) -> None:
    assert permits(json_grammar(schema), right)
    assert not permits(json_grammar(schema), wrong)


def test_the_formats_are_those_of_llguidance() -> None:
    for name in FORMATS:
        bare = json.dumps({"grammars": [{"json_schema": {"type": "string", "format": name}}]})
        check_grammar(bare)
        assert not permits(json_grammar({"type": "string", "format": name}), '"?"')


@pytest.mark.parametrize(
    "pattern, right, wrong",
    [
        (r"https:\/\/[a-z]{3}", "https://abc", r"https:\/\/abc"),
        (r"[\/]{2}", "//", "/"),
        (r"a\/b|a/c", "a/c", "a\\/b"),
        (r"\\/", "\\/", "/"),
        (r"\d\w\s", "1a ", "٣é\u00a0"),
        (r"[\d_][^\W\d]", "_a", "_1"),
        (r"\D\W\S", "é\u00a0\u00a0", "1a "),
        (r"\\d", r"\d", "1"),
        ("(?x) a \\s b  # c", "a b", "ab"),
        ("a\nb", "a\nb", "ab"),
        ("a\\\nb", "a\nb", "a\\\nb"),
        ("\"#'", "\"#'", '"'),
    ],
)
def test_expressions_mean_what_they_do_elsewhere(pattern: str, right: str, wrong: str) -> None:
    assert permits(regex_grammar(pattern), right)
    assert not permits(regex_grammar(pattern), wrong)


def test_an_expression_that_ends_within_an_escape_is_refused() -> None:
    with pytest.raises(UserError, match="grammar: "):
        check_grammar(regex_grammar("a\\"))


PIECES = [*"ab/é1_ ", r"\/", r"\d", r"\w", r"\s", r"\D", r"\W", r"\S", r"\\", r"\.", "."]
CLASSES = ["[ab/]", r"[^\d/]", r"[\w\/]", r"[^\s\\]", "(a|/)", r"(?:\/|b)"]


@given(
    st.lists(
        st.tuples(st.sampled_from(PIECES + CLASSES), st.sampled_from(["", "", "?", "*", "{2}"])),
        max_size=5,
    ).map(lambda parts: "".join(a + b for a, b in parts)),
    st.lists(st.text(r"ab/é1_ \.٣", max_size=6), min_size=3, max_size=3),
)
def test_expressions_are_those_of_python_in_ascii(pattern: str, texts: list[str]) -> None:
    grammar = regex_grammar(pattern)
    for text in texts:
        assert permits(grammar, text) == bool(re.fullmatch(pattern, text, re.ASCII)), pattern


def test_choices_are_their_texts_however_many() -> None:
    texts = ['"', "\\", "/", "//", "\0", "\x7f", "\n\r\t", "\u2028", "😀", "a", "ab", "|", '"i']
    texts += [f"choice {number}" for number in range(4000)]
    found = choice_grammar([*texts, "a"])
    check_grammar(found)
    for text in [*texts[:13], texts[-1]]:
        assert permits(found, text), repr(text)
    assert not permits(found, "choice 4000")
    assert not permits(found, "abc")
    with pytest.raises(UserError, match="not valid Unicode"):
        choice_grammar(["\ud800"])


NUMBERS = [0, 1, -1, 5, 2**53 - 1, 2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63), 2**64 - 1, 10**18]
NUMBERS += [10**19, 0.5, -2.25, 1e-308, 1e308, -1e308, 1e17, 1 / 3, 1e-70, 2**62 + 12345]
LITERALS = [1, "a", None, True, 2**53, 1.5, [1, {"b": 2}], "é", -7, 1e17]


def a_schema(rng: random.Random, depth: int = 0) -> Any:
    """A schema of what JSON schemas often have, references and far bounds among it."""
    kind = rng.randrange(9 if depth < 3 else 5)
    if kind == 0:
        bounds = [w for w in ("minimum", "exclusiveMinimum") if rng.random() < 0.35]
        bounds += [w for w in ("maximum", "exclusiveMaximum") if rng.random() < 0.35]
        kinds = rng.choice(["integer", "number"])
        return {"type": kinds, **{word: rng.choice(NUMBERS) for word in bounds}}
    if kind == 1:
        limit = {"maxLength": rng.choice([0, 1, 5, 2**31 - 1])}
        formats = {"format": rng.choice(["path", "date", "ipv4"])} if rng.random() < 0.3 else {}
        return {"type": "string", **limit, **formats}
    if kind == 2:
        return rng.choice([{"type": "boolean"}, {"type": "null"}, True])
    if kind == 3:
        return {"enum": rng.sample(LITERALS, rng.randrange(1, 4)), "title": "t"}
    if kind == 4:
        return {"$ref": rng.choice(["#/$defs/a", "#/$defs/b~1c", "#/definitions/d%25e", "#"])}
    if kind == 5:
        return {"type": "array", "items": a_schema(rng, depth + 1), "maxItems": rng.choice([0, 3])}
    if kind == 6:
        names = rng.sample(["x", "y", "$ref", "enum", "properties"], rng.randrange(4))
        return {
            **obj(**{name: a_schema(rng, depth + 1) for name in names}),
            "required": [name for name in names if rng.random() < 0.6],
            "deprecated": True,
        }
    if kind == 7:
        return {"anyOf": [a_schema(rng, depth + 1) for _ in range(rng.randrange(1, 4))]}
    return {"allOf": [a_schema(rng, depth + 1)], "default": 3}


def a_text(grammar: str, rng: random.Random, most: int = 200) -> bytes | None:
    """A text that a grammar permits; None if it got no end, or none is permitted."""
    found, text = LLMatcher(BYTES, grammar, log_level=0), bytearray()
    mask = np.zeros(-(-BYTES.vocab_size // 32), np.int32)
    ends = (*b'"]}', BYTES.eos_token)
    while len(text) < most:
        found.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if found.is_error():
            return None
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        ids = [each for each in np.flatnonzero(bits).tolist() if each in ends or each < 256]
        ending = [each for each in ids if each in ends]
        chosen = rng.choice(ending if ending and rng.random() < 0.4 else ids)
        if chosen == BYTES.eos_token:
            return bytes(text)
        assert found.consume_token(chosen)
        text.append(chosen)
    return None


def test_what_a_schema_permits_is_valid_by_jsonschema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    num_valid = 0
    for seed in range(150):
        rng = random.Random(seed)
        schema = a_schema(rng)
        if not isinstance(schema, dict):
            continue
        more = {name: a_schema(rng, 2) for name in ("a", "b/c")}
        schema |= {"$defs": more, "definitions": {"d%e": a_schema(rng, 2)}}
        try:
            grammar = json_grammar(schema)
            check_grammar(grammar)
        except UserError:
            continue  # a bound that nothing is within, a reference to itself
        for _ in range(2):
            if (text := a_text(grammar, rng)) is not None:
                with suppress(RecursionError):  # jsonschema follows references without end
                    jsonschema.Draft202012Validator(schema).validate(json.loads(text))
                    num_valid += 1
    assert num_valid > 150
