"""Claims about finding calls in an output: JSON decides where a call ends, the cuts of a stream
change nothing, arguments are JSON for strict parsers, and what is no call stays as it was."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from fusewright.serve.commands.serve import PARSERS
from fusewright.serve.http.endpoints.response_items import Items
from fusewright.serve.http.reasoning.output_reader import OutputReader
from fusewright.serve.http.tool_calls.call_reader import FORMATS, CallReader, detect, divided
from fusewright.serve.http.tool_calls.json_scan import MAX_DEPTH, JsonScan

Called = tuple[str, Any]
SCHEMAS: dict[str, Any] = {
    "f": {
        "properties": {
            "n": {"type": "integer"},
            "flag": {"type": "boolean"},
            "list": {"type": "array"},
            "s": {"type": "string"},
        }
    }
}


def read(form: str, pieces: list[str], **options: Any) -> tuple[str, list[Called], str | None]:
    """Content, calls with their arguments decoded strictly, and the reason for a cut output."""
    reader, content, calls = CallReader(FORMATS[form], schemas=SCHEMAS, **options), "", []
    for piece in pieces:
        more, new = divided(reader.push(piece))
        content, calls = content + more, calls + new
    more, new = divided(reader.finish())
    content, calls = content + more, calls + new
    assert reader.num_calls == len(calls) == len({call.call_id for call in calls})
    found = [(call.name, msgspec.json.decode(call.arguments)) for call in calls]
    return content, found, reader.finish_reason("length")


def hermes(*bodies: str) -> str:
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def body(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


F1, G = body("f", '{"n": 1}'), body("g.it", "{}")
ONE, NONE = ("f", {"n": 1}), ("g.it", {})
END = '{"s": "a </tool_call> [TOOL_CALLS] <|python_tag|> ; }] \\" b"}'
ENDS = ("f", {"s": 'a </tool_call> [TOOL_CALLS] <|python_tag|> ; }] " b'})


def xml(*parameters: tuple[str, str]) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>"


def glm(*parameters: tuple[str, str], name: str = "f") -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in parameters
    )
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def deepseek(*calls: tuple[str, str], fenced: bool = True) -> str:
    begin, sep, end = (f"<\uff5ctool\u2581{each}\uff5c>" for each in BETWEEN)
    bodies = [
        f"{begin}function{sep}{name}\n```json\n{text}\n```{end}"
        if fenced
        else f"{begin}{name}{sep}{text}{end}"
        for name, text in calls
    ]
    return f"{ALL}{chr(10).join(bodies)}{ALL_END}"


BETWEEN = ("call\u2581begin", "sep", "call\u2581end")
ALL, ALL_END = (f"<\uff5ctool\u2581calls\u2581{each}\uff5c>" for each in ("begin", "end"))
CALLS: list[tuple[str, str, str, list[Called]]] = [
    # Marks inside strings are text.
    ("hermes", hermes(body("f", END)), "", [ENDS]),
    ("hermes", hermes(body("f", END), F1), "", [ENDS, ONE]),
    ("mistral", f"[TOOL_CALLS][{body('f', END)}]", "", [ENDS]),
    ("mistral", f"[TOOL_CALLS]f[ARGS]{END}", "", [ENDS]),
    ("llama3_json", body("f", END, "parameters"), "", [ENDS]),
    ("llama3_json", f"<|python_tag|>{body('f', END)}; {F1}", "", [ENDS, ONE]),
    # One mark, several, lists, names before arguments.
    ("hermes", f"<tool_call>[{F1}, {G}]</tool_call>", "", [ONE, NONE]),
    ("hermes", f"<tool_call>{F1}\n{G}</tool_call>", "", [ONE, NONE]),
    ("hermes", f"<tool_call>{F1}<tool_call>{G}", "", [ONE, NONE]),
    ("mistral", f"[TOOL_CALLS] [{F1}, {G}]", "", [ONE, NONE]),
    ("mistral", f"[TOOL_CALLS][{F1}][TOOL_CALLS] [{G}]", "", [ONE, NONE]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"n": 1}[TOOL_CALLS]g.it[ARGS]{}', "", [ONE, NONE]),
    ("mistral", 'hm[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{"n": 1}', "hm", [ONE]),
    ("mistral", '[TOOL_CALLS]f{"n": 1}', "", [ONE]),
    ("llama3_json", f"{F1};{G}", "", [ONE, NONE]),
    ("llama3_json", f"Wait.<|python_tag|>{F1}", "Wait.", [ONE]),
    ("xlam", f"[{F1}, {G}]", "", [ONE, NONE]),
    # White space: content keeps its own; that behind a call goes, and that before a first one.
    ("hermes", hermes(F1) + "\nDone.\n\nNext\n", "Done.\n\nNext\n", [ONE]),
    ("hermes", "\n\n" + hermes(F1, G) + "\n", "", [ONE, NONE]),
    ("hermes", f"So \n{hermes(F1)}\n  and{hermes(G)}", "So \nand", [ONE, NONE]),
    ("mistral", f"[TOOL_CALLS][{F1}]\n\nDone.\n\nNext", "Done.\n\nNext", [ONE]),
    ("llama3_json", f"\n{F1}\n\nI called f.", "I called f.", [ONE]),
    # An output that ends early: behind the JSON it is a call, before its end it is none.
    ("hermes", f"<tool_call>{F1}", "", [ONE]),
    ("hermes", f"<tool_call>{F1}\n</tool_", "", [ONE]),
    ("hermes", hermes(F1) + '\n<tool_call>{"name": "g', '<tool_call>{"name": "g', [ONE]),
    # Arguments in a string, none, and null.
    ("hermes", hermes(body("f", '"{\\"n\\": 1}"')), "", [ONE]),
    (
        "hermes",
        hermes(body("g.it", "null"), '{"name": "g.it"}', body("g.it", '""')),
        "",
        [NONE] * 3,
    ),
    # Half a surrogate pair, in either part.
    ("hermes", hermes(body("f", '{"s": "\\ud83d!"}')), "", [("f", {"s": "\ufffd!"})]),
    ("hermes", hermes(body("f\\ude00", '{"s": "\\ud83d\\ude00"}')), "", [("f\ufffd", {"s": "😀"})]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"s": "\\udead"}', "", [("f", {"s": "\ufffd"})]),
    # What fails before does not hide what follows.
    ("hermes", f"<tool_call>{{oops <tool_call>{F1}</tool_call>", "<tool_call>{oops ", [ONE]),
    ("hermes", f"<tool_call>no</tool_call>{hermes(F1)}", "<tool_call>no</tool_call>", [ONE]),
    ("mistral", f"[TOOL_CALLS] is a mark[TOOL_CALLS][{F1}]", "[TOOL_CALLS] is a mark", [ONE]),
    ("mistral", f"[TOOL_CALLS][{F1}], as [1] says", ", as [1] says", [ONE]),
    # Qwen3-Coder: values have the types of the schema; a value may hold what ends values.
    (
        "qwen3_coder",
        xml(("n", "7"), ("flag", "True"), ("list", "[1, 2]"), ("s", "7"), ("other", "7")),
        "",
        [("f", {"n": 7, "flag": True, "list": [1, 2], "s": "7", "other": "7"})],
    ),
    ("qwen3_coder", "Hm\n" + xml(), "Hm\n", [("f", {})]),
    ("qwen3_coder", xml(("n", "many")), "", [("f", {"n": "many"})]),
    (
        "qwen3_coder",
        xml(("s", "a\n</parameter> <b>&amp;</function>\n  c")) + xml(("n", "1")),
        "",
        [("f", {"s": "a\n</parameter> <b>&amp;</function>\n  c"}), ONE],
    ),
    # GLM-4.5: pairs of keys and values, of the types of the schema.
    (
        "glm45",
        "Hm\n" + glm(("n", "7"), ("list", "[1]"), ("s", "a</arg_value> <b>\n")) + "\nSo",
        "Hm\nSo",
        [("f", {"n": 7, "list": [1], "s": "a</arg_value> <b>"})],
    ),
    ("glm45", glm(name="g.it") + "\n" + glm(("n", "1")), "", [NONE, ONE]),
    ("glm45", "<tool_call>f<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>", "", [ONE]),
    # DeepSeek: a fence of JSON, or JSON alone.
    ("deepseek_v3", "Hm" + deepseek(("f", '{"n": 1}'), ("g.it", "{}")), "Hm", [ONE, NONE]),
    ("deepseek_v3", deepseek(("f", END)) + "\nSo", "So", [ENDS]),
    ("deepseek_v31", deepseek(("f", '{"n": 1}'), ("g.it", "{}"), fenced=False), "", [ONE, NONE]),
    ("deepseek_v3", deepseek(("f", '{"n": 1}')).removesuffix(ALL_END), "", [ONE]),
]

CONTENT: list[tuple[str, str]] = [
    ("hermes", hermes(body("f", '{"n": NaN}'))),
    ("hermes", hermes(body("f", '{"n": -Infinity}'))),
    ("hermes", hermes(body("f", '{"n": 1e999}'))),
    ("hermes", hermes(body("f", '{"n": 01}'))),
    ("hermes", hermes(body("f", '{"s": "a\nb"}'))),
    ("hermes", hermes(body("f", '{"s": "\\x41"}'))),
    ("hermes", hermes(body("f", f'{{"n": {"1" * 5000}}}'))),
    ("hermes", hermes(body("f", '{"list": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}"))),
    ("hermes", hermes("{'name': 'f', 'arguments': {}}")),
    ("hermes", hermes(F1 + "}")),
    ("hermes", f"<tool_call>{F1} and more</tool_call>"),
    ("hermes", hermes('{"name": "", "arguments": {}}', '{"name": 1, "arguments": {}}', "[]", "{}")),
    ("hermes", hermes(f"[{F1}, 1]")),
    ("hermes", '<tool_call>{"name": "f", "argum'),
    ("hermes", "1 < 2 and <tool"),
    ("hermes", " \n "),
    ("glm45", hermes(F1)),
    ("glm45", "<tool_call>two words"),
    ("glm45", "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>1"),
    ("deepseek_v3", f"{ALL}no"),
    ("deepseek_v3", deepseek(("f", '{"n": NaN}'))),
    ("deepseek_v3", deepseek(("f", '{"n": 1'))),
    ("mistral", "[TOOL_CALLS]f[ARGS]"),
    ("mistral", "[TOOL_CALLS]f[ARGS]{1}"),
    ("mistral", "[TOOL_CALLS] " + "a" * 600 + "{}"),
    ("mistral", "[TOOL_CALLS]two words{}"),
    ("llama3_json", '{"name": "Ann", "age": 3}'),
    ("llama3_json", f"so {F1}"),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=s>\ncut"),
    ("qwen3_coder", hermes(F1)),
    ("xlam", "[1] is a list"),
]


def cuts(text: str) -> list[list[str]]:
    return [[text], list(text), [text[i : i + 3] for i in range(0, len(text), 3)]]


@pytest.mark.parametrize("form, text, content, calls", CALLS)
def test_calls_are_found_wherever_the_text_is_cut(
    form: str, text: str, content: str, calls: list[Called]
) -> None:
    for pieces in cuts(text):
        assert read(form, pieces)[:2] == (content, calls)


@pytest.mark.parametrize("form, text", CONTENT)
def test_what_is_no_call_is_content_unchanged(form: str, text: str) -> None:
    for pieces in cuts(text):
        assert read(form, pieces)[:2] == (text, [])


def test_content_is_not_held_back_once_it_can_be_no_call() -> None:
    reader = CallReader(FORMATS["hermes"])
    assert divided(reader.push('Wait <tool_call>{"name": ')) == ("Wait ", [])
    assert divided(reader.push("N")) == ('<tool_call>{"name": N', [])


_PARTS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "[ARGS]",
            "<|python_tag|>",
            "<function=f>",
        ),
        *("<parameter=n>", "</parameter>", "</function>", "<", "[T", "{", "}", "[", "]", ":", ","),
        *(
            ";",
            '"',
            "\\",
            "\\ud83d",
            "\\ude00",
            "NaN",
            "1e999",
            "null",
            "f",
            " ",
            "\n\n",
            "é",
            "\ud83d",
        ),
        *(F1, G, body("f", END), hermes(F1), f"f{END}", xml(("n", "1")), body("f", "NaN")),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", glm(("n", "1"))),
        *(ALL, ALL_END, deepseek(("f", "{}")), deepseek(("f", END), fenced=False)),
    ]
)
_TEXTS = st.lists(_PARTS | st.text(max_size=4), max_size=12).map("".join)


@settings(max_examples=150)
@given(
    st.sampled_from(sorted(FORMATS)),
    _TEXTS,
    st.booleans(),
    st.lists(st.integers(0, 200), max_size=8),
    st.sampled_from([None, 1]),
)
def test_any_cuts_of_any_text_give_what_the_whole_gives(
    form: str, text: str, is_marked: bool, places: list[int], max_calls: int | None
) -> None:
    text = (FORMATS[form].start if is_marked else "") + text
    bounds = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    content, calls, reason = read(form, [text], max_calls=max_calls)
    assert read(form, pieces, max_calls=max_calls) == (content, calls, reason)
    assert calls or (content, reason) == (text, "length")


@settings(max_examples=150)
@given(
    st.lists(
        st.sampled_from(
            [*'{}[],:" \n\\', '"a"', '"a":', "-1.5e3", "0", "01", "true", "x", "\\u00e9"]
        ),
        max_size=12,
    ),
    st.sampled_from("{["),
)
def test_a_value_ends_where_json_says(parts: list[str], first: str) -> None:
    text = first + "".join(parts)
    try:
        end = json.JSONDecoder().raw_decode(text)[1]
    except ValueError:
        end = -1
    scan, at = JsonScan(), 0
    for char in text:
        at += scan.feed(char, 0)
        if scan.is_done or scan.is_bad:
            break
    assert (at if scan.is_done else -1) == end


def test_ids_are_as_templates_want_them() -> None:
    for form, wanted in (("mistral", "[A-Za-z0-9]{9}"), ("hermes", "call_[0-9a-f]{24}")):
        for is_call, text in ((False, FORMATS[form].start + F1), (True, F1)):
            reader = CallReader(FORMATS[form], is_call=is_call)
            calls = divided(reader.push(text) + reader.finish())[1]
            assert [bool(re.fullmatch(wanted, call.call_id)) for call in calls] == [True]


def test_calls_of_a_required_list_come_one_by_one() -> None:
    for text in (f"[{F1}, {G}]", f" [\n{F1}\n,{G} ] "):
        for pieces in cuts(text):
            assert read("hermes", pieces, is_call=True) == ("", [ONE, NONE], "tool_calls")
    reader = CallReader(None, is_call=True)
    assert [call.name for call in divided(reader.push(f"[{F1}"))[1]] == ["f"]
    content, calls, reason = read("xlam", [f"[{F1}, {G[:9]}"], is_call=True)
    assert (content.lstrip(", "), calls, reason) == (G[:9], [ONE], "length")


def test_no_more_calls_than_allowed_are_told() -> None:
    for pieces in cuts(hermes(F1, G) + "\nDone."):
        assert read("hermes", pieces, max_calls=1)[:2] == ("Done.", [ONE])


@pytest.mark.parametrize(
    "text, reason, told",
    [
        (hermes(F1), "stop", "tool_calls"),
        (hermes(F1) + "Done.", "stop", "tool_calls"),
        (hermes(F1), "length", "tool_calls"),
        (hermes(F1) + "\n<tool_call>{", "length", "length"),
        (hermes(F1) + "And so", "length", "length"),
        (hermes(F1), "abort", "abort"),
        ("no call", "stop", "stop"),
    ],
)
def test_calls_are_the_reason_unless_the_output_was_cut_behind_them(
    text: str, reason: str, told: str
) -> None:
    reader = CallReader(FORMATS["hermes"])
    reader.push(text)
    reader.finish()
    assert (reader.finish_reason(None), reader.finish_reason(reason)) == (None, told)


def test_arguments_are_the_text_that_the_model_wrote() -> None:
    written = '{"big": 123456789012345678901234567890, "x": 1.10,  "s": "\\u00e9"}'
    reader = CallReader(FORMATS["hermes"])
    (call,) = reader.push(hermes(body("f", written)))
    assert call.arguments == written


@pytest.mark.parametrize("text", [hermes(F1) + "a" + hermes(G) + "b", "a" + hermes(F1, G), "a", ""])
def test_items_of_a_response_are_those_of_the_whole_text(text: str) -> None:
    told = []
    for pieces in cuts(text):
        items = Items("resp_1", OutputReader(None, CallReader(FORMATS["hermes"])))
        events = [event for piece in pieces for event in items.push(piece)] + items.finish("stop")
        texts = [content["delta"] for kind, content in events if kind.endswith("text.delta")]
        done = [content["item"] for kind, content in events if kind.endswith("item.done")]
        assert sorted(done, key=items.items.index) == items.items
        told.append([{**item, "id": "", "call_id": ""} for item in items.items])
        whole = [part["text"] for item in items.items for part in item.get("content", [])]
        assert whole in ([], ["".join(texts)])
    assert told[0] == told[1] == told[2]
    assert [item["type"] for item in told[0]][:1] == [
        "function_call" if text.startswith("<") else "message"
    ]


def test_the_command_line_has_every_format() -> None:
    assert set(PARSERS) == {"auto", *FORMATS}


def test_the_format_is_read_off_the_template() -> None:
    assert detect("{{ '<tool_call>' }}") == "hermes"
    assert detect("{{ '<tool_call>\n<function=' + name }}") == "qwen3_coder"
    assert detect("[TOOL_CALLS] {{ tools }}") == "mistral"
    assert detect("<tool_call>{{ name }}<arg_key>") == "glm45"
    assert detect(ALL) == "deepseek_v3"
    assert detect("<|channel|>") == "openai"
    assert detect('{"name": …, "parameters": …}') == "llama3_json"
    assert detect("{{ messages }}") is None
