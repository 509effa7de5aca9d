"""A model with drafts answers as it does without: tokens, texts, reasons and log probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from fusewright import LLM, SamplingParams, StructuredOutputsParams
from fusewright.config import EngineOptions, Hardware, UserError
from fusewright.engine.engine import Engine
from fusewright.engine.frontend.outputs import RequestOutput
from fusewright.engine.messages.step import Batch
from fusewright.engine.worker.drafts.rows import seen_tokens
from fusewright.graph_capture import GraphKind

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
    "adaptive": False,
}
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "optimization_level": 0,
    "dtype": "float32",
    "max_model_len": 128,
}
PROMPTS = ["37+58=", "sort 5 3 9 1=", "a b a b a b a", "12+12=24\n12+12=", "reverse abc abc="]


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24} | fields)


KINDS: dict[str, SamplingParams] = {
    "greedy": params(),
    "on and on": params(ignore_eos=True, max_tokens=48),
    "sampled": params(temperature=1.0, seed=3, ignore_eos=True),
    "hot": params(temperature=3.0, seed=4, ignore_eos=True, logprobs=2),
    "without a seed": params(temperature=0.8, ignore_eos=True),
    "cut": params(temperature=1.0, top_k=5, top_p=0.9, min_p=0.01, seed=5, ignore_eos=True),
    "logprobs": params(ignore_eos=True, logprobs=3),
    "prompt logprobs": params(prompt_logprobs=2, logprobs=0),
    "stop text": params(stop=["9", "b a"], ignore_eos=True),
    "stop text is kept": params(stop=["9 ", "5"], include_stop_str_in_output=True),
    "stop id": params(stop_token_ids=[ord("9"), ord("b")], ignore_eos=True),
    "min_tokens": params(min_tokens=20, max_tokens=30),
    "min_tokens, sampled": params(min_tokens=9, temperature=1.0, seed=6, stop_token_ids=[53]),
    "one token": params(max_tokens=1),
    "two tokens": params(max_tokens=2, ignore_eos=True),
    "repetition": params(repetition_penalty=1.3, ignore_eos=True),
    "presence": params(presence_penalty=1.5, frequency_penalty=0.5, temperature=0.9, seed=1),
    "all penalties": params(
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        ignore_eos=True,
        n=2,
        temperature=0.7,
        seed=8,
        max_tokens=40,
    ),
    "several": params(n=3, temperature=1.0, seed=7, ignore_eos=True),
    "bias": params(logit_bias={49: 8.0, 50: 6.0}, ignore_eos=True),
    "bad word": params(bad_words=["9"], ignore_eos=True),
    "bad words": params(bad_words=["58", "a b", "3 "], ignore_eos=True),
    "allowed": params(allowed_token_ids=[49, 50, 32], ignore_eos=True, temperature=1.0, seed=2),
    "form": params(
        structured_outputs=StructuredOutputsParams(
            json={
                "type": "object",
                "properties": {"first name": {"enum": ["xa", "xb"]}, "age": {"type": "integer"}},
                "required": ["first name", "age"],
                "additionalProperties": False,
            }
        ),
        max_tokens=48,
        temperature=1.0,
        seed=11,
        bad_words=["7", "na me"],
    ),
    "form, min_tokens": params(
        structured_outputs=StructuredOutputsParams(regex="ab[0-9]*c?"), min_tokens=12, seed=1
    ),
    "grammar": params(grammar='start: /[0-9]( [0-9])*/ ";"', temperature=1.0, seed=9),
    "no text": params(detokenize=False, ignore_eos=True),
}
SETUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "few blocks": {"num_gpu_blocks_override": 22, "block_size": 8, "max_num_seqs": 16},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 16},
    "one step at a time": {"async_scheduling": False},
    "no prefixes": {"enable_prefix_caching": False, "block_size": 8},
    "priorities": {"scheduling_policy": "priority", "max_num_seqs": 8},
    "more rows than requests": {"max_num_seqs": 2},
}


def facts(outputs: list[RequestOutput]) -> list[Any]:
    """All that a caller reads, but for log probabilities."""
    return [
        [(c.text, c.token_ids, c.finish_reason, c.stop_reason, c.text_offsets) for c in o.outputs]
        for o in outputs
    ]


def logprobs(outputs: list[RequestOutput]) -> list[float]:
    """All log probabilities, in order."""
    steps = [step for o in outputs for step in o.prompt_logprobs or [] if step]
    steps += [step for o in outputs for c in o.outputs for step in c.logprobs or []]
    return [entry.logprob for step in steps for entry in step.values()]


def generate(llm: LLM, names: Iterable[str] = tuple(KINDS)) -> list[RequestOutput]:
    """Requests of these kinds with two prompts each, all at once."""
    places = [list(KINDS).index(name) for name in names]
    prompts = [PROMPTS[(place + j) % len(PROMPTS)] for place in places for j in (0, 2)]
    each = [KINDS[name] for name in names for _ in (0, 2)]
    heed = llm.engine.core.limits.heed_priority  # type: ignore[attr-defined]
    priority = [i % 3 for i in range(len(each))] if heed else None
    return llm.generate(prompts, each, use_tqdm=False, priority=priority)


MODELS = ("abacus", "abacus-moe")


@cache
def without_drafts(model: str) -> list[RequestOutput]:
    """A model's answers to requests of all kinds."""
    return generate(LLM(model, **OPTIONS))


def check(llm: LLM, outputs: list[RequestOutput], expected: list[RequestOutput]) -> dict[str, Any]:
    """Compare answers, and return what is reported of drafts."""
    assert facts(outputs) == facts(expected)
    assert logprobs(outputs) == pytest.approx(logprobs(expected), abs=1e-3)
    report: dict[str, Any] = llm.report()["drafts"]
    assert report["accepted"] > 0 and report["drafted"] > report["accepted"]
    assert report["error"] == ""
    pool = llm.engine.core.scheduler.pool  # type: ignore[attr-defined]
    assert pool.num_free == pool.num_blocks, "a block was lost"
    return report


@pytest.mark.product(14)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_outputs_are_those_without_drafts(setup: dict[str, Any], model: str) -> None:
    expected = without_drafts(model)
    llm = LLM(model, **OPTIONS | setup, speculative_config=NGRAM)
    report = check(llm, generate(llm), expected)
    assert (llm.report()["num_preemptions"] > 0) == ("num_gpu_blocks_override" in setup)
    assert report["accepted"] == sum(report["accepted_by_position"])
    assert 1.0 < report["mean_length"] < 5.0
    if setup:
        return
    again = generate(llm)  # behind cached prefixes
    sampled = list(KINDS).index("without a seed")  # whose noise depends on the order of arrival
    same = [i for i in range(len(again)) if i // 2 != sampled]
    assert facts([again[i] for i in same]) == facts([expected[i] for i in same])


FEW = ("greedy", "sampled", "logprobs", "stop id", "several")


def few_without_drafts(model: str) -> list[RequestOutput]:
    """A model's answers to these kinds."""
    expected = without_drafts(model)
    return [expected[2 * list(KINDS).index(name) + j] for name in FEW for j in (0, 1)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_a_grammar_forces_is_drafted(temperature: float) -> None:
    """Of a fixed text, every step has as many tokens as it has rows, and all of them are right."""
    text = "there is no other text than this one"
    form = StructuredOutputsParams(choice=[text])
    asked = SamplingParams(structured_outputs=form, temperature=temperature, seed=1, max_tokens=99)
    llm = LLM("abacus", **OPTIONS, speculative_config=NGRAM | {"num_speculative_tokens": 8})
    (output,) = llm.generate("37+58=", asked, use_tqdm=False)
    report = llm.report()["drafts"]
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == (text, "stop")
    assert report["accepted"] == report["drafted"] >= len(text) - 2 - len(text) // 9
    assert report["steps"] <= len(text) // 9 + 1


def test_penalties_count_the_drafts_before_a_row() -> None:
    """Rows of three requests with drafts, one without, and one that is not penalized."""
    slots = [2, 2, 2, 0, 3, 3, 1, 1, 1]
    drafts = [9, 4, 5, 9, 9, 6, 9, 4, 4]  # what each row has as input
    batch = make_rows(slots, drafts)
    penalized = torch.tensor([2, 2, 2, 0, 3, 3, -1, -1, -1], dtype=torch.int32)
    counts, mask = torch.zeros(4, 10, dtype=torch.int32), torch.rand(4, 10) < 0.5
    counts[2, 4], counts[3, 1] = 3, 2
    own = counts.clone()

    def send(values: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype)

    inputs = torch.tensor(drafts, dtype=torch.int32)
    seen, seen_mask, at = seen_tokens(counts, mask, penalized, batch, inputs, send)
    assert at.tolist() == [0, 1, 2, 3, 4, 5, -1, -1, -1] and torch.equal(counts, own)
    for row, before in {0: [], 1: [4], 2: [4, 5], 3: [], 4: [], 5: [6]}.items():
        assert torch.equal(seen_mask[row], mask[slots[row]])
        extra = torch.bincount(torch.tensor(before, dtype=torch.long), minlength=10)
        assert torch.equal(seen[row], counts[slots[row]] + extra), row
    plain = make_rows([0, 1], [3, 4])
    assert seen_tokens(counts, mask, penalized[:2], plain, inputs, send)[0] is counts


def make_rows(slots: list[int], input_ids: list[int]) -> Batch:
    """A step of rows of one token, all of which sample."""
    ones, ids = np.ones(len(slots), np.int32), np.array(input_ids, np.int32)
    of = np.array(slots, np.int32)
    return Batch(of, ones, ones, ones, ids, -ones, [], [], 1)


def test_compiled_programs_and_graphs_serve_drafts() -> None:
    """At -O2 a step with drafts replays the graph of as many decodes, of more than may run."""
    hardware = Hardware(device="cpu", name="recorded", graphs="recording")
    options = OPTIONS | {"optimization_level": 2, "max_num_seqs": 6}
    asked = EngineOptions(**options, speculative_config=json.dumps(NGRAM))
    engine = Engine(asked, hardware)
    llm = LLM.from_engine(engine)
    check(llm, generate(llm, FEW), few_without_drafts("abacus"))
    kinds = {kind for step, kind in engine.dispatcher.counters if step == "decode"}
    assert kinds == {GraphKind.FULL}
    core: Any = engine.core
    launch, in_flight = core.runner.launch, list[int]()

    def listen(batch: Batch) -> Any:
        in_flight.append(len(core._in_flight))
        return launch(batch)

    core.runner.launch = listen
    generate(llm, ["on and on"])
    middle = in_flight[1 : len(in_flight) // 2]
    assert len(middle) > 3 and all(middle), "a step waits for none before it"


@pytest.mark.product
@pytest.mark.usefixtures("warm", "no_engine_is_left")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ranks", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_ranks_take_drafts(ranks: str, model: str) -> None:
    with LLM(model, **OPTIONS, speculative_config=NGRAM, **{ranks: 2}) as llm:
        check(llm, generate(llm, FEW), few_without_drafts(model))


def test_no_drafts_are_reported_without_a_drafter() -> None:
    assert LLM("abacus", **OPTIONS).report()["drafts"] is None


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "not JSON: .*; expected an object, such as"),
        ("ngram", r"'ngram': not JSON: .*; expected an object, such as \{\"method\": \"ngram\""),
        ("[1]", "expected an object"),
        ("", "'': not JSON: .*; expected an object, such as"),
        ("[" * 9999 + "]" * 9999, "nested too deeply; expected an object, such as"),
        ('{"method": "ngram", "method": "suffix"}', "has 'method' twice; leave one of them out"),
        ({}, "method=None: expected one of ngram"),
        ({"method": "magic", "num_speculative_tokens": 2}, "method='magic': expected one of ngram"),
        ({"method": "ngram"}, "num_speculative_tokens=None: expected how many"),
        (NGRAM | {"num_speculative_tokens": 0}, r"num_speculative_tokens=0: expected .* \[1, 64\]"),
        (NGRAM | {"num_speculative_tokens": True}, "num_speculative_tokens=True"),
        (NGRAM | {"prompt_lookup_min": 4}, "prompt_lookup_min=4: expected prompt_lookup_max=3"),
        (NGRAM | {"prompt_lookup_max": "2"}, "prompt_lookup_max='2'"),
        (NGRAM | {"tokens": 4}, "tokens=4: expected one of the fields"),
        (NGRAM | {"suffix_cached_tokens": 4}, "suffix_cached_tokens=4 is of method suffix"),
        ({"method": "suffix", "suffix_cached_tokens": -1}, r"=-1: expected an integer in \[0, "),
        ({"method": "suffix", "prompt_lookup_max": 4}, "prompt_lookup_max=4 is of method ngram"),
        (
            {"model": "abacus-draft", "num_speculative_tokens": 1, "quantization": "awq"},
            "quantization='awq': a checkpoint says itself that it is quantized so",
        ),
        (
            {"model": "abacus-draft", "num_speculative_tokens": 1, "quantization": "int3"},
            "quantization='int3': expected fp8 or fp8_block or fp8_static or int4 or int8 or",
        ),
        (
            {"method": "mtp", "num_speculative_tokens": 1, "revision": "main"},
            "revision='main' is of the field model, which is not there",
        ),
        (
            {"model": "abacus-draft", "num_speculative_tokens": 1, "revision": "main"},
            "revision='main': expected a .* of a model on the Hub, and model='abacus-draft'",
        ),
    ],
)
def test_a_bad_config_is_named_before_anything_is_loaded(config: Any, said: str) -> None:
    with pytest.raises(UserError, match=f"speculative_config.*{said}"):
        LLM("/no/such/model", **OPTIONS, speculative_config=config)
