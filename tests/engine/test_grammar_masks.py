"""Claims about a form beside ``min_tokens``, ``bad_words`` and stop ids: it is kept, it ends where
it may, and contradictions end their own request alone."""

from __future__ import annotations

from typing import Any

import pytest

from fusewright import LLM, SamplingParams
from fusewright.engine.frontend.grammar import choice_grammar, json_grammar, regex_grammar

DIGITS = list("0123456789")
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("abacus", device="cpu", optimization_level=0, dtype="float32")


def run(llm: LLM, *params: SamplingParams) -> list[Any]:
    prompts = ["37+58="] * len(params)
    return [o.outputs[0] for o in llm.generate(prompts, list(params), use_tqdm=False)]


@pytest.mark.product(2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "grammar, more, text",
    [
        (json_grammar({"enum": ["a"]}), {"min_tokens": 40}, '"a"'),
        (choice_grammar(["b"]), {"logit_bias": dict.fromkeys(range(258), -100.0)}, "b"),
        (choice_grammar(["ab"]), {"min_tokens": 40, "ignore_eos": True}, "ab"),
        (regex_grammar("a[0-9]*"), {"bad_words": DIGITS}, "a"),
        (regex_grammar("a[0-9]*"), {"bad_words": DIGITS, "min_tokens": 9}, "a"),
        (regex_grammar("a[0-9]?"), {"bad_words": ["<eos>", "1"], "min_tokens": 30}, "a[02-9]"),
        # A stop id that the form demands is taken, and ends nothing before ``min_tokens``.
        (regex_grammar("abc?"), {"stop_token_ids": [ord("b")], "min_tokens": 3}, "abc"),
        (regex_grammar("abc"), {"stop_token_ids": [ord("b")]}, "a"),
    ],
)
def test_a_form_ends_where_it_may_whatever_else_is_asked(
    llm: LLM, grammar: str, more: dict[str, Any], text: str, temperature: float
) -> None:
    params = SamplingParams(grammar=grammar, max_tokens=60, seed=3, temperature=temperature, **more)
    output, other = run(llm, params, GREEDY)
    assert output.finish_reason == "stop", output
    assert output.text == text or (text.startswith("a[") and output.text[1] in "02345679")
    assert other.text == "95"


def test_min_tokens_holds_as_far_as_the_form_goes_on(llm: LLM) -> None:
    grammar = regex_grammar("[0-9]*")
    params = [
        SamplingParams(grammar=grammar, min_tokens=20, max_tokens=40, seed=i, ignore_eos=i % 2 == 0)
        for i in range(4)
    ]
    for output in run(llm, *params):
        assert len(output.text) >= 20 and output.text.isdigit()


def test_bad_words_hold_within_a_form(llm: LLM) -> None:
    for output in run(
        llm,
        *(
            SamplingParams(grammar=regex_grammar("[0-9]{30}"), bad_words=["1", "2", "33"], seed=i)
            for i in range(4)
        ),
    ):
        assert not {"1", "2"} & set(output.text) and "33" not in output.text


@pytest.mark.parametrize("pattern", ["[0-9]+", "ab[0-9]c"])
def test_bans_that_leave_nothing_within_a_form_end_their_request_alone(
    llm: LLM, pattern: str
) -> None:
    params = SamplingParams(grammar=regex_grammar(pattern), bad_words=DIGITS, seed=1)
    output, other, again = run(llm, params, GREEDY, GREEDY)
    assert output.finish_reason == "error" and output.refused
    assert output.text == pattern.partition("[")[0]
    assert "bad_words forbid all that the grammar permits" in output.error
    assert (other.text, again.text) == ("95", "95")
