"""Claims about the server: unmodified clients of OpenAI's API get right answers, and whatever else
comes gets an error that names the field."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fusewright import LLM, SamplingParams
from fusewright.engine.messages.draft_stats import DraftStats
from fusewright.serve.http.jobs.draft_metrics import of_drafts

from .server_process import KEY, LONG, ServerProcess, is_idle, stream, wait_for

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("abacus", device="cpu", optimization_level=0, dtype="float32")


# The openai package


def test_the_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["abacus", "second"]
    assert client.models.retrieve("second").id == "second"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("third")


def test_a_completion_is_that_of_the_engine(client: openai.OpenAI, llm: LLM) -> None:
    prompts = ["37+58=", "sort 5 3 9 1=", "12-3="]
    answer = client.completions.create(model="abacus", prompt=prompts, temperature=0, max_tokens=32)
    expected = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=32), use_tqdm=False)
    assert [choice.text for choice in answer.choices] == [o.outputs[0].text for o in expected]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(o.prompt_token_ids) for o in expected)
    assert answer.usage.completion_tokens == sum(len(o.outputs[0].token_ids) for o in expected)


def test_token_ids_are_a_prompt_and_echo_repeats_it(client: openai.OpenAI, llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("37+58=")
    for prompt in (ids, [ids]):
        answer = client.completions.create(model="second", prompt=prompt, temperature=0, echo=True)
        assert answer.choices[0].text.endswith("37+58=95")
        assert answer.model == "second"


def test_several_outputs_of_several_prompts_are_in_order(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="abacus", prompt=["1+1=", "2+2="], n=3, temperature=0.01, seed=1
    )
    assert [choice.text for choice in answer.choices] == ["2"] * 3 + ["4"] * 3
    assert [choice.index for choice in answer.choices] == list(range(6))


def test_a_streamed_completion_adds_up_to_the_whole(client: openai.OpenAI, llm: LLM) -> None:
    prompts = ["sort 5 3 9 1=", "37+58="]
    pieces, usage = ["", ""], None
    for chunk in client.completions.create(
        model="abacus",
        prompt=prompts,
        temperature=0,
        max_tokens=32,
        logprobs=1,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
            assert choice.logprobs is not None and choice.logprobs.tokens
    expected = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=32), use_tqdm=False)
    assert pieces == [o.outputs[0].text for o in expected]
    assert usage is not None
    assert usage.completion_tokens == sum(len(o.outputs[0].token_ids) for o in expected)


def test_logprobs_of_a_completion_are_those_of_the_engine(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model="abacus", prompt="37+58=", temperature=0, logprobs=3)
    found = answer.choices[0].logprobs
    (output,) = llm.generate("37+58=", SamplingParams(temperature=0.0, logprobs=3), use_tqdm=False)
    steps = output.outputs[0].logprobs or []
    assert found is not None and found.token_logprobs is not None
    first = [next(iter(step.values())) for step in steps]
    assert found.tokens == [entry.decoded_token for entry in first]
    assert found.token_logprobs == pytest.approx([e.logprob for e in first], abs=1e-4)
    assert found.text_offset == [0, 1, 2]
    assert [len(top) for top in found.top_logprobs or []] == [3, 3, 3]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_echo_has_the_logprobs_of_the_prompt(http: httpx.Client, llm: LLM, streamed: bool) -> None:
    prompts = ["37+58=95", "sort 5 3 9 1="]
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    if streamed:
        choices = [each["choices"][0] for each in stream(http, "/v1/completions", **body)]
        choices.sort(key=lambda choice: choice["index"])
    else:
        choices = http.post("/v1/completions", json=body).json()["choices"]
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=1, prompt_logprobs=1)
    for choice, output in zip(choices, llm.generate(prompts, params, use_tqdm=False), strict=True):
        steps = [*(output.prompt_logprobs or ())[1:], *(output.outputs[0].logprobs or ())]
        expected = [next(iter(step.values())).logprob for step in steps if step]
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        assert found["token_logprobs"][1:] == pytest.approx(expected, abs=1e-3)
        assert "".join(found["tokens"][:-1]).endswith(output.prompt or "")
        behind = zip(found["tokens"][1:-1], found["text_offset"][1:-1], strict=True)
        assert all(choice["text"].startswith(token, at) for token, at in behind)
        assert choice["text"] == (output.prompt or "") + output.outputs[0].text


def test_a_loglikelihood_is_found_as_lm_eval_finds_it(http: httpx.Client) -> None:
    context, right, wrong = "37+58=", "95", "59"
    body = {"prompt": [context + right, context + wrong], "logprobs": 1, "echo": True, "seed": 1}
    choices = http.post("/v1/completions", json={**body, "max_tokens": 1, "temperature": 0}).json()
    sums, greedy = [], []
    for choice in sorted(choices["choices"], key=lambda choice: choice["index"]):
        start = len(choice["logprobs"]["tokens"]) - 1 - len(right)
        own = choice["logprobs"]["token_logprobs"][start:-1]
        tops = choice["logprobs"]["top_logprobs"][start:-1]
        sums.append(sum(own))
        greedy.append(all(mine == max(top.values()) for mine, top in zip(own, tops, strict=True)))
    assert sums[0] > sums[1] + 5
    assert greedy == [True, False]


def test_a_prompt_alone_is_scored_without_a_token(http: httpx.Client) -> None:
    body = {"prompt": "37+58=", "echo": True, "logprobs": 0, "max_tokens": 0}
    answer = http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == "37+58="
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 0
    messages = [{"role": "user", "content": "1+1="}]
    chat = {"messages": messages, "prompt_logprobs": 1, "max_tokens": 2}
    found = http.post("/v1/chat/completions", json=chat).json()["prompt_logprobs"]
    assert found[0] is None
    assert all(1 <= len(each) <= 2 for each in found[1:])


def test_a_chat_is_answered_whole_and_streamed(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "37+58="}]}]
    answer = client.chat.completions.create(
        model="abacus", messages=messages, temperature=0, logprobs=True, top_logprobs=2
    )
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "95")
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    tops = [len(token.top_logprobs) for token in choice.logprobs.content]
    assert (tops, choice.logprobs.content[0].bytes) == ([2, 2, 2], [ord("9")])
    chunks = list(
        client.chat.completions.create(
            model="abacus",
            messages=messages,
            temperature=0,
            max_completion_tokens=1,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert (text, chunks[-2].choices[0].finish_reason) == ("9", "length")
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 1


def test_fields_of_vllm_reach_the_engine(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="abacus",
        prompt="37+58=",
        temperature=0,
        max_tokens=6,
        extra_body={"ignore_eos": True, "top_k": 5, "min_tokens": 6, "return_token_ids": True},
        logit_bias={"55": 100},
    )
    assert answer.usage is not None and answer.usage.completion_tokens == 6
    assert answer.choices[0].text == "777777"
    assert len(answer.choices[0].model_dump()["token_ids"]) == 6


def test_a_stop_string_ends_the_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="abacus", prompt="sort 5 3 9 1=", temperature=0, stop=["5"]
    )
    assert answer.choices[0].model_dump()["stop_reason"] == "5"
    assert answer.choices[0].text == "1 3 "


def test_an_output_keeps_to_a_json_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"digits": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
        "required": ["digits"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="abacus",
        messages=[{"role": "user", "content": "1+1="}],
        response_format={"type": "json_schema", "json_schema": {"name": "it", "schema": schema}},
        seed=1,
    )
    assert answer.choices[0].finish_reason == "stop"
    assert list(json.loads(answer.choices[0].message.content or "")) == ["digits"]
    for form in ({"choice": ["tic", "tac"]}, {"regex": "t[ia]c"}, {"grammar": "start: /t[ia]c/"}):
        short = client.completions.create(
            model="abacus", prompt="1+1=", n=2, seed=1, extra_body={"structured_outputs": form}
        )
        assert {choice.text for choice in short.choices} <= {"tic", "tac"}


def test_a_response_is_answered_whole_and_streamed(client: openai.OpenAI) -> None:
    given: Any = {"model": "abacus", "temperature": 0, "instructions": "Add."}
    parts: Any = [{"role": "user", "content": [{"type": "input_text", "text": "37+58="}]}]
    for asked in ("37+58=", parts):
        answer = client.responses.create(input=asked, **given)
        assert (answer.output_text, answer.status) == ("95", "completed")
        assert answer.usage is not None and answer.usage.output_tokens == 3
    cut = client.responses.create(input="37+58=", max_output_tokens=1, **given)
    assert (cut.output_text, cut.status) == ("9", "incomplete")
    with client.responses.stream(input="37+58=", **given) as events:
        text = "".join(each.delta for each in events if each.type == "response.output_text.delta")
        final = events.get_final_response()
    assert text == final.output_text == "95"
    with pytest.raises(openai.BadRequestError, match="not stored"):
        client.responses.create(input="1", previous_response_id="resp_1", **given)


def test_a_required_call_is_answered(client: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    answer = client.chat.completions.create(
        model="abacus",
        messages=[{"role": "user", "content": "1+1="}],
        tools=[{"type": "function", "function": {"name": "add", "parameters": parameters}}],
        tool_choice="required",
        seed=1,
        max_tokens=300,
    )
    call, *_ = answer.choices[0].message.tool_calls or []
    assert call.type == "function" and call.function.name == "add"
    assert isinstance(json.loads(call.function.arguments)["a"], int)


@pytest.mark.parametrize("key", ["wrong", KEY + "x", "ünicode"])
def test_a_wrong_key_is_refused(server: ServerProcess, key: str) -> None:
    with server.client() as bare:
        headers = {"authorization": f"Bearer {key}".encode()}
        answer = bare.post("/v1/completions", json={"prompt": "1"}, headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert bare.get("/v1/models").status_code == 401
        assert bare.get("/metrics").status_code == 401
        assert bare.get("/health").status_code == 200
        assert bare.get("/live").status_code == 200


# Server-sent events, as they are


def test_echo_comes_first_in_a_stream(http: httpx.Client) -> None:
    found = stream(http, "/v1/completions", prompt="37+58=", temperature=0, echo=True)
    assert found[0]["choices"][0]["text"].startswith("37+58=")
    assert "".join(each["choices"][0]["text"] for each in found) == "37+58=95"


def test_tokens_and_text_are_each_others_inverse(http: httpx.Client, llm: LLM) -> None:
    found = http.post("/tokenize", json={"prompt": "37+58=", "return_token_strs": True}).json()
    assert found["tokens"] == llm.get_tokenizer().encode("37+58=")
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 512)
    assert "".join(found["token_strs"]).endswith("37+58=")
    text = http.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"]
    assert text.endswith("37+58=")
    messages = [{"role": "user", "content": "1+1="}]
    assert http.post("/tokenize", json={"messages": messages}).json()["count"] > 0


def test_metrics_count_what_was_asked(server: ServerProcess, http: httpx.Client) -> None:
    wait_for(lambda: is_idle(http))
    before = http.get("/metrics").text
    http.post("/v1/completions", json={"prompt": "1+1=", "temperature": 0})
    stopped = {"prompt": "37+58=", "temperature": 0, "stop": "5"}  # of which the core tells nothing
    http.post("/v1/completions", json=stopped)
    after = http.get("/metrics").text

    def value(text: str, name: str, labels: str = "") -> float:
        lines = text.splitlines()
        found = [line for line in lines if line.startswith(name + "{") and labels in line]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    for name, more in (
        ("vllm:prompt_tokens_total", 5 + 7),
        ("vllm:time_to_first_token_seconds_count", 2),
        ("vllm:e2e_request_latency_seconds_count", 2),
        ("vllm:request_success_total", 2),
    ):
        assert value(after, name) - value(before, name) == more, name
    more = value(after, "vllm:generation_tokens_total") - value(
        before, "vllm:generation_tokens_total"
    )
    assert more in (4, 5)  # one more may have been under way when the stop string was seen
    assert value(after, "fusewright:steps_total") > 0
    for name in ("fusewright:step_read_bytes_total", "fusewright:step_busy_seconds_total"):
        for kind in ("decode", "mixed"):
            label = f'step="{kind}"'
            assert value(after, name, label) > value(before, name, label)
    assert "fusewright:steps_over_bound_total{" in after
    assert value(after, "fusewright:steps_over_bound_total") == 0, "there is no bound"
    assert value(after, "fusewright:copy_ceiling_unknown", "no device table has the copy rate") == 1
    assert 'finished_reason="stop"' in after
    assert 'path="/v1/completions"' in after


@pytest.mark.parametrize(
    "path",
    [
        "container/grafana.json",
        "container/prometheus-rules.yml",
        "serve/http/endpoints/status.html",
    ],
)
def test_every_series_that_is_drawn_is_there(http: httpx.Client, path: str) -> None:
    http.post("/v1/completions", json={"prompt": "1+1=", "temperature": 0})
    text = http.get("/metrics").text
    there = set(re.findall(r"^(?:# TYPE )?((?:vllm|fusewright):\w+)", text, re.M))
    drawn = set(re.findall(r"(?:vllm|fusewright):\w+", (ROOT / path).read_text()))
    drafts = DraftStats("ngram", 1, 0, 0, [0], [0], {})
    there |= {f"{name}_total" for _, name, _, _ in of_drafts(drafts)}  # where somebody drafts
    assert drawn
    assert drawn <= there


def test_the_status_page_needs_no_key(server: ServerProcess) -> None:
    with server.client() as bare:
        answer = bare.get("/")
        assert answer.headers["content-type"].startswith("text/html")
        assert "<title>fusewright</title>" in answer.text


# Clients that go away


@pytest.mark.parametrize("streamed", [True, False], ids=["stream", "whole"])
def test_a_client_that_goes_away_frees_its_blocks(
    server: ServerProcess, http: httpx.Client, streamed: bool
) -> None:
    wait_for(lambda: is_idle(http))
    tokens_before = server_tokens(http)
    with pytest.raises(httpx.ReadTimeout), server.client() as leaving:
        leaving.headers = http.headers
        many = {**LONG, "n": 64, "temperature": 1.0, "stream": streamed}
        soon = httpx.Timeout(60, read=0.4)
        with leaving.stream("POST", "/v1/completions", json=many, timeout=soon) as response:
            for _ in response.iter_raw():
                raise httpx.ReadTimeout("seen enough")
    wait_for(lambda: is_idle(http))
    assert server_tokens(http) - tokens_before < 64 * 400


def server_tokens(http: httpx.Client) -> float:
    lines = http.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("vllm:generation_tokens_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def test_requests_are_aborted_by_their_ids(server: ServerProcess, http: httpx.Client) -> None:
    body = {**LONG, "stream": True, "request_id": "mine"}
    with http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["id"] == "cmpl-mine"
        with server.engine_stopped():
            again = http.post("/v1/completions", json={**LONG, "request_id": "mine"})
            assert again.json()["error"]["param"] == "request_id"
            found = http.post("/abort_requests", json={"request_ids": ["cmpl-mine", "unknown"]})
            assert found.json() == {"aborted": ["cmpl-mine"]}
        rest = [line for line in lines if line]
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "aborted"
    assert rest[-1] == "data: [DONE]"
