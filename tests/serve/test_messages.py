"""Claims about ``/v1/messages``: Anthropic's client gets answers, streams and errors as it reads
them, and what is no request of that form is a 400."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from fusewright.serve.http.intake.protocol import CountTokensRequest

from .server_process import KEY, LONG, ServerProcess, is_idle, wait_for
from .test_tool_calls import ADD, NAN, hermes

if TYPE_CHECKING:
    import anthropic
if not find_spec("anthropic"):
    pytest.skip("needs the anthropic package", allow_module_level=True)

ASKED: list[Any] = [{"role": "user", "content": "37+58="}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"]}
SCHEMA |= {"additionalProperties": False}
NO_BLANKS = {"logit_bias": {"9": -100, "10": -100, "32": -100}}
GREEDY = {"extra_body": {"temperature": 0}}
TOOL: Any = {"name": "add", "description": "adds", "input_schema": SCHEMA}
GIVEN: Any = {"model": "abacus", "messages": ASKED, "max_tokens": 200}


@pytest.fixture(scope="module")
def claude(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    import anthropic  # takes 2 s, which workers that only collect this file need not spend

    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as made:
        yield made


def test_a_message_is_answered_whole_and_streamed(claude: anthropic.Anthropic) -> None:
    given = {**GIVEN, **GREEDY, "system": [{"type": "text", "text": "Add."}]}
    answer = claude.messages.create(**given)
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "95"}]
    assert (answer.role, answer.model, answer.stop_reason) == ("assistant", "abacus", "end_turn")
    usage = answer.usage
    assert (usage.output_tokens, usage.input_tokens) == (
        3,
        7 - (usage.cache_read_input_tokens or 0),
    )
    counted = claude.messages.count_tokens(model="abacus", messages=ASKED, system="Add.")
    assert counted.input_tokens == 7
    with claude.messages.stream(**given) as stream:
        kinds = [event.type for event in stream if event.type != "text"]
        final = stream.get_final_message()
    assert (final.content[0].to_dict()["text"], final.stop_reason) == ("95", "end_turn")
    assert final.usage.output_tokens == 3
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_stops_and_limits_are_told(claude: anthropic.Anthropic) -> None:
    sort: Any = {**GIVEN, "messages": [{"role": "user", "content": "sort 5 3 9 1="}]}
    stopped = claude.messages.create(**sort, **GREEDY, stop_sequences=["5"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "5")
    assert stopped.content[0].to_dict()["text"] == "1 3 "
    cut = claude.messages.create(**{**sort, "max_tokens": 1}, **GREEDY)
    assert (cut.stop_reason, cut.stop_sequence) == ("max_tokens", None)
    # Agents ask for as many tokens as their largest model has: the context bounds them.
    more = {"extra_body": {"ignore_eos": True, "temperature": 0}}
    full = {**GIVEN, "messages": [{"role": "user", "content": "1" * 500}], "max_tokens": 5000}
    long = claude.messages.create(**full, **more)
    assert long.stop_reason == "model_context_window_exceeded"
    assert long.usage.input_tokens + long.usage.output_tokens == 512


@pytest.mark.parametrize(
    ("text", "more", "blocks", "reason"),
    [
        (f"So {hermes(ADD)} then", {}, ["So ", {"a": 5}, "then"], "tool_use"),
        (
            hermes(ADD, ADD),
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            [{"a": 5}],
            "tool_use",
        ),
        (NAN, {}, [NAN], "end_turn"),
    ],
)
def test_calls_are_blocks_in_the_order_in_which_they_were_written(
    claude: anthropic.Anthropic, text: str, more: Any, blocks: list[Any], reason: str
) -> None:
    # The bundled model calls no tools: a grammar has it write the text.
    form = {"extra_body": {"structured_outputs": {"choice": [text]}}}
    given = {**GIVEN, "tools": [TOOL], **form, **more}
    answer = claude.messages.create(**given)
    with claude.messages.stream(**given) as stream:
        final = stream.get_final_message()
    for message in (answer, final):
        found = [block.to_dict() for block in message.content]
        assert [block.get("text", block.get("input")) for block in found] == blocks
        assert all(block["name"] == "add" for block in found if block["type"] == "tool_use")
        assert message.stop_reason == reason


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_a_required_call_keeps_to_its_schema(claude: anthropic.Anthropic, choice: Any) -> None:
    alone = {**choice, "disable_parallel_tool_use": True}
    given = {**GIVEN, "tools": [TOOL], "tool_choice": alone, "extra_body": {"seed": 2, **NO_BLANKS}}
    (block,) = claude.messages.create(**given).content
    assert block.type == "tool_use" and block.input == {"a": 7}


def test_a_form_is_kept_to(claude: anthropic.Anthropic) -> None:
    form: Any = {"type": "json_schema", "schema": {"enum": ["a"]}}
    answer = claude.messages.create(**GIVEN, output_config={"format": form})
    assert answer.content[0].to_dict()["text"] == '"a"'


def test_calls_and_results_of_earlier_turns_are_read(http: httpx.Client) -> None:
    """The tokens are those of the same conversation as a chat."""
    talk = [
        {"role": "user", "content": [{"type": "text", "text": "2+2=", "cache_control": {}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I add."},
                {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 2}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "4"},
                {"type": "tool_result", "tool_use_id": "toolu_1"},
                {"type": "text", "text": "1+2="},
            ],
        },
    ]
    system = [{"type": "text", "text": "x-anthropic-billing-header: 1"}]
    body = {"messages": talk, "max_tokens": 9, "temperature": 0, "tools": [TOOL], "system": system}
    answer = http.post("/v1/messages?beta=true", json=body)
    assert answer.json()["content"] == [{"type": "text", "text": "3"}]
    assert answer.headers["request-id"] == answer.json()["id"]
    counted = http.post("/v1/messages/count_tokens", json={"messages": talk}).json()
    chat = [{"role": "user", "content": "1+2="}]
    assert (
        counted["input_tokens"] == http.post("/tokenize", json={"messages": chat}).json()["count"]
    )


def text(kind: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [kind]}]


DEEP: Any = {"a": 1}
for _ in range(60):
    DEEP = {"a": [DEEP]}
BAD: list[tuple[str, Any, str]] = [
    ("no messages", {"messages": []}, "messages is empty"),
    ("text for messages", {"messages": "1"}, "messages="),
    ("null for messages", {"messages": None}, "messages="),
    ("texts for messages", {"messages": ["1"]}, "messages.0="),
    ("no role", {"messages": [{"content": "1"}]}, "messages.0.role=NoneType"),
    ("a role of a list", {"messages": [{"role": [], "content": "1"}]}, "messages.0.role=list"),
    ("a number as content", {"messages": [{"role": "user", "content": 1}]}, "messages.0.content"),
    ("null as content", {"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    ("a block of null", {"messages": text(None)}, "a block of type NoneType"),
    ("a block of text", {"messages": text("1")}, "a block of type NoneType"),
    ("a picture", {"messages": text({"type": "image", "source": {}})}, "a block of type 'image'"),
    ("a deep block", {"messages": text({"type": DEEP})}, "a block of type dict"),
    ("no text", {"messages": text({"type": "text"})}, "text of a text block: expected text"),
    ("a result of nothing", {"messages": text({"type": "tool_result"})}, "tool_use_id of a tool"),
    (
        "a result of a number",
        {"messages": text({"type": "tool_result", "tool_use_id": "1", "content": 5})},
        "text of a text block",
    ),
    (
        "a call without input",
        {
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}
            ]
        },
        "input of a tool_use: expected an object",
    ),
    (
        "a call to go on with",
        {"messages": [{"role": "assistant", "content": []}]},
        "must have text",
    ),
    ("a number as system", {"system": 5}, "system="),
    ("a system of null", {"system": [None]}, "system=[None]: Input should"),
    ("a system of a picture", {"system": [{"type": "image"}]}, "system: a block of type 'image'"),
    ("no room", {"max_tokens": 0}, "max_tokens=0"),
    ("text as room", {"max_tokens": "5"}, "max_tokens="),
    ("a huge number", {"max_tokens": 10**40}, "max_tokens="),
    ("two outputs", {"n": 2}, "n=2"),
    ("a stop of null", {"stop_sequences": [None]}, "stop_sequences.0="),
    ("an empty stop", {"stop_sequences": [""]}, "stop_sequences.0="),
    ("text as stops", {"stop_sequences": "5"}, "stop_sequences="),
    ("two kinds of stops", {"stop_sequences": ["5"], "stop": "4"}, "stop: "),
    ("text as tools", {"tools": "add"}, "tools="),
    ("a tool of nothing", {"tools": [{}]}, "tools.0: expected a name and an input_schema"),
    ("a name of a list", {"tools": [{**TOOL, "name": []}]}, "tools.0: expected a name"),
    ("a schema of text", {"tools": [{**TOOL, "input_schema": "x"}]}, "tools.0: expected a name"),
    (
        "a tool of the server",
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "no tool runs here; give a function",
    ),
    (
        "no such tool",
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}},
        "tool_choice",
    ),
    (
        "no such choice",
        {"tools": [TOOL], "tool_choice": {"type": []}},
        "tool_choice: expected type",
    ),
    ("text as choice", {"tools": [TOOL], "tool_choice": "auto"}, "tool_choice="),
    ("a thought of text", {"thinking": {"type": "much"}}, "thinking.type: expected enabled"),
    ("a thought of a list", {"thinking": {"type": []}}, "thinking.type: expected enabled"),
    ("an effort of a list", {"output_config": {"effort": []}}, "output_config.effort: expected"),
    ("a form of text", {"output_config": {"format": "json"}}, "output_config.format: expected"),
    ("a form of nothing", {"output_format": {"type": "json_schema"}}, "output_config.format"),
    ("a container", {"container": "c"}, "container: no code runs here"),
    ("servers", {"mcp_servers": [{"url": "x"}]}, "mcp_servers: the client asks MCP servers"),
    ("log probabilities", {"prompt_logprobs": 1}, "prompt_logprobs: an answer here has no such"),
]


@pytest.mark.parametrize(("more", "told"), [each[1:] for each in BAD], ids=[e[0] for e in BAD])
def test_bad_input_is_an_error_of_anthropics_form(
    http: httpx.Client, more: dict[str, Any], told: str
) -> None:
    answer = http.post("/v1/messages", json={**GIVEN, **more})
    assert answer.status_code == 400, answer.text
    body = answer.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert told in body["error"]["message"] and len(answer.content) < 1000
    if set(more) <= {"messages", "system", "tools", "thinking", "container"}:
        counted = http.post("/v1/messages/count_tokens", json={"messages": ASKED, **more})
        assert (counted.status_code, counted.json()["type"]) == (400, "error")


VALUES: list[Any] = [
    None,
    True,
    -1,
    10**40,
    1e308,
    "x",
    "\x00",
    [],
    [None],
    [[]],
    {},
    {"type": DEEP},
    DEEP,
]


@pytest.mark.parametrize("name", sorted({*CountTokensRequest.model_fields} | {"stop_sequences"}))
def test_no_value_of_a_field_is_a_500(http: httpx.Client, name: str) -> None:
    for value in VALUES:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            body = {"messages": ASKED, "max_tokens": 1, name: value}
            answer = http.post(path, json=body)
            assert answer.status_code in (200, 400, 404), (value, answer.text)
            assert answer.status_code == 200 or answer.json()["type"] == "error"


def test_errors_of_the_server_have_anthropics_form(
    server: ServerProcess, claude: anthropic.Anthropic, http: httpx.Client
) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="'claude' is not served here"):
        claude.messages.create(**{**GIVEN, "model": "claude"})
    with pytest.raises(anthropic.AuthenticationError, match="the API key is missing or wrong"):
        claude.with_options(api_key="wrong").messages.create(**GIVEN)
    with pytest.raises(anthropic.BadRequestError, match="run-batch"):
        claude.messages.batches.list()
    answer = http.post("/v1/messages", content=b"{}", headers={"content-type": "text/plain"})
    assert (answer.status_code, answer.json()["type"]) == (415, "error")
    assert http.get("/v1/messages").json()["type"] == "error"
    form = {"structured_outputs": {"regex": "[0-9]{3}"}, "bad_words": list("0123456789")}
    streamed = http.post("/v1/messages", json={**GIVEN, "stream": True, **form})
    *_, name, data = filter(None, streamed.text.splitlines())
    assert name == "event: error"
    assert json.loads(data[6:])["error"]["type"] == "invalid_request_error"
    assert [model.id for model in claude.models.list()] == ["abacus", "second"]


def test_a_client_that_goes_away_frees_its_blocks(
    server: ServerProcess, http: httpx.Client
) -> None:
    wait_for(lambda: is_idle(http))
    body = {**GIVEN, "max_tokens": LONG["max_tokens"], "ignore_eos": True, "stream": True}
    with (
        server.client(headers=http.headers) as leaving,
        leaving.stream("POST", "/v1/messages", json=body) as response,
    ):
        next(line for line in response.iter_lines() if "content_block_delta" in line)
    wait_for(lambda: is_idle(http))
    assert 'finished_reason="abort"' in http.get("/metrics").text
