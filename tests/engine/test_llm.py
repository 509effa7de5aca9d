"""``LLM`` and the loop over the toy model: order, streams, errors, aborts."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from fusewright.config import UserError
from fusewright.config.process.memory import host_bytes
from fusewright.engine.frontend import gc_pause
from fusewright.engine.frontend.outputs import RequestOutput
from fusewright.engine.llm import LLM
from fusewright.engine.messages.sampling_params import SamplingParams

from .toy import TOKENIZER, Setup, solo

LONG = SamplingParams(max_tokens=20, ignore_eos=True)


def toy_llm(**setup: Any) -> LLM:
    return LLM.from_engine(Setup(**setup).engine())


def right(prompt: Sequence[int], params: SamplingParams) -> str:
    return solo(prompt, params, 64).text


def test_outputs_are_in_the_order_of_the_prompts() -> None:
    llm = toy_llm(max_num_seqs=3)
    prompts = [f"prompt {i}" for i in range(12)]
    params = [SamplingParams(max_tokens=1 + (7 * i) % 12) for i in range(12)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [o.prompt for o in outputs] == prompts
    for output, param in zip(outputs, params, strict=True):
        ids = TOKENIZER.encode(output.prompt or "")
        assert output.prompt_token_ids == ids
        assert output.outputs[0].text == right(ids, param)
        assert output.finished and output.outputs[0].finish_reason in ("stop", "length")
    assert not llm.engine.has_unfinished()


@pytest.mark.parametrize(
    ("prompts", "count"),
    [("a", 1), ([1, 2], 1), ({"prompt_token_ids": [1]}, 1), (["a", [1]], 2), ([[1], [2]], 2)],
)
def test_one_prompt_or_several(prompts: Any, count: int) -> None:
    assert len(toy_llm().generate(prompts, use_tqdm=False)) == count


@pytest.mark.parametrize(
    ("prompts", "right_ids"),
    [
        ((text for text in ("a", "b")), [[256, 97], [256, 98]]),
        (iter([1, 2]), [[1, 2]]),
        (np.array([1, 2]), [[1, 2]]),
        (np.array([[1, 2], [3, 4]], np.uint8), [[1, 2], [3, 4]]),
        ([np.int64(1), 2], [[1, 2]]),
        ([torch.tensor([1, 2]), "a"], [[1, 2], [256, 97]]),
        ({"prompt_token_ids": np.array([1, 2])}, [[1, 2]]),
    ],
)
def test_any_iterable_is_several_prompts_and_arrays_are_token_ids(
    prompts: Any, right_ids: list[list[int]]
) -> None:
    params = (SamplingParams(max_tokens=1) for _ in right_ids)
    outputs = toy_llm().generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == right_ids
    assert {type(token) for output in outputs for token in output.prompt_token_ids} == {int}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None,), "prompts=None: expected text, token ids, or several of them"),
        ((5,), "prompts=5: expected text"),
        ((b"1+1=",), r"prompt of type bytes: expected text.*; use \.decode\(\)"),
        ((["a", b"1+1="],), r"prompt of type bytes: .*use \.decode\(\)"),
        ((bytearray(b"1"),), r"prompt of type bytearray: .*use \.decode\(\)"),
        (({"prompt_token_ids": b"12"},), r"prompt of type bytes: .*use \.decode\(\)"),
        ((np.array([1.5]),), "prompt of type float: expected text"),
        (([np.array([1.5])],), r"prompt token id 1\.5: expected an integer"),
        (("a", {"max_tokens": 3}), r"sampling_params is a dict: .*SamplingParams\(\*\*params\)"),
        (("a", [{"max_tokens": 3}]), "sampling_params is a dict"),
        (("a", 5), "sampling_params=5: expected one for each prompt"),
        (("a", [5]), "sampling_params=5: expected SamplingParams"),
        (("a", "greedy"), "sampling_params='greedy': expected SamplingParams"),
    ],
)
def test_what_is_no_prompt_or_no_parameter_is_one_error(
    arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        toy_llm().generate(*arguments, use_tqdm=False)
    assert "\n" not in str(error.value)


def test_no_prompts_give_no_outputs() -> None:
    assert toy_llm().generate([], use_tqdm=False) == []


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    toy_llm().generate(["a", "b"], LONG)
    shown = capsys.readouterr()
    assert "2/2" in shown.err and "tokens/s" in shown.err and shown.out == ""
    toy_llm().generate(["a", "b"], LONG, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_a_stream_grows_to_what_generate_gives() -> None:
    llm = toy_llm()
    outputs = list(llm.stream("abc", LONG))
    texts = [output.outputs[0].text for output in outputs]
    assert all(b.startswith(a) for a, b in pairwise(texts))
    assert [len(o.outputs[0].token_ids) for o in outputs] == list(range(1, 21))
    assert [o.finished for o in outputs] == [False] * 19 + [True]
    assert texts[-1] == llm.generate("abc", LONG, use_tqdm=False)[0].outputs[0].text


def test_streams_read_in_turn_share_the_engine() -> None:
    llm = toy_llm()
    last: dict[str, str] = {}
    for first, second in zip(llm.stream("one", LONG), llm.stream("two", LONG), strict=True):
        last = {"one": first.outputs[0].text, "two": second.outputs[0].text}
        llm.generate("three", SamplingParams(max_tokens=2), use_tqdm=False)
    for prompt, text in last.items():
        assert text == right(TOKENIZER.encode(prompt), LONG)


def test_a_closed_stream_aborts_its_request() -> None:
    llm = toy_llm()
    stream = llm.stream("abc", LONG)
    next(stream)
    stream.close()  # type: ignore[attr-defined]  # the iterator is a generator
    assert not llm.engine.has_unfinished()
    assert llm.engine.core.scheduler.pool.num_free == 64


def test_a_bad_prompt_among_good_ones_generates_nothing() -> None:
    llm = toy_llm()
    with pytest.raises(UserError, match="prompt is empty"):
        llm.generate(["a", "", "b"], use_tqdm=False)
    assert not llm.engine.has_unfinished()
    assert llm.generate("a", use_tqdm=False)[0].finished


@pytest.mark.parametrize(
    ("priority", "error"),
    [
        ([1], "priority=1: requests run by arrival; start with scheduling_policy='priority'"),
        ("a", "priority='a': expected an integer"),
        ([True], "priority=True: expected an integer"),
        ([1, 2], "2 priorities for 1 prompts"),
    ],
)
def test_a_priority_that_says_nothing_is_refused(priority: Any, error: str) -> None:
    with pytest.raises(UserError, match=error):
        toy_llm().generate("a", LONG, use_tqdm=False, priority=priority)
    assert len(toy_llm().generate("a", LONG, use_tqdm=False, priority=[0])) == 1


def test_chat_uses_the_template() -> None:
    llm = toy_llm()
    message = {"role": "user", "content": "1+2"}
    (one,) = llm.chat([message], LONG, use_tqdm=False)
    assert one.prompt_token_ids == [256, *b"1+2="]
    assert one.outputs[0].text == right(one.prompt_token_ids, LONG)
    assert len(llm.chat([[message], [message]], LONG, use_tqdm=False)) == 2
    with pytest.raises(UserError, match="messages is empty"):
        llm.chat([], LONG, use_tqdm=False)
    variables = {"bos_token": "1"}
    (one,) = llm.chat((m for m in [message]), LONG, chat_template_kwargs=variables, use_tqdm=False)
    assert one.prompt_token_ids == [*b"11+2="]
    (one,) = llm.chat([message], LONG, use_tqdm=False, tools=[], documents=None)
    assert one.prompt_token_ids == [256, *b"1+2="]


@pytest.mark.parametrize(
    ("messages", "options", "error"),
    [
        ("1+2", {}, "messages is of type str: expected a list of"),
        ({"role": "user", "content": "1+2"}, {}, "messages is of type dict: expected a list of"),
        (None, {}, "messages is of type NoneType: expected a list of"),
        (["1+2"], {}, "messages '1\\+2': expected a list of"),
        ([[]], {}, "messages is empty"),
        (["1"], {"continue_final_message": True}, "continue_final_message: a generation prompt"),
        ([], {"chat_template": "x"}, r"chat_template='x': give LLM\(chat_template=…\)"),
        ([], {"chat_template_kwargs": 5}, "chat_template_kwargs=5: expected a mapping"),
        ([], {"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x: .* reads: bos_token"),
        ([], {"enable_thinking": False}, "enable_thinking: the chat template of this model reads"),
        ([], {"tools": [{"type": "function"}]}, "tools: the chat template of this model reads"),
        ([], {"chat_template_kwargs": {"messages": []}}, "messages: this name is taken"),
    ],
)
def test_what_is_no_conversation_is_one_error(
    messages: Any, options: dict[str, Any], error: str
) -> None:
    with pytest.raises(UserError, match=error):
        toy_llm().chat(messages, LONG, use_tqdm=False, **options)


def test_the_tokenizer_encodes_and_decodes() -> None:
    tokenizer = toy_llm().get_tokenizer()
    assert tokenizer.decode(tokenizer.encode("12+34=", add_special_tokens=False)) == "12+34="
    with pytest.raises(UserError, match="no such file"):
        LLM.from_engine(Setup().engine(tokenizer=None)).get_tokenizer()


def test_ten_seconds_of_steps_are_a_line_in_the_log(said: list[logging.LogRecord]) -> None:
    llm = toy_llm(prefix_caching=True)
    engine = llm.engine
    llm.generate(["abcdefgh"] * 3, SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    stream = llm.stream("abcdefgh", LONG)
    next(stream)
    assert engine.stats is not None and not said
    engine.stats.add_step(20.0)
    (line,) = [record.getMessage() for record in said]
    assert line == (
        "running 1, waiting 0; in 1.8 tokens/s, out 0.8 tokens/s; KV cache 4.7 % in use, prefix "
        "cache hits 66.7 %"
    )
    engine.stats.add_step(9.0)
    assert len(said) == 1
    engine.stats = None
    assert len(list(stream)) == 19


def test_params_for_each_prompt_must_match_them() -> None:
    with pytest.raises(UserError, match="1 sampling_params for 2 prompts"):
        toy_llm().generate(["a", "b"], [LONG], use_tqdm=False)


def test_an_unknown_option_suggests_the_known_one() -> None:
    with pytest.raises(UserError, match="unknown option 'max_num_seq': did you mean max_num_seqs"):
        LLM("abacus", max_num_seq=3)


def test_request_ids_are_unique() -> None:
    engine = Setup().engine()
    engine.add_request("a", LONG, "x")
    engine.add_request("a", SamplingParams(n=2), "pair")
    for taken in ("x", "pair", "pair#1"):
        with pytest.raises(UserError, match=f"request_id '{taken}' is in use"):
            engine.add_request("b", LONG, taken)
    engine.add_request("c", LONG, "request-0")
    assert engine.add_request("d", LONG) == "request-1", "an id made up is never one in use"


def test_the_cache_being_too_small_is_found_before_anything_runs() -> None:
    engine = Setup(num_blocks=4, block_size=4).engine()
    with pytest.raises(UserError, match="KV cache too small for one request"):
        engine.add_request("abc", SamplingParams(max_tokens=30, n=2))
    assert not engine.has_unfinished()


def test_a_cache_larger_than_the_memory_of_this_machine_is_refused() -> None:
    """Linux would promise it, layer by layer, and kill the process that fills it."""
    memory, per_block = host_bytes(), 5 * 2 * 2 * 64 * 16 * 2
    assert memory is not None
    blocks = memory // per_block + 1
    with pytest.raises(UserError, match=r"more than the .* GB of this machine; lower num_gpu"):
        LLM("abacus", optimization_level=0, num_gpu_blocks_override=blocks)


def test_max_tokens_none_runs_to_the_length_limit() -> None:
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    (output,) = toy_llm().generate([[1, 2, 3]], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 61
    assert output.outputs[0].finish_reason == "length"


def test_abort_returns_what_there_is() -> None:
    engine = Setup().engine()
    engine.add_request("abc", LONG, "x")
    for _ in range(4):
        engine.step()
    output = engine.abort("x")
    assert output is not None and output.finished
    assert output.outputs[0].finish_reason == "abort" and len(output.outputs[0].token_ids) == 3
    assert engine.abort("x") is None and engine.abort("y") is None
    assert engine.step() == [], "the token in flight is discarded"


def test_one_step_is_in_flight() -> None:
    """The first output comes one call after its step; synchronous scheduling has it at once."""
    for async_scheduling, first in ((True, []), (False, [1])):
        engine = Setup(async_scheduling=async_scheduling).engine()
        engine.add_request("abc", LONG)
        assert [len(o.outputs[0].token_ids) for o in engine.step()] == first


def test_metrics_tell_times_and_preemptions() -> None:
    llm = toy_llm(num_blocks=9, block_size=4)
    outputs = llm.generate(["abc"] * 4, SamplingParams(max_tokens=16, ignore_eos=True), False)
    assert (
        sum(o.metrics.num_preemptions for o in outputs) == llm.engine.core.scheduler.num_preemptions
    )
    assert llm.engine.core.scheduler.num_preemptions > 0
    for m in (output.metrics for output in outputs):
        assert m.first_token_s is not None and m.finished_s is not None
        assert m.arrival_s <= m.first_token_s <= m.finished_s


@pytest.mark.parametrize("enabled", [True, False])
def test_no_full_collection_walks_over_the_heap_while_requests_run(
    enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = toy_llm()
    gc.unfreeze()  # what the tests have frozen would stay so
    monkeypatch.setattr(gc_pause, "_frozen_until", 0.0)
    run, frozen = llm.engine.step, []

    def step() -> list[RequestOutput]:
        frozen.append(gc.get_freeze_count() > 0)
        return run()

    llm.engine.step = step  # type: ignore[method-assign]
    (gc.enable if enabled else gc.disable)()
    try:
        llm.generate("abc", SamplingParams(max_tokens=3), use_tqdm=False)
        assert frozen and set(frozen) == {enabled}
        assert (gc.isenabled(), gc.get_freeze_count()) == (enabled, 0)
    finally:
        gc.enable()


def test_what_is_frozen_stays_so_and_is_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, counts, count = toy_llm(), list[int](), gc.get_freeze_count
    monkeypatch.setattr(gc_pause, "_frozen_until", 0.0)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counts.append(count()) or counts[-1])
    gc.freeze()
    for _ in range(3):
        llm.generate("abc", SamplingParams(max_tokens=3), use_tqdm=False)
    assert len(counts) == 1 and count() > 0
    monkeypatch.setattr(gc_pause, "_frozen_until", gc_pause.time.monotonic())  # a minute later
    llm.generate("abc", SamplingParams(max_tokens=3), use_tqdm=False)
    assert len(counts) == 2


def test_tokens_flow_while_10_000_prompts_are_queued() -> None:
    """Nothing waits for the queue: a stream goes on while prompts are checked, a step runs for
    every few that are queued, and the first of them finish before the last is queued."""
    setup = Setup(num_blocks=2000, max_num_seqs=64, max_num_batched_tokens=512, max_model_len=400)
    engine = setup.engine()
    llm = LLM.from_engine(engine)
    stream = llm.stream("abc", SamplingParams(max_tokens=390, ignore_eos=True))
    next(stream)
    waiting: list[int] = []
    run = engine.step

    def step() -> list[RequestOutput]:
        waiting.append(engine.core.scheduler.num_unfinished)
        return run()

    engine.step = step  # type: ignore[method-assign]
    prompts = [[i % 256, i // 256] for i in range(10_000)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert len(list(stream)) == 389
    assert max(waiting) < 10_000, "all were queued before the first ended"
    assert waiting[0] == 1, "the stream waited for the prompts to be checked"
    assert max(new - old for old, new in pairwise(waiting)) <= 64, "many were queued between steps"
