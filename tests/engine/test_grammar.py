"""Claims about structured output and biased logits: every output keeps to its grammar, and those
beside it are as they would be alone."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from fusewright import LLM, SamplingParams
from fusewright.config import UserError
from fusewright.engine.frontend.grammar import choice_grammar, json_grammar, regex_grammar
from fusewright.engine.messages.requests import AbortRequests, AddRequest

from .grammar_waits import wait_for_grammars

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        "kind": {"enum": ["a", "é"]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}
PROMPT = "37+58="
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("abacus", device="cpu", optimization_level=0, dtype="float32")


def outputs(llm: LLM, params: list[SamplingParams]) -> list[Any]:
    return [o.outputs[0] for o in llm.generate([PROMPT] * len(params), params, use_tqdm=False)]


def random_params(grammar: str, count: int, **more: Any) -> list[SamplingParams]:
    return [SamplingParams(grammar=grammar, seed=i, max_tokens=480, **more) for i in range(count)]


def test_every_output_keeps_to_its_schema(llm: LLM) -> None:
    for output in outputs(llm, random_params(json_grammar(SCHEMA), 2)):
        assert output.finish_reason == "stop", output
        found = json.loads(output.text)
        assert set(found) == set(SCHEMA["required"])
        assert len(found["name"]) <= 8
        assert 1 <= len(found["sizes"]) <= 3
        assert all(isinstance(size, int) for size in found["sizes"])
        assert found["kind"] in ("a", "é")


@pytest.mark.parametrize("pattern", ["[a-c]{3}/[0-9]+\\.x", "(yes|no)\n?", "[0-9]{4}-[0-9]?"])
def test_every_output_matches_its_expression(llm: LLM, pattern: str) -> None:
    grammar = regex_grammar(pattern)
    for output in outputs(llm, random_params(grammar, 6, logit_bias={0x78: 30.0})):
        assert re.fullmatch(pattern, output.text), output.text


def test_every_output_is_one_of_the_choices(llm: LLM) -> None:
    choices = ['say "so"', "1 2", "ünd"]
    grammar = choice_grammar(choices)
    assert {o.text for o in outputs(llm, random_params(grammar, 12))} <= set(choices)
    for choice in choices:
        first = {choice.encode()[0]: 100.0}
        (output,) = outputs(llm, random_params(grammar, 1, logit_bias=first))
        assert output.text == choice


def test_a_grammar_of_its_own_is_taken(llm: LLM) -> None:
    grammar = 'start: sum\nsum: NUMBER ("+" NUMBER)+\nNUMBER: /[0-9]{1,3}/'
    for output in outputs(llm, random_params(grammar, 4)):
        if output.finish_reason == "stop":
            assert re.fullmatch(r"\d{1,3}(\+\d{1,3})+", output.text)


@pytest.mark.product(2)
@pytest.mark.parametrize(
    "more",
    [{}, {"num_gpu_blocks_override": 12, "block_size": 8, "max_model_len": 88}],
    ids=["", "with preemption"],
)
def test_grammars_change_nothing_beside_them(llm: LLM, more: dict[str, Any]) -> None:
    own = LLM("abacus", device="cpu", optimization_level=0, dtype="float32", **more)
    wait_for_grammars(own)  # the number of preemptions is compared
    grammar = regex_grammar("[0-9]{60}")
    mixed = [
        GREEDY,
        *random_params(grammar, 3),
        GREEDY,
        SamplingParams(temperature=0.0, logprobs=1),
    ]
    found = outputs(own, mixed)
    assert [found[i].text for i in (0, 4, 5)] == ["95"] * 3
    assert all(re.fullmatch("[0-9]{60}", found[i].text) for i in (1, 2, 3))
    assert (own.report()["num_preemptions"] > 0) == bool(more)
    alone = outputs(llm, mixed[1:4])
    assert [o.text for o in alone] == [found[i].text for i in (1, 2, 3)]


def test_a_bias_forces_a_token_and_forbids_another(llm: LLM) -> None:
    seven, nine = ord("7"), ord("9")
    forced = SamplingParams(max_tokens=3, logit_bias={seven: 100.0}, ignore_eos=True, seed=1)
    banned = SamplingParams(temperature=0.0, logit_bias={nine: -100.0}, max_tokens=1)
    both = outputs(llm, [forced, GREEDY, banned])
    assert [o.text for o in both[:2]] == ["777", "95"]
    assert both[2].text not in ("9", "")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"grammar": "start: /(/"}, "grammar: .*regex"),
    ({"grammar": ""}, "grammar=''"),
    ({"grammar": "start: nothing"}, "grammar: "),
    ({"grammar": "start: " + '"a" ' * 100_000}, "expected 262144 at most"),
    ({"logit_bias": {1: float("nan")}}, "logit_bias="),
    ({"logit_bias": {-1: 1.0}}, "logit_bias="),
    ({"logit_bias": {10**6: 1.0}}, "logit_bias has 1000000"),
]


@pytest.mark.parametrize("given, message", BAD, ids=[each[1] for each in BAD])
def test_a_bad_form_is_refused_before_anything_runs(
    llm: LLM, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        llm.generate(PROMPT, SamplingParams(**given), use_tqdm=False)


@pytest.mark.parametrize("schema", ["{", "[]", {"type": "nothing"}, {"$ref": "http://a/b"}])
def test_a_bad_schema_is_refused(llm: LLM, schema: Any) -> None:
    with pytest.raises(UserError, match="grammar: "):
        llm.generate(PROMPT, SamplingParams(grammar=json_grammar(schema)), use_tqdm=False)


@pytest.mark.parametrize(
    "pattern", ["(a|b)*a(a|b){5000}", "((a{0,9999}){0,9999}){0,9999}", "(.*a.*){3000}"]
)
def test_a_grammar_that_explodes_harms_nobody_else(llm: LLM, pattern: str) -> None:
    params = SamplingParams(grammar=regex_grammar(pattern), max_tokens=6, seed=1)
    exploding, other = outputs(llm, [params, GREEDY])
    assert other.text == "95"
    if exploding.finish_reason == "error":
        assert exploding.error.startswith("the grammar has failed: ")
    else:
        assert set(exploding.text) <= set("ab") or "." in pattern


def test_a_grammar_that_compiles_for_long_holds_up_nobody(llm: LLM) -> None:
    core, slow = llm.engine.core, {"type": "integer", "multipleOf": 999_999}
    for name in ("slow", "slow too"):  # queued without the trial that refuses it
        params = SamplingParams(grammar=json_grammar(slow))
        core.add(AddRequest(name, [49, 43], params, max_total_tokens=8))
    with pytest.raises(UserError, match="in use"):
        core.add(AddRequest("slow", [49, 43], GREEDY, max_total_tokens=8))
    assert outputs(llm, [GREEDY, *random_params(regex_grammar("[0-9]{3}"), 1)])[0].text == "95"
    assert core.num_unfinished == 2 == core.stats().num_waiting
    core.abort(AbortRequests(["slow", "slow too"]))
    assert core.num_unfinished == 0


def test_an_output_goes_on_when_the_process_of_its_masks_has_ended(llm: LLM) -> None:
    params = random_params(regex_grammar("[0-9]{9}x?[a-c]{9}"), 3)
    undisturbed = [o.text for o in outputs(llm, params)]
    engine = llm.engine
    names = [engine.add_request(PROMPT, each) for each in params]
    found: dict[str, str] = {}
    while engine.has_unfinished():
        for output in engine.step():
            if len(output.outputs[0].token_ids) in (4, 11) and output.request_id == names[0]:
                process = engine.core._grammars.process._process
                process.kill()
                process.wait()
            found[output.request_id] = output.outputs[0].text
    assert [found[name] for name in names] == undisturbed


def test_a_schema_may_be_nested_deeply(llm: LLM) -> None:
    nested: dict[str, Any] = {}
    for _ in range(100):
        nested = {"type": "array", "items": nested}
    params = SamplingParams(grammar=json_grammar(nested), max_tokens=2, seed=1)
    assert outputs(llm, [params])[0].text.startswith(("[", " ", "\n", "\t"))
