"""Claims about requests as clients and gateways send them: each is answered, and each field that
means nothing here is told once.

The shapes are those of LiteLLM, LangChain, Open WebUI, OpenAI's agents' SDK and coding agents, as
data: their packages are too heavy to install for a test.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from .server_process import KEY, ServerProcess, stream, wait_for
from .test_tool_calls import ADD, TOOL, hermes

USER = {"role": "user", "content": "37+58="}
CHAT: dict[str, Any] = {"model": "abacus", "messages": [USER], "temperature": 0}
FUNCTION = {"type": "function", **TOOL["function"], "strict": False}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "litellm": (
        "/v1/chat/completions",
        {
            **CHAT,
            "stream": False,
            "max_tokens": 16,
            "user": "litellm",
            "metadata": {"tags": ["a"]},
            "parallel_tool_calls": True,
            "reasoning_effort": "low",
            "extra_headers": {},
            "drop_params": True,
        },
    ),
    "litellm, text": (
        "/v1/completions",
        {
            "model": "abacus",
            "prompt": ["37+58="],
            "temperature": 0,
            "suffix": None,
            "logprobs": None,
        },
    ),
    "langchain": (
        "/v1/chat/completions",
        {**CHAT, "n": 1, "stream": False, "logprobs": False, "stop": None, "service_tier": "auto"},
    ),
    "langchain, tools": (
        "/v1/chat/completions",
        {
            **CHAT,
            "tools": [{**TOOL, "function": {**TOOL["function"], "strict": False}}],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "messages": [
                {"role": "system", "content": "Add."},
                {"role": "user", "content": "1+1=", "name": "me"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "2"},
                USER,
            ],
        },
    ),
    "open webui": (
        "/v1/chat/completions",
        {
            **CHAT,
            "stream": False,
            "chat_id": "c",
            "session_id": "s",
            "features": {"web_search": False},
            "variables": {"{{USER_NAME}}": "me"},
            "model_item": {"id": "abacus"},
            "background_tasks": {"title_generation": True},
        },
    ),
    "a gateway": (
        "/v1/chat/completions",
        {
            **CHAT,
            "modalities": ["text"],
            "verbosity": "low",
            "store": False,
            "prompt_cache_key": "k",
            "safety_identifier": "me",
            "kv_transfer_params": {"do_remote_decode": True},
            "mm_processor_kwargs": {"fps": 1},
            "chat_template_kwargs": {"enable_thinking": False},
            "documents": [{"title": "t", "text": "x"}],
            "echo": False,
            "add_generation_prompt": True,
            "continue_final_message": False,
            "guided_decoding_backend": "xgrammar",
            "allowed_token_ids": [48 + n for n in range(10)] + [257],
            "truncate_prompt_tokens": -1,
        },
    ),
    "agents' sdk": (
        "/v1/responses",
        {
            "model": "abacus",
            "input": [{"type": "message", "role": "user", "content": "37+58="}],
            "temperature": 0,
            "instructions": "Add.",
            "tools": [FUNCTION],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "include": ["reasoning.encrypted_content"],
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"verbosity": "medium"},
            "truncation": "disabled",
            "store": False,
            "metadata": {"trace": "1"},
            "max_output_tokens": 16,
        },
    ),
    "a coding agent": (
        "/v1/messages?beta=true",
        {
            "model": "abacus",
            "max_tokens": 64,
            "temperature": 0,
            "system": [{"type": "text", "text": "Add.", "cache_control": {"type": "ephemeral"}}],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "37+58="}]}],
            "metadata": {"user_id": "me"},
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": []},
            "output_config": {"effort": "medium"},
            "stream": False,
        },
    ),
}


def text_of(answer: dict[str, Any]) -> str:
    """The text of an answer of any form."""
    if "choices" in answer:
        (choice,) = answer["choices"]
        text: str = choice["message"]["content"] if "message" in choice else choice["text"]
        return text
    (item,) = answer.get("output") or [answer]
    return "".join(part["text"] for part in item["content"])


@pytest.mark.parametrize("name", list(SHAPES))
def test_requests_of_clients_are_answered(http: httpx.Client, name: str) -> None:
    path, body = SHAPES[name]
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert text_of(answer.json()) == "95"


def test_a_field_without_effect_is_told_once(server: ServerProcess, http: httpx.Client) -> None:
    fields = {"max_tokenz": 5, "prediction": {"type": "content"}, "audio": None, "lora_path": ""}
    for _ in range(3):
        answer = http.post("/v1/chat/completions", json={**CHAT, **fields})
        assert answer.json()["choices"][0]["message"]["content"] == "95"
    told = "max_tokenz of requests has no effect: no such field; did you mean max_tokens?"
    wait_for(lambda: any(told in line for line in server.lines))
    assert sum(told in line for line in server.lines) == 1
    assert sum("prediction of requests has no effect" in line for line in server.lines) == 1
    assert not any("audio of requests" in line or "lora_path" in line for line in server.lines)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"suffix": "x"}, "marks of a gap"),
    ("/v1/completions", {"use_beam_search": True}, "call LLM.beam_search"),
    ("/v1/completions", {"prompt_embeds": "x"}, "as text or token ids"),
    ("/v1/completions", {"truncation_side": "right"}, "the prompt's last tokens are kept"),
    ("/v1/completions", {"guided_regex": "("}, "regex"),
    ("/v1/completions", {"guided_json": {}, "guided_regex": "a"}, "expected one of json"),
    ("/v1/completions", {"guided_choice": ["a"], "structured_outputs": {}}, "expected one of them"),
    ("/v1/completions", {"guided_choice": "a"}, "guided_choice="),
    ("/v1/completions", {"allowed_token_ids": []}, "1 to "),
    ("/v1/completions", {"allowed_token_ids": [10**6]}, "outside the vocabulary"),
    ("/v1/completions", {"allowed_token_ids": [None]}, "allowed_token_ids"),
    ("/v1/completions", {"truncate_prompt_tokens": 0}, "at least 1, or -1"),
    ("/v1/completions", {"thinking_token_budget": 9}, "use /v1/chat/completions"),
    ("/v1/chat/completions", {"thinking_token_budget": 9}, "--reasoning-parser"),
    ("/v1/chat/completions", {"thinking_token_budget": -2}, "thinking_token_budget=-2"),
    ("/v1/chat/completions", {"modalities": ["text", "audio"]}, "models give text alone"),
    ("/v1/chat/completions", {"modalities": "audio"}, "models give text alone"),
    ("/v1/chat/completions", {"chat_template": "{{ 1 }}"}, "--chat-template"),
    ("/v1/chat/completions", {"functions": [{"name": "f"}]}, "use tools"),
    ("/v1/chat/completions", {"function_call": {"name": "f"}}, "use tool_choice"),
    ("/v1/chat/completions", {"reasoning_effort": 5}, "reasoning_effort=5"),
    ("/v1/chat/completions", {"documents": ["x"]}, "documents."),
    (
        "/v1/chat/completions",
        {"continue_final_message": True, "add_generation_prompt": True},
        "add_",
    ),
    ("/v1/chat/completions", {"continue_final_message": "yes"}, "continue_final_message="),
    (
        "/v1/responses",
        {"previous_response_id": "r"},
        "answers are not stored; send the conversation",
    ),
    ("/v1/responses", {"background": True}, "use stream"),
    ("/v1/responses", {"truncation": "auto"}, "truncate_prompt_tokens"),
    ("/v1/responses", {"top_logprobs": 2}, "ask /v1/chat/completions"),
    ("/v1/responses", {"reasoning": {"effort": []}}, "reasoning.effort"),
    ("/v1/responses", {"reasoning": "low"}, "reasoning="),
    ("/v1/responses", {"tools": [{"type": "web_search"}]}, "tools"),
]


@pytest.mark.parametrize(("path", "more", "told"), REFUSED)
def test_what_is_refused_says_what_to_use(
    http: httpx.Client, path: str, more: dict[str, Any], told: str
) -> None:
    asked = {"/v1/completions": {"prompt": "1"}, "/v1/responses": {"input": "1"}}
    answer = http.post(path, json={**asked.get(path, {"messages": [USER]}), **more})
    assert answer.status_code == 400, answer.text
    assert told in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] in (*more, "messages", "response_format")


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/embeddings", "no embeddings or scores; use another server"),
        ("/score", "no embeddings or scores; use another server"),
        ("/v2/rerank", "no embeddings or scores; use another server"),
        ("/pooling", "no embeddings or scores; use another server"),
        ("/v1/audio/transcriptions", "another server for speech"),
        ("/v1/images/generations", "another server for pictures"),
        ("/v1/batches", "run `fusewright run-batch`"),
        ("/v1/responses/resp_1", "answers are not stored"),
        ("/api/chat", "ask /v1/chat/completions"),
        ("/nothing", "/docs lists those that are served"),
    ],
)
def test_a_path_that_is_not_served_says_what_to_use(
    client: openai.OpenAI, http: httpx.Client, path: str, told: str
) -> None:
    for method in ("GET", "POST"):
        answer = http.request(method, path)
        # A gateway stops asking a server that answers 404, for a mistake of one client.
        assert answer.status_code == (404 if path == "/nothing" else 400)
        assert told in answer.json()["error"]["message"]
    if path == "/v1/embeddings":
        with pytest.raises(openai.BadRequestError, match="use another server"):
            client.embeddings.create(model="abacus", input="x")


def test_streams_have_no_empty_chunks(http: httpx.Client) -> None:
    """A snowman has three tokens of a byte each, and a call is told as a whole."""
    form = {"structured_outputs": {"choice": ["☃☃"]}}
    for path, asked in (("/v1/completions", {"prompt": "1"}), ("/v1/chat/completions", CHAT)):
        found = stream(http, path, **asked, **form)
        choices = [each["choices"][0] for each in found]
        assert all(tells(choice) for choice in choices)
        assert len(choices) <= 3
        ids = stream(http, path, **asked, **form, return_token_ids=True)
        assert sum(len(each["choices"][0]["token_ids"]) for each in ids) == 7
    written = {"tools": [TOOL], "structured_outputs": {"choice": [hermes(ADD)]}, "max_tokens": 200}
    # The end comes with the call if the engine is faster than the stream, else behind it.
    choices = [c["choices"][0] for c in stream(http, "/v1/chat/completions", **CHAT, **written)]
    called = choices[0]["delta"]
    (call,) = called.pop("tool_calls")
    assert called == {"role": "assistant"}
    assert call["function"] == {"name": "add", "arguments": '{"a":5}'}
    assert [choice["delta"] for choice in choices[1:]] in ([], [{}])
    assert [c["finish_reason"] for c in choices] in (["tool_calls"], [None, "tool_calls"])
    (whole,) = stream(http, "/v1/chat/completions", **CHAT, logit_bias={"257": 100})
    assert whole["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def tells(choice: dict[str, Any]) -> bool:
    text = choice["delta"].get("content") if "delta" in choice else choice["text"]
    return bool(text) or choice["finish_reason"] is not None


def test_older_guided_fields_are_forms(http: httpx.Client) -> None:
    for form, expected in (
        ({"guided_choice": ["tic"]}, "tic"),
        ({"guided_regex": "[a]{3}"}, "aaa"),
        ({"guided_json": {"enum": ["a"]}}, '"a"'),
        ({"guided_json": '{"enum": ["a"]}'}, '"a"'),
        ({"guided_grammar": 'start: "b"'}, "b"),
    ):
        answer = http.post("/v1/chat/completions", json={**CHAT, **form})
        assert text_of(answer.json()) == expected


def test_the_service_paths_answer(server: ServerProcess, http: httpx.Client) -> None:
    with server.client() as bare:
        for path in ("/ping", "/docs", "/openapi.json", "/version", "/live", "/health"):
            assert bare.get(path).status_code == 200
        assert bare.post("/ping").json() == {"status": "ok"}
        for path in ("/load", "/server_info"):
            assert bare.get(path).status_code == 401
        assert bare.post("/reset_prefix_cache").status_code == 401
    assert http.get("/load").json() == {"server_load": 0}
    info = http.get("/server_info").json()
    assert info["options"]["model"] == "abacus" and KEY not in json.dumps(info)
    assert info["engines"][0]["startup"]
    page = http.get("/docs").text
    for path in http.get("/openapi.json").json()["paths"]:
        assert f"{path}</code>" in page
    assert "<code>reasoning_effort</code>" in page and "<script" not in page


def test_a_reset_forgets_cached_prefixes(http: httpx.Client) -> None:
    asked = {"prompt": [40 + i % 7 for i in range(33)], "max_tokens": 1, "cache_salt": "reset"}
    for reset, expected in ((False, 0), (False, 32), (True, 0)):
        if reset:
            assert http.post("/reset_prefix_cache").status_code == 200
        usage = http.post("/v1/completions", json=asked).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": expected}


def test_a_response_streams_calls_and_errors_as_the_client_reads_them(
    client: openai.OpenAI,
) -> None:
    given: Any = {"model": "abacus", "input": "1+1=", "tools": [FUNCTION]}
    form = {"structured_outputs": {"choice": [hermes(ADD)]}}
    kinds = [event.type for event in client.responses.create(**given, stream=True, extra_body=form)]
    assert kinds == [
        *("response.created", "response.in_progress", "response.output_item.added"),
        *("response.function_call_arguments.delta", "response.function_call_arguments.done"),
        *("response.output_item.done", "response.completed"),
    ]
    none = {"structured_outputs": {"regex": "[0-9]{3}"}, "bad_words": list("0123456789")}
    with pytest.raises(openai.APIError, match="bad_words forbid all"):
        list(client.responses.create(**given, stream=True, extra_body=none))
