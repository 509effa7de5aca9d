"""Claims about bad input: it gets an error that names the field, and the next request is served
as if nothing had happened."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, ValidationError

from fusewright.serve.http.intake.protocol import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
)

from .server_process import JSON, LONG, ServerProcess, is_idle, wait_for

FORM = "structured_outputs"
BAD: list[tuple[str, Any, str | None]] = [
    ("no JSON", b"{", None),
    ("no object", b"[]", None),
    ("no UTF-8", b'{"prompt": "\xff"}', None),
    ("half a surrogate pair", b'{"prompt": "\\ud800"}', None),
    ("deep nesting", b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", None),
    ("a number as prompt", {"prompt": 3}, "prompt"),
    ("no prompt", {}, "prompt"),
    ("an empty prompt", {"prompt": ""}, "prompt"),
    ("an empty list", {"prompt": []}, "prompt"),
    ("an empty prompt in a list", {"prompt": ["1", ""]}, "prompt"),
    ("a broken id", {"prompt": [1, 2.5]}, "prompt"),
    ("a negative id", {"prompt": [1, -2]}, "prompt"),
    ("an unknown id", {"prompt": [1, 10**6]}, "prompt"),
    ("a huge id", {"prompt": [1, 10**30]}, "prompt"),
    ("an endless prompt", {"prompt": "1" * 600}, "prompt"),
    ("text for a number", {"prompt": "1", "n": "2"}, "n"),
    ("true for a number", {"prompt": "1", "max_tokens": True}, "max_tokens"),
    ("huge n", {"prompt": "1", "n": 10**9}, "n"),
    ("n below 1", {"prompt": "1", "n": 0}, "n"),
    ("too many outputs", {"prompt": ["1"] * 100, "n": 1000, "seed": 1}, None),
    ("NaN", b'{"prompt": "1", "temperature": NaN}', "temperature"),
    ("infinity", b'{"prompt": "1", "top_p": Infinity}', "top_p"),
    ("negative temperature", {"prompt": "1", "temperature": -1}, "temperature"),
    ("no tokens", {"prompt": "1", "max_tokens": 0}, "max_tokens"),
    ("many logprobs", {"prompt": "1", "logprobs": 1000}, "logprobs"),
    ("logprobs of many", {"prompt": "1", "n": 200, "max_tokens": 500, "logprobs": 20}, "logprobs"),
    ("many scored", {"prompt": [[65] * 200] * 256, "prompt_logprobs": 20}, "prompt_logprobs"),
    ("an empty stop", {"prompt": "1", "stop": [""]}, "stop"),
    ("many stops", {"prompt": "1", "stop": ["a"] * 1000}, "stop"),
    ("a suffix", {"prompt": "1", "suffix": "2"}, "suffix"),
    ("best_of", {"prompt": "1", "best_of": 4}, "best_of"),
    ("priority", {"prompt": "1", "priority": 1}, "priority"),
    ("a strange form", {"prompt": "1", "response_format": {"type": "xml"}}, "response_format"),
    ("no schema", {"prompt": "1", "response_format": {"type": "json_schema"}}, "response_format"),
    ("a bad regex", {"prompt": "1", "structured_outputs": {"regex": "("}}, "response_format"),
    ("two forms", {"prompt": "1", "structured_outputs": {"regex": "a", "choice": ["b"]}}, FORM),
    ("no choice", {"prompt": "1", "structured_outputs": {"choice": []}}, FORM),
    ("a bias of text", {"prompt": "1", "logit_bias": {"a": 1}}, "logit_bias"),
    ("a bias too far", {"prompt": "1", "logit_bias": {"1": 101}}, "logit_bias"),
    ("a long bias", {"prompt": "1", "logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
    ("huge top_k", {"prompt": "1", "top_k": 2**64}, "top_k"),
    ("huge max_tokens", {"prompt": "1", "max_tokens": 10**30}, "max_tokens"),
    ("huge min_tokens", {"prompt": "1", "min_tokens": 10**30, "max_tokens": 5}, "min_tokens"),
    ("huge priority", {"prompt": "1", "priority": -(10**30)}, "priority"),
    ("a huge stop id", {"prompt": "1", "stop_token_ids": [2**64]}, "stop_token_ids"),
    ("an id that is no header", {"prompt": "1", "request_id": "\U000786ac"}, "request_id"),
    ("an id that ends a header", {"prompt": "1", "request_id": "a\r\nx-more: 1"}, "request_id"),
    ("such an id of a stream", {"prompt": "1", "request_id": "é€", "stream": True}, "request_id"),
    ("a text for many prompts", {"prompt": "1" * 9000}, "prompt"),
    ("the same by itself", {"prompt": "1" * 9000, "add_special_tokens": False}, "prompt"),
    ("much for each of many", {"prompt": "1", "n": 16000, "bad_words": ["a" * 1000] * 5}, "n"),
    ("more than fits", {"prompt": "1+1=", "max_tokens": 510}, "max_tokens"),
    (
        "prompts of a stream",
        {"prompt": "1", "stream": True, "prompt_logprobs": 0},
        "prompt_logprobs",
    ),
    ("an option of streams", {"prompt": "1", "stream_options": {"all": True}}, "stream_options"),
]


@pytest.mark.parametrize(
    "name, value",
    [
        ("n", 2),
        ("max_tokens", 5),
        ("response_format", {"type": "text"}),
        ("text", {"format": "json"}),
        ("previous_response_id", "resp_1"),
        ("prompt_logprobs", 0),
        ("return_token_ids", True),
        ("max_output_tokens", 512),
    ],
)
def test_responses_refuse_what_they_would_ignore(http: httpx.Client, name: str, value: Any) -> None:
    answer = http.post("/v1/responses", json={"input": "1+1=", name: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("body, param", [each[1:] for each in BAD], ids=[each[0] for each in BAD])
def test_bad_input_is_a_400_that_names_the_field(
    http: httpx.Client, body: Any, param: str | None
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = http.post("/v1/completions", content=content, headers=JSON)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert error["message"] and len(error["message"]) < 600
    good = http.post("/v1/completions", json={"prompt": "1+1=", "temperature": 0})
    assert good.json()["choices"][0]["text"] == "2"


BAD_CHATS: list[tuple[str, Any, str]] = [
    ("no messages", [], "messages"),
    ("text", "1+1=", "messages"),
    ("no role", [{"content": "1"}], "messages"),
    ("a strange role", [{"role": "king", "content": "1"}], "messages"),
    ("no content", [{"role": "user"}], "messages"),
    ("a long role", [{"role": "king" * 20_000, "content": "1"}], "messages"),
    ("a long message", [{"content": "1" * 100_000}], "messages"),
    ("many messages", [{"role": "user", "content": "1"}] * 5000, "messages"),
    ("a picture", [{"role": "user", "content": [{"type": "image_url"}]}], "messages"),
]


@pytest.mark.parametrize(
    "messages, param", [each[1:] for each in BAD_CHATS], ids=[each[0] for each in BAD_CHATS]
)
def test_bad_messages_are_a_400(http: httpx.Client, messages: Any, param: str) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": messages})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert len(answer.content) < 3000


@pytest.mark.parametrize(
    "more, param",
    [
        ({"max_tokens": 511}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 512}, "max_completion_tokens"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_a_chat_for_what_cannot_be_is_a_400(
    http: httpx.Client, more: dict[str, Any], param: str
) -> None:
    messages = [{"role": "user", "content": "1+1="}]
    answer = http.post("/v1/chat/completions", json={"messages": messages, **more})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_what_just_fits_behind_a_prompt_is_served(http: httpx.Client) -> None:
    """The bundled model has 512 positions, and its text begins with a special token."""
    body = {"prompt": "1+1=", "max_tokens": 507, "temperature": 0}
    answer = http.post("/v1/completions", json=body)
    assert answer.json()["choices"][0]["text"] == "2"
    body["max_tokens"] = 508
    assert (
        "leaves room for 507 of max_model_len=512" in http.post("/v1/completions", json=body).text
    )


@pytest.mark.parametrize(
    "kind, body",
    [
        (CompletionRequest, b'{"prompt": [' + b"1.5, " * 1000 + b"1]}"),
        (CompletionRequest, b'{"prompt": [' + b"[], " * 1000 + b'"a"]}'),
        (CompletionRequest, b'{"prompt": "1", "stop": [' + b"1, " * 60 + b"1]}"),
        (CompletionRequest, b'{"prompt": "1", "bad_words": [' + b"1, " * 1000 + b"1]}"),
        (CompletionRequest, b'{"prompt": "1", "stop_token_ids": [' + b"-1, " * 60 + b"1]}"),
        (ChatRequest, b'{"messages": [' + b"1, " * 1000 + b"1]}"),
        (ChatRequest, b'{"messages": [{}], "tools": [' + b"1, " * 500 + b"1]}"),
        (ResponsesRequest, b'{"input": [' + b"1, " * 1000 + b"1]}"),
        (DetokenizeRequest, b'{"tokens": [' + b"-1, " * 1000 + b"1]}"),
        (AbortRequest, b'{"request_ids": [' + b"1, " * 1000 + b"1]}"),
    ],
)
def test_a_list_of_bad_items_makes_no_more_than_an_error_a_form(
    kind: type[BaseModel], body: bytes
) -> None:
    with pytest.raises(ValidationError) as refused:
        kind.model_validate_json(body)
    assert refused.value.error_count() <= 5


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "self"])
def test_variables_of_the_template_that_are_ours_are_refused(
    http: httpx.Client, path: str, name: str
) -> None:
    messages = [{"role": "user", "content": "1+1="}]
    body = {"messages": messages, "chat_template_kwargs": {name: 1}}
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "chat_template_kwargs"


def test_a_template_in_a_message_is_text(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "{{ 7 * 7 }}{% for i in range(10**9) %}{% endfor %}"}]
    found = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert "{{ 7 * 7 }}" in http.post("/detokenize", json={"tokens": found}).json()["prompt"]
    variables = {"messages": messages, "chat_template_kwargs": {"messages": []}}
    answer = http.post("/v1/chat/completions", json=variables)
    assert answer.json()["error"]["param"] == "chat_template_kwargs"


def test_other_refusals_are_in_the_same_form(http: httpx.Client) -> None:
    for method, path, body, status in (
        ("GET", "/nothing", None, 404),
        ("PUT", "/v1/completions", {}, 405),
        ("POST", "/v1/completions", {"prompt": "1", "model": "gpt"}, 404),
        ("POST", "/v1/completions", {"prompt": "1" * 600_000}, 413),
        ("POST", "/detokenize", {"tokens": [10**6]}, 400),
        ("POST", "/tokenize", {}, 400),
    ):
        answer = http.request(method, path, json=body)
        assert answer.status_code == status, (path, answer.text)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_too_many_waiting_requests_are_sent_away(server: ServerProcess, http: httpx.Client) -> None:
    many = {**LONG, "n": 16, "temperature": 1.0, "stream": True}
    with ExitStack() as calls, server.engine_stopped():
        for _ in range((16 + 64) // 8):  # of each an eighth of 64 counts
            calls.enter_context(http.stream("POST", "/v1/completions", json=many))
        answer = http.post("/v1/completions", json={"prompt": "1"})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
    wait_for(lambda: is_idle(http))


def test_a_call_of_many_outputs_keeps_nobody_out(http: httpx.Client) -> None:
    many = {**LONG, "n": 1000, "temperature": 1.0, "stream": True}
    with http.stream("POST", "/v1/completions", json=many) as call:
        assert call.status_code == 200, call.read()
        answer = http.post("/v1/completions", json={"prompt": "1+1=", "max_tokens": 4})
        assert answer.status_code == 200, answer.text
    wait_for(lambda: is_idle(http))


def test_outputs_on_their_way_to_the_engine_are_told_as_waiting(
    server: ServerProcess, http: httpx.Client
) -> None:
    many = {**LONG, "n": 50, "temperature": 1.0, "stream": True}
    with server.engine_stopped(), http.stream("POST", "/v1/completions", json=many):
        lines = http.get("/metrics").text.splitlines()
        waiting = [line for line in lines if line.startswith("vllm:num_requests_waiting{")]
        assert [float(line.rpartition(" ")[2]) for line in waiting] == [50]
    wait_for(lambda: is_idle(http))


def raw(server: ServerProcess, data: bytes) -> bytes:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=300) as connection:
        connection.sendall(data)
        received = b""
        while piece := connection.recv(65536):
            received += piece
    return received


@pytest.mark.parametrize(
    "data",
    [
        b"GET /live HTTP/1.1\r\nx: " + b"y" * 100_000,
        b"GET /live HTTP/1.1\r\n" + b"".join(b"x%d: y\r\n" % i for i in range(8000)),
        b"GET /" + b"z" * 100_000,
    ],
    ids=["a long header", "many headers", "a long URL"],
)
def test_heads_without_end_are_refused(server: ServerProcess, data: bytes) -> None:
    assert raw(server, data).startswith(b"HTTP/1.1 431 ")


def test_what_is_no_http_is_refused(server: ServerProcess) -> None:
    assert raw(server, b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_hostile_grammars_are_refused_and_the_server_goes_on(client: openai.OpenAI) -> None:
    rules = "".join(f"a{i}: a{i + 1}\n" for i in range(11_000))
    needs_itself = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"grammar": f"start: a0\n{rules}a11000: 'x'"}, "rules, expected 10000 at most"),
        ({"regex": "a{1000000000}"}, "repeats 1000000000 times"),
        ({"json": {"type": "integer", "multipleOf": 999_999_999}}, "too complex"),
        ({"json": needs_itself}, "no finite JSON"),
        # It compiles; a later mask cannot be made, which is its caller's mistake as well.
        ({"regex": "(a?){3000}a{3000}"}, "the grammar has failed: .*too many expressions"),
    ]
    asked: Any = {"model": "abacus", "prompt": "1+1=", "seed": 1}
    for form, why in refused:
        with pytest.raises(openai.BadRequestError, match=why):
            client.completions.create(**asked, extra_body={"structured_outputs": form})
    rules = "".join(f"a{i}: a{i + 1}\n" for i in range(3000))
    optional = {f"p{i}": {"type": "string"} for i in range(700)}
    taken: list[dict[str, Any]] = [
        {"grammar": f'start: a0\n{rules}a3000: "tic"'},
        {"choice": [f"t{i}" for i in range(2001)]},
        {"json": {"type": "object", "properties": optional, "additionalProperties": False}},
    ]
    for form in taken:
        answer = client.completions.create(**asked, extra_body={"structured_outputs": form})
        assert answer.choices[0].text.startswith(("t", "{"))
