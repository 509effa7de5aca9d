"""Claims about a server of a model that thinks: clients of OpenAI and Anthropic get the thinking
apart from the answer, whole and streamed, in every API."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from fusewright.serve.cli import main

from .scripted_model import EOS, write_model
from .server_process import ServerProcess
from .test_tool_calls import TOOL, events

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 5}}\n</tool_call>'
TEMPLATE = """{%- for m in messages %}
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- endfor %}{% if enable_thinking is defined and not enable_thinking %}<think></think>

{% elif messages[-1].content == "Ever:" %}<think>
{% endif %}
{#- <tool_call> -#}"""
CHAINS = [
    ["Add:", "<think>", "I add", " them.\n", "</think>", "\n\n", "It is ", "95.", EOS],
    ["Call:", "<think>\n\n", "I call.", "</think> ", CALL, EOS],
    ["Ever:", "<think>\n", "on ", "and ", "on "],
    ["Plain:", "It is "],
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = write_model(tmp_path_factory.mktemp("thinks"), CHAINS, TEMPLATE)
    flags = ("--served-model-name", "thinker", "--dtype", "float32", "--max-num-seqs", "8")
    made = ServerProcess(*flags, model=str(folder)).wait_ready()
    yield made
    assert made.stop() == 0
    assert not [line for line in made.lines if "Traceback" in line]


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


def asked(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 60, **more}


SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"enum": [7]}}}
NAMED = {"type": "function", "function": {"name": "add"}}
ANSWERS: dict[str, tuple[dict[str, Any], str | None, str | None, str, int]] = {
    # what is asked, thinking, content, finish reason, tokens of thinking
    "thinking, then the answer": (asked("Add:"), "I add them.", "It is 95.", "stop", 2),
    "no thinking": (asked("Plain:"), None, "It is 95.", "stop", 0),
    "thinking is off": (
        asked("Add:", chat_template_kwargs={"enable_thinking": False}),
        *(None, "It is 95.", "stop", 0),
    ),
    "an effort of none": (
        asked("Add:", reasoning_effort="none"),
        *(None, "It is 95.", "stop", 0),
    ),
    "two outputs": (
        asked("Add:", n=2, seed=3, top_p=0.9),
        *("I add them.", "It is 95.", "stop", 4),
    ),
    "it is left out": (asked("Add:", include_reasoning=False), None, "It is 95.", "stop", 2),
    "unfinished": (asked("Ever:", max_tokens=5), "on and on and on", None, "length", 5),
    "a budget": (
        asked("Ever:", thinking_token_budget=3, n=2, seed=1),
        *("on and on", "It is 95.", "stop", 6),
    ),
    "a budget that is not spent": (
        asked("Add:", thinking_token_budget=3),
        *("I add them.", "It is 95.", "stop", 2),
    ),
    "a budget before a form": (
        asked("Ever:", thinking_token_budget=2, response_format=SCHEMA),
        *("on and", "7", "stop", 2),
    ),
    "a budget of nothing, without thinking": (
        asked("Plain:", thinking_token_budget=0),
        *(None, "It is 95.", "stop", 0),
    ),
    "a form": (asked("Add:", response_format=SCHEMA), "I add them.", "7", "stop", 2),
    "a form without thinking": (
        asked("Plain:", response_format=SCHEMA, reasoning_effort="none"),
        *(None, "7", "stop", 0),
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_a_chat_has_the_thinking_apart_whole_and_streamed(http: httpx.Client, name: str) -> None:
    body, thinking, content, reason, count = ANSWERS[name]
    answer = http.post("/v1/chat/completions", json=body).json()
    for choice in answer["choices"]:
        message = choice["message"]
        assert message.get("reasoning_content") == message.get("reasoning") == thinking
        assert (message["content"], choice["finish_reason"]) == (content, reason)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(http.post("/v1/chat/completions", json=body))
    assert last["usage"] == answer["usage"] | {
        "prompt_tokens_details": last["usage"]["prompt_tokens_details"]
    }
    for choice in answer["choices"]:
        deltas = [
            each["delta"]
            for chunk in chunks
            for each in chunk["choices"]
            if each["index"] == choice["index"]
        ]
        for field, whole in (("reasoning_content", thinking), ("reasoning", thinking)):
            assert "".join(d.get(field) or "" for d in deltas) == (whole or "")
        assert "".join(d.get("content") or "" for d in deltas) == (content or "")


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
def test_calls_come_behind_the_thinking(http: httpx.Client, choice: Any) -> None:
    text = "Call:" if choice == "auto" else "Add:"
    # The script knows no list of calls: what it leaves open is drawn, without blanks.
    blanks = {str(each): -100 for each in (9, 10, 32)}
    more = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 300, "seed": 5}
    body = asked(text, **more, **({} if choice == "auto" else {"logit_bias": blanks}))
    if choice == "required":
        body["parallel_tool_calls"] = False
    (found,) = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert found["message"]["reasoning_content"].startswith("I ")
    assert found["message"]["content"] is None
    (call,) = found["message"]["tool_calls"]
    assert call["function"]["name"] == "add"
    assert isinstance(json.loads(call["function"]["arguments"])["a"], int)
    assert found["finish_reason"] == "tool_calls"
    chunks = events(http.post("/v1/chat/completions", json={**body, "stream": True}))
    deltas = [each["delta"] for chunk in chunks for each in chunk["choices"]]
    joined = "".join(delta.get("reasoning") or "" for delta in deltas)
    assert joined == found["message"]["reasoning"]
    (streamed,) = [each for delta in deltas for each in delta.get("tool_calls", [])]
    assert streamed["function"] == call["function"]


def test_a_conversation_brings_its_thinking_back(http: httpx.Client) -> None:
    def num_tokens(**fields: str) -> int:
        past = [{"role": "assistant", "content": "95.", **fields}]
        body = {"messages": past, "add_generation_prompt": True}
        count: int = http.post("/tokenize", json=body).json()["count"]
        return count

    without = num_tokens()
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert num_tokens(**{name: "I add"}) == without + 3


def test_the_client_of_openai_reads_responses(server: ServerProcess, http: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        given: Any = {"model": "thinker", "input": "Add:", "max_output_tokens": 60}
        answer = client.responses.create(**given)
        thinking, message = answer.output
        assert thinking.type == "reasoning" and message.type == "message"
        assert thinking.content is not None and thinking.content[0].text == "I add them."
        assert answer.output_text == "It is 95."
        assert answer.usage is not None
        assert answer.usage.output_tokens_details.reasoning_tokens == 2
        with client.responses.stream(**given) as stream:
            told = list(stream)
            final = stream.get_final_response()
        kinds = [event.type for event in told]
        assert kinds.index("response.reasoning_text.done") < kinds.index(
            "response.output_text.delta"
        )
        deltas = [e.delta for e in told if e.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == "I add them."
        assert final.output_text == "It is 95."
        items = [each.to_dict() for each in answer.output]
        again: Any = [*items, {"role": "user", "content": "Add:"}]
        assert client.responses.create(**{**given, "input": again}).output_text == "It is 95."
        cut = client.responses.create(**{**given, "input": "Ever:", "max_output_tokens": 5})
        assert [item.type for item in cut.output] == ["reasoning"]
        assert cut.status == "incomplete"


def test_the_client_of_anthropic_reads_blocks(server: ServerProcess) -> None:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
        given: Any = {"model": "thinker", "max_tokens": 60}
        given["messages"] = [{"role": "user", "content": "Add:"}]
        answer = claude.messages.create(**given)
        thinking, text = answer.content
        assert (thinking.type, thinking.thinking) == ("thinking", "I add them.")
        assert thinking.signature and (text.type, text.text) == ("text", "It is 95.")
        with claude.messages.stream(**given) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_message()
        assert [block.type for block in final.content] == ["thinking", "text"]
        assert final.content[0].thinking == "I add them." and final.content[0].signature
        assert kinds.count("content_block_stop") == 2
        off = claude.messages.create(**given, thinking={"type": "disabled"})
        assert [block.type for block in off.content] == ["text"]
        asked = {**given, "messages": [{"role": "user", "content": "Ever:"}]}
        held = claude.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 2})
        assert held.content[0].thinking == "on and" and held.content[1].text == "It is 95."
        with pytest.raises(anthropic.BadRequestError, match="budget_tokens: expected 1"):
            claude.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": "x"})
        calls = {**given, "messages": [{"role": "user", "content": "Call:"}]}
        tool = {"name": "add", "input_schema": TOOL["function"]["parameters"]}
        called = claude.messages.create(**calls, tools=[tool])
        assert [block.type for block in called.content] == ["thinking", "tool_use"]
        past = [*given["messages"], {"role": "assistant", "content": answer.content}]
        more = {**given, "messages": [*past, *given["messages"]]}
        assert claude.messages.create(**more).content[-1].text == "It is 95."


def test_a_chat_at_the_terminal_shows_the_thinking_beside_the_answer(
    server: ServerProcess,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Add:\nPlain:\n"))
    assert main(["chat", "--url", server.url]) == 0
    told = capsys.readouterr()
    assert (told.out, told.err) == ("It is 95.\nIt is 95.\n", "I add them.\n\n")
