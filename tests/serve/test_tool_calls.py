"""Claims about tool calls over HTTP: calls of earlier messages, required ones, and those that a
model writes, in an answer and in a stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from fusewright.engine.frontend.tokenizer import Tokenizer
from fusewright.engine.messages.sampling_params import SamplingParams
from fusewright.serve.http.endpoints.reading import Reading
from fusewright.serve.http.endpoints.tools import Tools, tools_of
from fusewright.serve.http.intake.protocol import ChatRequest
from fusewright.serve.http.tool_calls.call_reader import FORMATS

from ..engine.toy import TOKENIZER


@pytest.mark.parametrize("is_special", [True, False])
def test_marks_that_are_special_tokens_are_shown(tmp_path: Path, is_special: bool) -> None:
    stored = json.loads((TOKENIZER.folder / "tokenizer.json").read_text())
    mark = {**stored["added_tokens"][0], "id": 400, "content": "<tool_call>", "special": is_special}
    stored["added_tokens"].append(mark)
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    tools = Tools([TOOL], FORMATS["hermes"])
    params = Reading(tools, tokenizer=Tokenizer(tmp_path)).applied(SamplingParams())
    assert params.skip_special_tokens is not is_special


TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/whole"}},
            "$defs": {"whole": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "1+1="}], "tools": [TOOL]}


def test_a_required_call_keeps_to_its_schema(http: httpx.Client) -> None:
    named = {"type": "function", "function": {"name": "add"}}
    alone = {"tool_choice": "required", "parallel_tool_calls": False}
    for choice in ({"tool_choice": named}, alone, {"tool_choice": "required", "max_tokens": 300}):
        answer = http.post("/v1/chat/completions", json={**CHAT, "seed": 2, **choice})
        (found,) = answer.json()["choices"]
        calls = found["message"]["tool_calls"]
        for call in calls:
            assert (call["function"]["name"], call["type"]) == ("add", "function")
            assert isinstance(json.loads(call["function"]["arguments"])["a"], int)
        if "max_tokens" not in choice:
            assert found["finish_reason"] == "tool_calls" and len(calls) == 1
            assert found["message"]["content"] is None


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>{call}</tool_call>" for call in calls)


ADD, SUB = (
    '{"name":"add","arguments":{"a":5}}',
    '{"name":"s","arguments":{"a":"</tool_call>"}}',
)
FIVE, MARK = ("add", {"a": 5}), ("s", {"a": "</tool_call>"})
NAN = hermes('{"name":"add","arguments":{"a":NaN}}')
HALF = hermes('{"name":"s","arguments":{"a":"\\ud83d"}}')
Message = tuple[str | None, list[tuple[str, Any]], str]
WRITTEN: dict[str, tuple[str, dict[str, Any], Message]] = {
    "calls within content": (
        f"So\n{hermes(ADD, SUB)}\nDone.\n\nNext",
        {"n": 2, "logprobs": True},
        ("So\nDone.\n\nNext", [FIVE, MARK], "tool_calls"),
    ),
    "a NaN, half a pair": (NAN + HALF, {}, (NAN, [("s", {"a": "\ufffd"})], "tool_calls")),
    "one call at most": (
        hermes(ADD, ADD),
        {"parallel_tool_calls": False},
        (None, [FIVE], "tool_calls"),
    ),
    "a stop string in the end mark": (
        hermes(ADD),
        {"stop": "</tool"},
        (None, [FIVE], "tool_calls"),
    ),
    "no tools wanted": (hermes(ADD), {"tool_choice": "none"}, (hermes(ADD), [], "stop")),
}


@pytest.mark.product
@pytest.mark.parametrize("text, more, message", WRITTEN.values(), ids=list(WRITTEN))
def test_an_answer_and_a_stream_have_the_same_content_and_calls(
    http: httpx.Client, text: str, more: dict[str, Any], message: Message
) -> None:
    # The bundled model calls no tools: a grammar has it write the text.
    body = {**CHAT, "structured_outputs": {"choice": [text]}, "max_tokens": 200, **more}
    answer = http.post("/v1/chat/completions", json=body).json()
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(http.post("/v1/chat/completions", json=body))
    assert last["usage"] == answer["usage"]
    assert len(answer["choices"]) == more.get("n", 1)
    for choice in answer["choices"]:
        assert told(choice, choice["message"]) == message
        gained = [e for c in chunks for e in c["choices"] if e["index"] == choice["index"]]
        content = "".join(e["delta"].get("content") or "" for e in gained) or None
        calls = [call for e in gained for call in e["delta"].get("tool_calls", [])]
        assert [call["index"] for call in calls] == list(range(len(message[1])))
        assert told(gained[-1], {"content": content, "tool_calls": calls}) == message
        if choice["logprobs"] is not None:
            tokens = [t["token"] for e in gained for t in e["logprobs"]["content"]]
            assert tokens == [t["token"] for t in choice["logprobs"]["content"]]


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = answer.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def told(choice: dict[str, Any], message: dict[str, Any]) -> Message:
    """Content, calls with strictly decoded arguments, and the reason."""
    functions = [call["function"] for call in message.get("tool_calls", [])]
    calls = [(f["name"], msgspec.json.decode(f["arguments"])) for f in functions]
    return message["content"], calls, choice["finish_reason"]


def test_a_response_has_calls_as_items(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **TOOL["function"]}
    text = f"So {hermes(ADD)} then"
    given: Any = {
        "model": "abacus",
        "tools": [tool],
        "input": [
            {"role": "user", "content": "1+1="},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
        ],
        "extra_body": {"structured_outputs": {"choice": [text]}},
    }
    answer = client.responses.create(**given)
    message, call = answer.output
    assert (answer.output_text, answer.status) == ("So then", "completed")
    assert call.type == "function_call" and (call.name, call.arguments) == ("add", '{"a":5}')
    with client.responses.stream(**given) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert [item.type for item in final.output] == [message.type, call.type]
    assert final.output_text == "So then"
    assert "response.function_call_arguments.done" in kinds


@pytest.mark.parametrize(
    "more, param",
    [
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": [{"type": "web_search_call"}]}, "input"),
        ({"input": [{"type": "reasoning", "content": [{"text": 1}]}]}, "input"),
        ({"input": [{"type": "function_call", "name": "add", "arguments": {}}]}, "input"),
    ],
)
def test_bad_tools_of_a_response_are_a_400(
    http: httpx.Client, more: dict[str, Any], param: str
) -> None:
    answer = http.post("/v1/responses", json={"input": "1", **more})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_text_without_a_call_is_content(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={**CHAT, "temperature": 0}).json()
    assert answer["choices"][0]["message"]["content"] == "2"
    assert answer["choices"][0]["finish_reason"] == "stop"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [{"type": "retrieval"}]}, "tools"),
    ({"tools": "add"}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
]


@pytest.mark.parametrize("more, param", BAD)
def test_bad_tools_are_a_400(http: httpx.Client, more: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/chat/completions", json={**CHAT, **more})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_required_call_may_be_several() -> None:
    """The grammar of ``required`` takes a list, as vLLM's does; of one function, a call."""

    def schema(**more: Any) -> Any:
        grammar = tools_of(ChatRequest.model_validate({**CHAT, **more}), None).grammar
        return json.loads(grammar or "")["grammars"][0]["json_schema"]

    several = schema(tool_choice="required")
    assert (several["type"], several["minItems"], "maxItems" in several) == ("array", 1, False)
    assert "anyOf" in schema(tool_choice="required", parallel_tool_calls=False)
