"""Claims about budgets of thinking: behind so many tokens the end is forced, whatever else is
asked, and what the model writes before it is what it would write anyway."""

from __future__ import annotations

from typing import Any

import pytest

from fusewright import LLM, SamplingParams
from fusewright.config import UserError
from fusewright.engine.core.thinking import Thinking
from fusewright.engine.frontend.grammar import regex_grammar
from fusewright.engine.messages.token_ids import ThinkingTokens

from .grammar_waits import wait_for_grammars

START, END = [ord("<")], [ord("#"), ord("$")]
OPEN = ThinkingTokens(end_ids=END, is_open=True)
FREE = ThinkingTokens(start_ids=START, end_ids=END, forced_ids=[*END, ord("!")])


def written(thinking: Thinking, model: str, num_in_flight: int = 0) -> tuple[str, list[int]]:
    """What comes of a model's own tokens, and where it had to be waited for."""
    output: list[int] = []
    flying: list[int] = []
    waited = []
    for own in map(ord, model):
        while thinking.waits(len(output), len(flying)):
            waited.append(len(output) + len(flying))
            output.append(flying.pop(0))
            thinking.take(output)
        forced = thinking.forced(output, len(output) + len(flying))
        flying.append(own if forced is None else forced)
        if len(flying) > num_in_flight:
            output.append(flying.pop(0))
            thinking.take(output)
    return "".join(map(chr, [*output, *flying])), waited


@pytest.mark.parametrize("num_in_flight", [0, 1])
@pytest.mark.parametrize(
    "marks, budget, model, text",
    [
        (OPEN, 3, "abcdefgh", "abc#$fgh"),
        (OPEN, 0, "abcdefgh", "#$cdefgh"),
        (OPEN, 3, "a#$defgh", "a#$defgh"),
        (OPEN, 3, "ab#defgh", "ab#$efgh"),
        (OPEN, 9, "abcdefgh", "abcdefgh"),
        (FREE, 2, "<abcdefgh", "<ab#$!fgh"),
        (FREE, 2, " <abcdefg", " <ab#$!fg"),
        (FREE, 0, "<abcdefgh", "<#$!defgh"),
        (FREE, 2, "abcdef<abcd", "abcdef<abcd"),
        (FREE, 2, "<#$abcdef", "<#$abcdef"),
    ],
)
def test_the_end_is_forced_behind_the_budget(
    marks: ThinkingTokens, budget: int, model: str, text: str, num_in_flight: int
) -> None:
    assert written(Thinking(marks, budget), model, num_in_flight)[0] == text


def test_steps_wait_only_where_the_budget_may_be_spent() -> None:
    assert written(Thinking(OPEN, 4), "abcdefghij", 1) == ("abcd#$ghij", [4])
    assert written(Thinking(FREE, 4), "abcdefghij", 1)[1] == []


@pytest.fixture(scope="module")
def llm() -> LLM:
    llm = LLM("abacus", device="cpu", optimization_level=0, dtype="float32")
    wait_for_grammars(llm)
    return llm


def tokens(llm: LLM, *params: SamplingParams) -> list[list[list[int]]]:
    outputs = llm.generate(["37+58="] * len(params), [*params], use_tqdm=False)
    return [[each.token_ids for each in output.outputs] for output in outputs]


MORE: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeds and outputs": {"seed": 3, "n": 3},
    "penalties": {"seed": 4, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    "least tokens, stop ids": {"seed": 5, "min_tokens": 9, "stop_token_ids": [END[1]]},
    "a bias against it": {"seed": 6, "logit_bias": {END[0]: -100, END[1]: -100}},
    "bad words": {"seed": 7, "bad_words": ["$"]},
    "log probabilities": {"seed": 8, "logprobs": 2},
}


@pytest.mark.product(2)
@pytest.mark.parametrize("name", MORE)
def test_a_budget_holds_whatever_else_is_asked(llm: LLM, name: str) -> None:
    more = {"max_tokens": 10, "ignore_eos": True, **MORE[name]}
    budget = {"thinking_token_budget": 4, "thinking_tokens": OPEN}
    free, held, other = tokens(
        llm, SamplingParams(**more), SamplingParams(**more, **budget), SamplingParams(temperature=0)
    )
    assert other[0][:2] == [*b"95"]
    for without, ids in zip(free, held, strict=True):
        assert ids[:4] == without[:4] and ids[4:6] == END and len(ids) >= 9, (ids, without)


def test_a_budget_holds_within_a_form_and_over_preemptions(llm: LLM) -> None:
    small = LLM(
        "abacus",
        device="cpu",
        optimization_level=0,
        dtype="float32",
        num_gpu_blocks_override=6,
        block_size=8,
        max_model_len=48,
    )
    wait_for_grammars(small)
    form = regex_grammar("(a|b|#)*[$]7{14}")
    budget = {"thinking_token_budget": 6, "thinking_tokens": OPEN, "max_tokens": 24}
    params = [SamplingParams(seed=i, grammar=form, **budget) for i in range(3)]
    for (ids,) in tokens(small, *params):
        thought, _, behind = bytes(ids[:-1]).decode().partition("$")
        assert set(thought) <= set("ab#") and len(thought) <= 7
        assert behind == 14 * "7"
    assert small.report()["num_preemptions"] > 0


@pytest.mark.parametrize(
    "given, message",
    [
        ({"thinking_token_budget": 3}, "thinking_tokens"),
        ({"thinking_token_budget": -2, "thinking_tokens": OPEN}, "at least 0"),
        (
            {"thinking_token_budget": 3, "thinking_tokens": OPEN, "allowed_token_ids": [49]},
            "allowed_token_ids with the end",
        ),
        ({"thinking_tokens": 7}, "ThinkingTokens or None"),
    ],
)
def test_a_budget_without_an_end_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SamplingParams(**given)


def test_tokens_of_no_model_are_refused(llm: LLM) -> None:
    beyond = ThinkingTokens(end_ids=[9999], is_open=True)
    with pytest.raises(UserError, match="thinking_tokens has 9999"):
        tokens(llm, SamplingParams(thinking_token_budget=3, thinking_tokens=beyond))
    with pytest.raises(UserError, match="expected end_ids"):
        ThinkingTokens(end_ids=[1])
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
