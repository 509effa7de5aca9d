"""Claims about drafts from outputs of requests that have ended: they change no output, are right
more often where outputs repeat, and pass between requests of the same salt alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusewright import LLM, SamplingParams
from fusewright.config.speculative import SpeculativeConfig, read_speculative
from fusewright.engine.core.prefix_cache import salt_of
from fusewright.engine.frontend.outputs import RequestOutput
from fusewright.engine.messages.step import EndedOutput
from fusewright.engine.worker.drafts.ring import OutputRing

from .test_speculative import OPTIONS, check, generate

SUFFIX = {"method": "suffix", "num_speculative_tokens": 4, "adaptive": False}


NAMES = ("on and on", "sampled", "stop text", "several", "form")


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    """The answers without drafts."""
    return generate(LLM("abacus", **OPTIONS), NAMES)


SMALL = {"suffix_cached_tokens": 150, "suffix_decoding_max_tree_depth": 3, "prompt_lookup_min": 1}


@pytest.mark.product
@pytest.mark.parametrize(("more", "gain"), [({}, 2.0), (SMALL, 0.8)], ids=str)
def test_outputs_are_those_without_drafts(
    more: dict[str, Any], gain: float, expected: list[RequestOutput]
) -> None:
    """The second time most outputs are in the ring, unless it is too small for them."""
    llm = LLM("abacus", **OPTIONS, speculative_config=SUFFIX | more)
    once = check(llm, generate(llm, NAMES), expected)["accepted"]
    twice = check(llm, generate(llm, NAMES), expected)["accepted"] - once
    assert twice > gain * once


def accepted(llm: LLM, salt: str | None) -> int:
    """How many drafts of the same requests are right."""
    before = llm.report()["drafts"]["accepted"]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    prompts: list[Any] = [
        {"prompt": f"sort {a} {b} 9 {a + 1} 3="} | ({"cache_salt": salt} if salt else {})
        for a in (1, 2)
        for b in (2, 3)
    ]
    llm.generate(prompts, params, use_tqdm=False)
    return int(llm.report()["drafts"]["accepted"] - before)


def test_outputs_help_only_requests_of_the_same_salt() -> None:
    llm = LLM("abacus", **OPTIONS, speculative_config=SUFFIX)
    first, again = accepted(llm, "a"), accepted(llm, "a")
    assert again > 3 * first
    assert accepted(llm, "b") == accepted(llm, None) == first
    assert accepted(llm, "b") == accepted(llm, None) == again


def test_a_ring_has_the_newest_outputs_in_order() -> None:
    torch.manual_seed(0)
    ring, kept = OutputRing(None, 12, 3, torch.device("cpu")), [(-1, 0)] * 12
    for number in range(30):
        tokens = torch.randint(0, 9, (int(torch.randint(1, 15, ())),)).tolist()
        outputs = [EndedOutput(number % 3, tokens)] * (number % 3)
        ring.remember(outputs, lambda values, dtype: torch.as_tensor(values, dtype=dtype))
        for each in outputs:
            kept += [(token, each.salt) for token in [*each.token_ids[-11:], -1]]
        head = int(ring._head)
        for state, values in (
            (ring._tokens, [t for t, _ in kept]),
            (ring._owners, [s for _, s in kept]),
        ):
            assert state.roll(-head).tolist() == values[-12:]


def test_salts_are_numbers_of_their_own() -> None:
    numbers = {salt_of(salt) for salt in (None, "a", "b", "A", "a" * 1000)}
    assert len(numbers) == 5 and all(0 <= number < 1 << 63 for number in numbers)
    assert salt_of(None) == salt_of("") == 0


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ('{"method": "suffix"}', {"num_speculative_tokens": 8, "prompt_lookup_max": 24}),
        (
            '{"method": "suffix", "suffix_decoding_max_tree_depth": 2}',
            {"prompt_lookup_max": 2, "prompt_lookup_min": 2, "suffix_cached_tokens": 1 << 17},
        ),
        (
            '{"method": "suffix", "suffix_decoding_max_cached_requests": 0}',
            {"suffix_cached_tokens": 0},
        ),
        (
            '{"method": "suffix", "suffix_decoding_max_cached_requests": 9}',
            {"suffix_cached_tokens": 1 << 17, "prompt_lookup_min": 3},
        ),
    ],
)
def test_vllms_names_are_read(text: str, fields: dict[str, int]) -> None:
    config = read_speculative(text)
    assert isinstance(config, SpeculativeConfig)
    assert {name: getattr(config, name) for name in fields} == fields
