"""SamplingParams: vLLM's names, one line for a bad value."""

from __future__ import annotations

import math
from dataclasses import Field, fields
from typing import Any

import pytest

from fusewright.config import UserError
from fusewright.engine.messages.sampling_params import SamplingParams, StructuredOutputsParams

BAD = [
    ("n", 0, r"in \[1, 16384\]"),
    ("n", 10**9, r"in \[1, 16384\]"),
    ("n", True, "an integer"),
    ("temperature", -0.1, "at least 0"),
    ("temperature", math.nan, "a finite number"),
    ("temperature", "1", "a finite number"),
    ("top_p", 0.0, r"in \(0, 1\]"),
    ("top_p", 1.1, r"in \(0, 1\]"),
    ("top_k", -2, "at least 1, or 0 or -1 for off"),
    ("top_k", 1.5, "an integer"),
    ("min_p", -0.1, r"in \[0, 1\]"),
    ("seed", -2, "at least 0, or None or -1"),
    ("seed", 2**63, "an integer of 64 bits, or None"),
    ("top_k", 2**63, "an integer of 64 bits"),
    ("max_tokens", 2**63, "an integer of 64 bits, or None"),
    ("stop_token_ids", [2**63], "token ids of at least 0"),
    ("repetition_penalty", 0.0, "between 1e-20 and 1e20"),
    ("repetition_penalty", 1e-300, "between 1e-20 and 1e20"),
    ("temperature", 1e300, "a finite number of 32 bits"),
    ("presence_penalty", 2.1, r"in \[-2, 2\]"),
    ("frequency_penalty", -2.1, r"in \[-2, 2\]"),
    ("max_tokens", 0, "at least 1"),
    ("min_tokens", -1, r"in \[0, max_tokens=16\]"),
    ("min_tokens", 17, r"in \[0, max_tokens=16\]"),
    ("stop", ["a", ""], "strings that are not empty"),
    ("stop", [1], "strings that are not empty"),
    ("stop", 5, "text or a list of texts"),
    ("stop", 0, "text or a list of texts"),
    ("stop_token_ids", 5, "a list of token ids"),
    ("stop_token_ids", [-1], "token ids of at least 0"),
    ("stop_token_ids", ["a"], "token ids of at least 0"),
    ("ignore_eos", 1, "True or False"),
    ("logprobs", -2, "at least 0, -1 for all, or None"),
    ("logprobs", 2**31, "at least 0, -1 for all, or None"),
    ("prompt_logprobs", 1.0, "an integer of 64 bits, or None"),
    ("logit_bias", [1], "token ids with a number each, or None"),
    ("logit_bias", {-1: 1.0}, r"token ids with a number in \[-100, 100\] each"),
    ("logit_bias", {1: 101.0}, r"token ids with a number in \[-100, 100\] each"),
    ("logit_bias", dict.fromkeys(range(1025), 0.0), "1024 token ids at most"),
    ("grammar", "", "text that is not empty, or None"),
    ("bad_words", "text", "a list of texts"),
    ("bad_words", [" "], "texts that are not empty"),
    ("bad_words", ["a"] * 1025, "1024 texts at most"),
    ("skip_special_tokens", None, "True or False"),
    ("allowed_token_ids", [], "1 to 1048576 token ids"),
    ("allowed_token_ids", [-1], "token ids of at least 0"),
    ("truncate_prompt_tokens", 0, "at least 1, or -1 for all that fit"),
    ("output_kind", 1, "one of RequestOutputKind"),
    ("structured_outputs", {"regex": "a"}, "StructuredOutputsParams or None"),
]


@pytest.mark.parametrize(("name", "value", "expected"), BAD)
def test_a_bad_value_is_named_in_one_line(name: str, value: Any, expected: str) -> None:
    with pytest.raises(UserError, match=f"SamplingParams: {name}=.*expected {expected}") as error:
        SamplingParams(**{name: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("values", [{}, {"top_k": -1}, {"top_p": 1, "min_p": 1}, {"logprobs": 0}])
def test_limits_themselves_are_good(values: dict[str, Any]) -> None:
    SamplingParams(**values)


def test_values_are_normalized() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[3, 4], top_k=-1, seed=-1, max_tokens=None)
    assert params.stop_strings == ("end",) and params.stop_ids == (3, 4)
    assert params.top_k == 0 and params.seed is None
    assert SamplingParams(stop=None, stop_token_ids=None).stop_strings == ()


@pytest.mark.parametrize("field", fields(SamplingParams), ids=lambda field: field.name)
def test_every_field_is_checked(field: Field[Any]) -> None:
    with pytest.raises(UserError, match=f"SamplingParams: {field.name}=.*expected"):
        SamplingParams(**{field.name: object()})


def test_lists_may_be_any_iterable() -> None:
    params = SamplingParams(stop=iter(["a", "b"]), stop_token_ids=range(2))  # type: ignore[arg-type]
    assert params.stop_strings == ("a", "b") and params.stop_ids == (0, 1)
    with pytest.raises(UserError, match="stop="):
        SamplingParams(stop=iter(["a", ""]))  # type: ignore[arg-type]


def test_greedy_has_one_output() -> None:
    assert SamplingParams(temperature=0).greedy and not SamplingParams().greedy
    with pytest.raises(UserError, match="n=2: expected 1 with temperature=0"):
        SamplingParams(n=2, temperature=0)


def test_children_have_seeds_of_their_own() -> None:
    params = SamplingParams(n=3, seed=7)
    assert [params.of_child(i).seed for i in range(3)] == [7, 8, 9]
    assert {params.of_child(i).n for i in range(3)} == {1}
    last = SamplingParams(n=2, seed=2**63 - 1)
    assert [last.of_child(i).seed for i in range(2)] == [2**63 - 1, 0]


def test_fields_may_be_assigned_and_are_checked_when_used() -> None:
    params = SamplingParams(temperature=0.0)
    assert params.plain_greedy
    copy = params.clone()
    params.temperature, params.n, params.stop = 1.0, 2, "end"
    changed = params.clone()
    assert not changed.plain_greedy and (changed.n, changed.stop) == (2, ("end",))
    assert copy == SamplingParams(temperature=0.0), "a copy does not follow"
    params.top_p = 2.0
    with pytest.raises(UserError, match=r"top_p=2.0: expected in \(0, 1\]"):
        params.clone()
    with pytest.raises(UserError, match="unknown field 'max_token': did you mean max_tokens"):
        params.max_token = 1  # type: ignore[attr-defined]


def test_fields_of_vllms_that_are_not_here_say_what_is_instead() -> None:
    form = StructuredOutputsParams(choice=["a", "b"])
    given: dict[str, Any] = {"best_of": 1, "logits_processors": None, "guided_decoding": form}
    assert SamplingParams(**given) == SamplingParams(structured_outputs=form)
    for name, value, message in (
        ("logits_processors", [print], r"logits_processors=.*: sampling runs on the device"),
        ("temprature", 1.0, "unknown field 'temprature': did you mean temperature"),
        ("temp", 1.0, "unknown field 'temp': did you mean temperature"),
        ("rep", 1.0, "unknown field 'rep': did you mean repetition_penalty"),
        ("zz", 1.0, "unknown field 'zz': known: n, "),
    ):
        bad: dict[str, Any] = {name: value}
        with pytest.raises(UserError, match=message):
            SamplingParams(**bad)


def test_contradicting_fields_are_refused() -> None:
    with pytest.raises(UserError, match=r"stop=.*detokenize=False"):
        SamplingParams(stop="a", detokenize=False)
    with pytest.raises(UserError, match=r"grammar=.*beside structured_outputs"):
        SamplingParams(grammar="g", structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(UserError, match="2 forms are given; expected one of json, regex"):
        StructuredOutputsParams(regex="a", choice=["b"])
