"""Claims about gpt-oss's channels: thinking, answer and calls are told apart wherever a stream is
cut, and a server of such a model answers as clients of OpenAI expect."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings, strategies as st

from fusewright.engine.frontend.grammar import json_grammar
from fusewright.engine.frontend.tokenizer import Tokenizer
from fusewright.serve.http.reasoning.forms import Form
from fusewright.serve.http.reasoning.harmony import ChannelReader, Harmony
from fusewright.serve.http.reasoning.marks import Opening
from fusewright.serve.http.reasoning.output_reader import Message

from .scripted_model import EOS, write_model
from .server_process import ServerProcess
from .test_tool_calls import TOOL, events

OPEN, FREE, CLOSED = Opening
THINK = "<|channel|>analysis<|message|>"
ANSWER = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":1}'
F1 = ("f", '{"a":1}')
Told = tuple[str, str, list[tuple[str, str]]]
WRITTEN: list[tuple[Opening, str, Told]] = [
    (FREE, f"{THINK}hm{NEXT}{ANSWER}So 4.<|return|>", ("So 4.", "hm", [])),
    (FREE, f"{THINK}hm\n{NEXT}{THINK}so{NEXT}{ANSWER} 4", (" 4", "hm\n\nso", [])),
    (FREE, f"{THINK}cut", ("", "cut", [])),
    (FREE, f"{THINK}cut<|en", ("", "cut<|en", [])),
    (FREE, f"{ANSWER}4", ("4", "", [])),
    (FREE, "4 <|x", ("4 <|x", "", [])),
    (FREE, "to", ("to", "", [])),
    (FREE, "to=do it", ("to=do it", "", [])),
    (FREE, f"{THINK}hm{NEXT}{CALL}<|call|>", ("", "hm", [F1])),
    (FREE, f"{THINK}hm{NEXT}{CALL}", ("", "hm", [F1])),
    (FREE, f" to=functions.f{CALL.replace(' to=functions.f', '')}<|call|>", ("", "", [F1])),
    (
        FREE,
        f"{CALL}{NEXT} to=functions.g<|channel|>commentary json<|message|><|call|>",
        ("", "", [F1, ("g", "{}")]),
    ),
    (
        FREE,
        f"<|channel|>commentary<|message|>I look.{NEXT}{CALL}<|call|>",
        ("I look.", "", [F1]),
    ),
    (
        FREE,
        "<|channel|>commentary to=functions.f<|message|>{cut<|call|>",
        ("{cut", "", []),
    ),
    (FREE, "<|channel|>analysis to=browser.open code<|message|>{}<|call|>", ("", "{}", [])),
    (OPEN, f"hm{NEXT}{ANSWER}4", ("4", "hm", [])),
    (CLOSED, "4<|return|>", ("4", "", [])),
]


def told(pieces: Sequence[str], opening: Opening, *, finds_calls: bool = True) -> Told:
    reader = ChannelReader(opening, finds_calls=finds_calls)
    parts = [part for piece in pieces for part in reader.push(piece)]
    message = Message.of([*parts, *reader.finish()])
    return message.content, message.thinking, [(c.name, c.arguments) for c in message.calls]


@pytest.mark.parametrize("opening, text, message", WRITTEN)
def test_channels_are_told_apart_wherever_the_text_is_cut(
    opening: Opening, text: str, message: Told
) -> None:
    for pieces in ([text], list(text), [text[i : i + 3] for i in range(0, len(text), 3)]):
        assert told(pieces, opening) == message


def test_a_call_without_tools_is_content() -> None:
    assert told([f"{CALL}<|call|>"], FREE, finds_calls=False) == ('{"a":1}', "", [])


_PIECES = st.sampled_from(
    [
        *("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|call|>", "<|constrain|>", "<|"),
        *("assistant", "analysis", "final", "commentary", " to=functions.f ", "{}", "a", "\n"),
    ]
)


@settings(max_examples=150)
@given(st.sampled_from([*Opening]), st.lists(_PIECES, max_size=16).map("".join), st.data())
def test_any_cuts_of_any_text_give_what_the_whole_gives(
    opening: Opening, text: str, data: st.DataObject
) -> None:
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
    content, thinking, calls = told([text], opening)
    assert told(pieces, opening) == (content, thinking, calls)
    for mark in ("<|start|>", "<|end|>", "<|channel|>", "<|call|>"):
        assert mark not in content and mark not in thinking


TEMPLATE = """{%- for m in messages -%}
{%- if m.tool_calls and m.content and m.thinking -%}{{ raise_exception("not both") }}{%- endif -%}
{%- if m.role == "assistant" -%}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>
{{- m.thinking }}<|end|>{% endif -%}
{%- endif -%}
{%- if m.content is defined -%}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{%- if reasoning_effort is defined %}{{ reasoning_effort }}{% endif -%}
<|start|>{{ messages[-1].content }}
{%- endif -%}"""
"""The last message chooses the script, in place of the role."""
MARKS = [
    *("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|call|>", "<|constrain|>"),
    "<|return|>",
]


# A token leads to one other, so that each script joins marks and text to tokens of its own.
CHAINS = [
    ["A:", f"{THINK}I ", "add.", f"{NEXT}{ANSWER}95", EOS],
    [
        *("B:", f"{THINK}I call.", f"{NEXT}<|channel|>commentary to=functions.add "),
        *("<|constrain|>json<|message|>{", '"a": ', "5}", EOS),
    ],
    ["C:", f"{ANSWER}plain", EOS],
    ["D:", "<|channel|>", "analysis", "<|message|>", "on ", "and ", "on "],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("harmony"), CHAINS, TEMPLATE, MARKS)


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[httpx.Client]:
    made = ServerProcess(
        *("--dtype", "float32", "--max-num-seqs", "8"), model=str(folder)
    ).wait_ready()
    with made.client() as client:
        yield client
    assert made.stop() == 0


def test_a_form_and_a_call_begin_behind_the_thinking(folder: Path) -> None:
    llguidance = pytest.importorskip("llguidance")
    tokenizer = Tokenizer(folder)
    library = llguidance.LLTokenizer(str(folder / "tokenizer.json"))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = Form(json_grammar({"type": "integer"}))
    call = Form(form.grammar, [{"name": "f", "parameters": schema}, {"name": "g"}])
    long = ANSWER.replace("final", "fin") + "7"
    for wanted, text, fits in [
        (form, f"{THINK}hm{NEXT}{ANSWER}7", True),
        (form, f"{ANSWER}7", True),
        (form, f"{ANSWER}x", False),
        (form, long, False),
        (form, f"{THINK}hm{NEXT}{CALL}", False),
        (call, f"{THINK}hm{NEXT}{CALL}", True),
        (call, CALL, True),
        (call, CALL.replace("1", '"x"'), False),
        (call, f"{ANSWER}7", False),
    ]:
        ids: list[int] = []
        for part in _split(text):
            ids += [tokenizer._tokenizer.token_to_id(part)] if part in MARKS else [*part.encode()]
        grammar = Harmony().form(wanted, FREE, lambda mark: _ids(tokenizer, mark))
        matcher = llguidance.LLMatcher(library, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        taken = all(matcher.consume_token(each) for each in ids)
        assert (taken and matcher.is_accepting()) is fits, text


def _split(text: str) -> list[str]:
    parts = [text]
    for mark in MARKS:
        parts = [
            piece
            for part in parts
            for piece in ([part] if part in MARKS else _around(part, mark))
            if piece
        ]
    return parts


def _around(text: str, mark: str) -> list[str]:
    pieces = text.split(mark)
    return [pieces[0], *(each for piece in pieces[1:] for each in (mark, piece))]


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def asked(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 60, **more}


ANSWERS: dict[str, tuple[dict[str, Any], str | None, str | None, str]] = {
    "an answer behind thinking": (asked("A:"), "I add.", "95", "stop"),
    "an answer alone": (asked("C:"), None, "plain", "stop"),
    "unfinished": (asked("D:", max_tokens=6), "on and on ", None, "length"),
    "a call": (asked("B:", tools=[TOOL]), "I call.", None, "tool_calls"),
    "no tools": (asked("B:"), "I call.", '{"a": 5}', "stop"),
    "it is left out": (asked("A:", include_reasoning=False), None, "95", "stop"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_chat_has_channels_as_fields_whole_and_streamed(http: httpx.Client, name: str) -> None:
    body, thinking, content, reason = ANSWERS[name]
    answer = http.post("/v1/chat/completions", json=body).json()
    (choice,) = answer["choices"]
    message = choice["message"]
    assert (message.get("reasoning_content"), message["content"]) == (thinking, content)
    assert choice["finish_reason"] == reason
    functions = [call["function"] for call in message.get("tool_calls", [])]
    expected = [{"name": "add", "arguments": '{"a": 5}'}] if name == "a call" else []
    assert functions == expected
    chunks = events(http.post("/v1/chat/completions", json={**body, "stream": True}))
    deltas = [each["delta"] for chunk in chunks for each in chunk["choices"]]
    assert "".join(d.get("reasoning") or "" for d in deltas) == (thinking or "")
    assert "".join(d.get("content") or "" for d in deltas) == (content or "")
    streamed = [call["function"] for d in deltas for call in d.get("tool_calls", [])]
    assert streamed == expected


def test_a_budget_closes_the_channel(http: httpx.Client) -> None:
    body = asked("D:", thinking_token_budget=3, max_tokens=40)
    answer = http.post("/v1/chat/completions", json=body).json()
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == "on and on "
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    # The script goes on behind the mark of a text as it does in the thinking.
    assert message["content"].startswith("on and ")


def test_a_required_call_is_a_message_to_its_function(http: httpx.Client) -> None:
    blanks = {str(each): -100 for each in (9, 10, 32)}
    more = {"tools": [TOOL], "tool_choice": "required", "thinking_token_budget": 2, "seed": 4}
    body = asked("A:", max_tokens=200, **more)
    answer = http.post("/v1/chat/completions", json={**body, "logit_bias": blanks}).json()
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "add"
    assert isinstance(json.loads(call["function"]["arguments"])["a"], int)
    assert choice["finish_reason"] == "tool_calls"


CALLED = {
    "role": "assistant",
    "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}},
    ],
}


def test_the_conversation_reaches_the_template(http: httpx.Client) -> None:
    def prompt(**more: Any) -> str:
        past = {"role": "assistant", "reasoning_content": "hm", "content": "95"}
        body = {"messages": [past, {"role": "user", "content": "A:"}], **more}
        ids = http.post("/tokenize", json=body).json()["tokens"]
        text: str = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
        return text

    called = {**CALLED, "reasoning_content": "hm", "content": "I look."}
    past = {"messages": [called, {"role": "user", "content": "A:"}]}
    assert http.post("/tokenize", json=past).json()["count"] > 9
    text = prompt(reasoning_effort="high")
    assert "<|start|>assistant<|channel|>analysis<|message|>hm<|end|>" in text
    assert text.endswith("high<|start|>A:")
