"""Claims about tool calls: they are found in each format wherever the text is cut, and what is no
call stays content."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from fusewright.serve.http.tool_calls import FORMATS, CallReader, detect

from .server_process import ServerProcess

ADD: tuple[str, dict[str, Any]] = ("add", {"a": 1, "text": "é </b>"})
GET: tuple[str, dict[str, Any]] = ("get.it", {})


def called(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


A, G = called(*ADD), called(*GET)
CASES: list[tuple[str, str, str, list[tuple[str, dict[str, Any]]]]] = [
    ("hermes", f"<tool_call>\n{A}\n</tool_call>", "", [ADD]),
    ("hermes", f"so <tool_call>{A}</tool_call>\n<tool_call>{G}</tool_call>", "so ", [ADD, GET]),
    ("hermes", "1 < 2 and <tool", "1 < 2 and <tool", []),
    ("hermes", "<tool_call>no</tool_call>!", "<tool_call>no</tool_call>!", []),
    ("hermes", f"<tool_call>{A}", "", [ADD]),
    ("hermes", '<tool_call>{"na', '<tool_call>{"na', []),
    ("mistral", f"[TOOL_CALLS] [{A}, {G}]", "", [ADD, GET]),
    ("mistral", f"hm[TOOL_CALLS]add{json.dumps(ADD[1])}", "hm", [ADD]),
    ("mistral", "a [TOOL] b", "a [TOOL] b", []),
    ("llama3_json", called(*ADD, key="parameters"), "", [ADD]),
    ("llama3_json", f"<|python_tag|>{A}; {G}", "", [ADD, GET]),
    ("llama3_json", "{no json", "{no json", []),
    ("llama3_json", 'so {"name": "x"}', 'so {"name": "x"}', []),
]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("form, text, content, calls", CASES)
def test_calls_are_found_wherever_the_text_is_cut(
    form: str, text: str, content: str, calls: list[Any], size: int
) -> None:
    reader, seen, found = CallReader(FORMATS[form]), "", []
    for start in range(0, len(text), size):
        more, new = reader.push(text[start : start + size])
        seen, found = seen + more, found + new
    more, new = reader.finish()
    assert seen + more == content
    assert [(call.name, json.loads(call.arguments)) for call in found + new] == calls
    assert reader.num_calls == len(calls)
    assert len({call.call_id for call in found + new}) == len(calls)


def test_the_format_is_read_off_the_template() -> None:
    assert detect("{{ '<tool_call>' }}") == "hermes"
    assert detect("[TOOL_CALLS] {{ tools }}") == "mistral"
    assert detect('{"name": …, "parameters": …}') == "llama3_json"
    assert detect("{{ messages }}") is None


TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "1+1="}], "tools": [TOOL]}


def test_a_required_call_keeps_to_its_schema(http: httpx.Client) -> None:
    named = {"type": "function", "function": {"name": "add"}}
    for choice in ("required", named):
        answer = http.post("/v1/chat/completions", json={**CHAT, "tool_choice": choice, "seed": 2})
        (found,) = answer.json()["choices"]
        assert found["finish_reason"] == "tool_calls"
        (call,) = found["message"]["tool_calls"]
        assert (call["function"]["name"], call["type"]) == ("add", "function")
        assert isinstance(json.loads(call["function"]["arguments"])["a"], int)
        assert found["message"]["content"] is None


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_a_call_that_the_model_writes_is_found(server: ServerProcess, streamed: bool) -> None:
    # The bundled model calls no tools: a grammar has it write one.
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 5}}\n</tool_call>'
    body = {**CHAT, "structured_outputs": {"choice": [text]}, "max_tokens": 100}
    headers = {"authorization": "Bearer a key"}
    with server.client(headers=headers) as client:
        if not streamed:
            answer = client.post("/v1/chat/completions", json=body).json()
            choices = answer["choices"]
            calls = choices[0]["message"]["tool_calls"]
        else:
            answer = client.post("/v1/chat/completions", json={**body, "stream": True})
            lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            choices = [json.loads(line)["choices"][0] for line in lines]
            assert not any(choice["delta"].get("content") for choice in choices)
            calls = [c for choice in choices for c in choice["delta"].get("tool_calls", [])]
            assert calls[0]["index"] == 0
    assert [call["function"] for call in calls] == [{"name": "add", "arguments": '{"a": 5}'}]
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_text_without_a_call_is_content(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={**CHAT, "temperature": 0}).json()
    assert answer["choices"][0]["message"]["content"] == "2"
    assert answer["choices"][0]["finish_reason"] == "stop"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [{"type": "retrieval"}]}, "tools"),
    ({"tools": "add"}, "tools"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
]


@pytest.mark.parametrize("more, param", BAD)
def test_bad_tools_are_a_400(http: httpx.Client, more: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/chat/completions", json={**CHAT, **more})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
