"""Conversations on their way over HTTP to a prompt."""

from __future__ import annotations

from typing import Any

import httpx
import pytest


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"tools": []},
        {"tools": [{"type": "function", "function": {"name": "add"}}]},
        {"add_special_tokens": True},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"bos_token": "1"}},
    ],
    ids=str,
)
def test_a_conversation_has_one_way_to_its_tokens(http: httpx.Client, more: dict[str, Any]) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": ""}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "3+4="}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c", "content": "7"},
        {"role": "assistant", "content": "7", "tool_calls": []},
        {"role": "user", "content": "1+2="},
    ]
    body = {"messages": messages, **more}
    counted = http.post("/tokenize", json=body)
    assert counted.status_code == 200, counted.text
    wanted = {"max_tokens": 1, "return_token_ids": True}
    answer = http.post("/v1/chat/completions", json=body | wanted).json()
    assert counted.json()["tokens"] == answer["prompt_token_ids"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/responses"])
def test_a_variable_that_the_template_does_not_read_changes_nothing(
    http: httpx.Client, path: str
) -> None:
    messages = [{"role": "user", "content": "1+1="}]
    body = {"input" if "responses" in path else "messages": messages, "temperature": 0}
    for more in ({}, {"chat_template_kwargs": {"enable_thinking": False}}):
        answer = http.post(path, json={**body, **more})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        counts = found.get("usage", {"input_tokens": found.get("count")})
        assert counts.get("input_tokens", counts.get("prompt_tokens")) == 5
