"""Claims about log probabilities of prompts: they are those that generating would have given,
however the prompt is cut into steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fusewright import LLM, SamplingParams
from fusewright.config import UserError
from fusewright.engine.frontend.outputs import RequestOutput
from fusewright.engine.messages.step import NO_TARGET, Batch

PROMPTS = ["37+58=", "sort 5 3 9 1=", "37+58=95 is it"] * 3
OPTIONS: dict[str, Any] = {"device": "cpu", "optimization_level": 0, "dtype": "float32"}
PLAIN = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PARAMS = replace(PLAIN, prompt_logprobs=3)


@pytest.fixture(scope="module")
def reference() -> LLM:
    return LLM("abacus", **OPTIONS, enable_prefix_caching=False)


def generated(llm: LLM, token_ids: list[int]) -> list[dict[int, tuple[float, int]]]:
    """The log probabilities and ranks of the 20 likeliest tokens behind each token but the last."""
    prompts = [{"prompt_token_ids": token_ids[:end]} for end in range(1, len(token_ids))]
    one = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    steps = [(o.outputs[0].logprobs or [])[0] for o in llm.generate(prompts, one, use_tqdm=False)]
    return [{i: (e.logprob, e.rank) for i, e in step.items()} for step in steps]


@pytest.fixture(scope="module")
def plain(reference: LLM) -> list[RequestOutput]:
    """The prompts' outputs where nobody asks for log probabilities of prompts."""
    return reference.generate(PROMPTS, PLAIN, use_tqdm=False)


@pytest.fixture(scope="module")
def expected(
    reference: LLM, plain: list[RequestOutput]
) -> dict[tuple[int, ...], list[dict[int, tuple[float, int]]]]:
    """``generated`` of each prompt."""
    return {ids: generated(reference, [*ids]) for ids in {(*o.prompt_token_ids,) for o in plain}}


@pytest.mark.product
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"max_num_seqs": 4},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8, "async_scheduling": False},
        {"max_num_seqs": 4, "num_gpu_blocks_override": 5, "block_size": 8, "max_model_len": 40},
    ],
    ids=["whole", "4 rows a step", "a row a step", "not ahead", "with preemption"],
)
def test_they_are_those_of_generating(
    plain: list[RequestOutput], expected: dict[tuple[int, ...], Any], more: dict[str, Any]
) -> None:
    llm = LLM("abacus", **OPTIONS, **more)
    mixed = [*[PARAMS] * 8, PLAIN]
    outputs = llm.generate(PROMPTS, mixed, use_tqdm=False)
    assert (llm.report()["num_preemptions"] > 0) == ("num_gpu_blocks_override" in more)
    assert outputs[-1].prompt_logprobs is None
    for output, same in zip(outputs, plain, strict=True):
        assert output.outputs[0].token_ids == same.outputs[0].token_ids
        if output.prompt_logprobs is None:
            continue
        ids = output.prompt_token_ids
        assert output.prompt_logprobs[0] is None
        for position, likely in enumerate(expected[tuple(ids)], start=1):
            entries = output.prompt_logprobs[position] or {}
            assert next(iter(entries)) == ids[position]
            assert sorted(e.rank for e in entries.values())[:3] == [1, 2, 3]
            for token_id, entry in entries.items():
                if token_id in likely:
                    assert entry.logprob == pytest.approx(likely[token_id][0], abs=1e-3)
                    assert entry.rank == likely[token_id][1]
                else:
                    assert token_id == ids[position] and entry.rank > 20


def test_several_outputs_share_those_of_their_prompt(reference: LLM) -> None:
    params = SamplingParams(seed=1, n=3, prompt_logprobs=0, max_tokens=2)
    (output,) = reference.generate("37+58=", params, use_tqdm=False)
    assert len(output.outputs) == 3
    assert [len(each or ()) for each in output.prompt_logprobs or ()] == [0] + [1] * 6


def test_a_prompt_of_one_token_has_none(reference: LLM) -> None:
    prompt = {"prompt_token_ids": [50]}
    (output,) = reference.generate(prompt, PARAMS, use_tqdm=False)
    assert output.prompt_logprobs == [None]


def test_no_step_has_more_rows_than_there_are_seats() -> None:
    llm = LLM("abacus", **OPTIONS, max_num_seqs=5)
    seen: list[Batch] = []
    launch = llm.engine.core.runner.launch

    def watch(batch: Batch) -> Any:
        seen.append(batch)
        return launch(batch)

    llm.engine.core.runner.launch = watch
    llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert max(batch.num_seqs for batch in seen) == 5
    for batch in seen:
        # The sampled token of a slot is kept in it: no other row of the step may have the slot.
        sampled = batch.slots[batch.num_sampled > 0]
        others = batch.slots[batch.num_sampled == 0]
        assert not np.isin(sampled, others).any()
        if len(batch.targets):
            assert ((batch.targets == NO_TARGET) | (batch.num_sampled == 0)).all()


def test_a_wrong_number_is_named() -> None:
    with pytest.raises(UserError, match="prompt_logprobs=-2"):
        SamplingParams(prompt_logprobs=-2)
