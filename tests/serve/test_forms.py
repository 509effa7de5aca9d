"""Forms of outputs over HTTP: choices, definitions in tools, and contradictions."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

POINT = {"type": "object", "properties": {"x": {"enum": [7]}}, "required": ["x"]}
POINT |= {"additionalProperties": False}
MESSAGES = [{"role": "user", "content": "1"}]


def tool(name: str, reference: str) -> dict[str, Any]:
    """A tool with one argument, as pydantic writes it."""
    parameters = {
        "type": "object",
        "properties": {"p": {"$ref": reference}},
        "required": ["p"],
        "additionalProperties": False,
        "$defs": {"Point": POINT},
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "g"}}])
def test_a_required_call_keeps_to_the_definitions_of_its_tool(
    http: httpx.Client, choice: Any
) -> None:
    tools = [tool("f", "#/$defs/Point"), tool("g", "#/$defs/Point")]
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": choice, "seed": 1}
    answer = http.post("/v1/chat/completions", json={**body, "max_tokens": 400})
    calls = answer.json()["choices"][0]["message"]["tool_calls"]
    assert len(calls) == 1 or (calls and choice == "required")
    for call in calls:
        assert json.loads(call["function"]["arguments"]) == {"p": {"x": 7}}


def test_a_reference_to_nothing_is_a_400(http: httpx.Client) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "tools": [tool("f", "#/$defs/Line")]}
    answer = http.post("/v1/chat/completions", json={**body, "tool_choice": "required"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    form = {"structured_outputs": {"json": {"$ref": "#/$defs/Line"}}}
    answer = http.post("/v1/completions", json={"prompt": "1", **form})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "structured_outputs")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_complete_form_ends_before_min_tokens(http: httpx.Client, path: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a"]}}}
    given = {"messages": MESSAGES} if "chat" in path else {"prompt": "1"}
    body = {**given, "response_format": schema, "min_tokens": 40, "max_tokens": 60}
    choice = http.post(path, json=body).json()["choices"][0]
    text = choice["message"]["content"] if "chat" in path else choice["text"]
    assert (text, choice["finish_reason"]) == ('"a"', "stop")


def test_as_many_choices_as_a_body_may_have_are_served(http: httpx.Client) -> None:
    choices = [f"choice {number}" for number in range(4000)]
    body = {"prompt": "1", "max_tokens": 30, "structured_outputs": {"choice": choices}}
    found = http.post("/v1/completions", json=body).json()["choices"][0]
    assert found["text"] in choices and found["finish_reason"] == "stop"


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_a_form_without_a_token_left_is_the_callers_mistake(
    http: httpx.Client, streamed: bool
) -> None:
    form = {"structured_outputs": {"regex": "[0-9]{3}"}, "bad_words": list("0123456789")}
    answer = http.post("/v1/completions", json={"prompt": "1", "stream": streamed, **form})
    assert answer.status_code == (200 if streamed else 400)
    assert "bad_words forbid all that the grammar permits" in answer.text
    assert "invalid_request_error" in answer.text
