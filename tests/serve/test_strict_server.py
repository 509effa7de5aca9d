"""Claims about a server that is strict about fields, and about fields that reach a chat template:
its own reads variables and shows every message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from .server_process import ServerProcess, stream
from .test_clients import CHAT, USER, text_of

TEMPLATE = """{{ bos_token }}{% for m in messages %}{{ m.content | trim }}{% endfor -%}
{%- if documents %}<{{ documents[0].text }}>{% endif -%}
{%- if reasoning_effort %}<{{ reasoning_effort }}>{% endif -%}
{%- if enable_thinking is defined %}<{{ enable_thinking }}>{% endif -%}
{%- if add_generation_prompt %}={% endif %}"""


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A strict server whose chat template reads variables and shows every message."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    flags = ("--strict-fields", "--trust-request-chat-template")
    server = ServerProcess(*flags, "--chat-template", str(template)).wait_ready()
    with server.client() as made:
        yield made
    assert server.stop() == 0


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        ("/v1/completions", {"prompt": "1", "temprature": 1}, "temprature"),
        ("/v1/chat/completions", {"messages": [USER], "x": None}, "x"),
        ("/v1/responses", {"input": "1", "max_tokenz": 1}, "max_tokenz"),
        ("/tokenize", {"prompt": "1", "x": 1}, "x"),
        (
            "/v1/chat/completions",
            {"messages": [USER], "chat_template_kwargs": {"x": 1}},
            "chat_template_kwargs",
        ),
    ],
)
def test_a_strict_server_refuses_unknown_fields(
    strict: httpx.Client, path: str, more: dict[str, Any], param: str
) -> None:
    answer = strict.post(path, json=more)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    if param.startswith(("temp", "max")):
        assert "no such field; did you mean " in answer.json()["error"]["message"]
    known = {**CHAT, "user": "me", "store": True, "metadata": {"a": 1}}
    assert strict.post("/v1/chat/completions", json=known).status_code == 200


def rendered(strict: httpx.Client, path: str, body: dict[str, Any]) -> str:
    """The prompt that a body makes, without the beginning of a text."""
    ids = strict.post(path, json={**body, "return_token_ids": True, "max_tokens": 1}).json()
    text = strict.post("/detokenize", json={"tokens": ids["prompt_token_ids"]}).json()["prompt"]
    return str(text).removeprefix("<|bos|>")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, "1+1="),
        ({"reasoning_effort": "low"}, "1+1<low><True>="),
        ({"reasoning_effort": "none"}, "1+1<none><False>="),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "1+1<none><True>=",
        ),
        ({"documents": [{"title": "t", "text": "x"}]}, "1+1<x>="),
        ({"add_generation_prompt": False}, "1+1"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "1+1"),
    ],
)
def test_fields_reach_the_chat_template(
    strict: httpx.Client, more: dict[str, Any], expected: str
) -> None:
    body = {"messages": [{"role": "user", "content": "1+1"}], **more}
    assert rendered(strict, "/v1/chat/completions", body) == expected
    counted = strict.post("/tokenize", json=body).json()["count"]
    assert counted == len(expected) + 1


def test_a_last_message_is_continued_and_echoed(strict: httpx.Client) -> None:
    messages = [{"role": "user", "content": "37+58="}, {"role": "assistant", "content": "9"}]
    body = {"messages": messages, "temperature": 0, "continue_final_message": True}
    for echo, expected in ((False, "5"), (True, "95")):
        answer = strict.post("/v1/chat/completions", json={**body, "echo": echo})
        assert text_of(answer.json()) == expected
        chunks = stream(strict, "/v1/chat/completions", **body, echo=echo)
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == expected
    asked = {"messages": messages, "max_tokens": 9, "temperature": 0}
    assert text_of(strict.post("/v1/messages", json=asked).json()) == "5"
    response = {"input": messages, "temperature": 0, "continue_final_message": True}
    assert text_of(strict.post("/v1/responses", json=response).json()) == "5"


def test_a_trusted_template_of_a_request_is_in_place_of_the_models(strict: httpx.Client) -> None:
    own = "{% for m in messages %}{{ m.content }}{% endfor %}[{{ mood }}]"
    body = {**CHAT, "chat_template": own, "chat_template_kwargs": {"mood": "glad"}}
    assert rendered(strict, "/v1/chat/completions", body) == "37+58=[glad]"
    for more, told in (
        ({"chat_template": "{% for"}, "chat template does not compile"),
        ({"chat_template": "{{ raise_exception('no') }}"}, "chat template fails: no"),
        ({"chat_template": own, "chat_template_kwargs": {"hue": 1}}, "it reads: mood"),
    ):
        answer = strict.post("/v1/chat/completions", json={**CHAT, **more})
        assert answer.status_code == 400
        assert told in answer.json()["error"]["message"]
