"""Steps of decodes and prompts stay below a bound that is predicted from steps that were timed."""

from __future__ import annotations

import itertools
import random
from functools import cache
from math import inf

import numpy as np
import pytest

from fusewright.bench.workloads import Work, arrivals, mix
from fusewright.config import EngineOptions, UserError
from fusewright.config.check import check_options
from fusewright.engine.core.step_times import StepTimes

from .virtual_gpu import Simulated, simulate, step_ms


def seconds(num_decodes: int, prompt_tokens: int, context: int) -> float:
    """A device that reads weights, multiplies from 190 tokens on, and reads the context."""
    tokens = num_decodes + prompt_tokens
    return max(4e-3, tokens * 2.1e-5) + context * 3e-8


def learned(seed: int = 0, count: int = 3000, noise: float = 0.05) -> StepTimes:
    draw, times = random.Random(seed), StepTimes()
    for number in range(count):
        decodes = int(2 ** draw.uniform(0, 8))
        context = decodes * int(2 ** draw.uniform(6, 11))
        prompt = int(2 ** draw.uniform(4, 10)) if number % 3 else 0
        took = seconds(decodes, prompt, context + prompt) * draw.uniform(1 - noise, 1 + noise)
        times.add(decodes, prompt, context + prompt, took)
    return times


def test_nothing_is_predicted_before_a_step_was_timed() -> None:
    times = StepTimes()
    assert times.predict(4, 100, 1000) is None
    assert times.most_tokens(4, 1000, 0.01, 8192) == 256, "to begin with"
    assert times.most_tokens(4, 1000, 0.01, 100) == 100
    times.add(4, 0, 1000, 0.004)
    assert times.predict(4, 100, 1000) is None, "what a prompt adds is not known"


def test_predictions_are_near_what_steps_take() -> None:
    times = learned()
    errors = []
    for decodes, prompt, each in itertools.product((2, 20, 150), (64, 200, 700), (100, 1000)):
        context = decodes * each
        want, said = seconds(decodes, prompt, context), times.predict(decodes, prompt, context)
        assert said is not None
        errors.append(said / want - 1)
    assert max(map(abs, errors)) < 0.35 and abs(float(np.median(errors))) < 0.1, errors


@pytest.mark.parametrize("seed", range(3))
def test_a_prediction_does_not_fall_as_a_step_grows(seed: int) -> None:
    """Also where times are noise."""
    times, draw = learned(seed, 200, noise=0.9), random.Random(seed)
    for _ in range(300):
        sizes = [draw.randrange(1, 300), draw.randrange(1, 2000), draw.randrange(1, 300_000)]
        before = times.predict(*sizes)
        for axis in range(3):
            larger = [size + (at == axis) * draw.randrange(1, size + 2)
                      for at, size in enumerate(sizes)]  # fmt: skip
            after = times.predict(*larger)
            assert before is not None and after is not None and after >= before, (sizes, larger)


def test_the_largest_chunk_that_fits_is_chosen() -> None:
    times = learned(noise=0.0)
    for decodes, each, bound in itertools.product((4, 60), (200, 1000), (6e-3, 10e-3, 20e-3)):
        context = decodes * each
        most = times.most_tokens(decodes, context, bound, 8192)
        assert seconds(decodes, most, context + most) < 1.15 * bound
        assert most == 16 or seconds(decodes, most, context + most) > 0.6 * bound


def test_a_chunk_is_twice_the_largest_that_was_timed_at_most() -> None:
    times = StepTimes()
    times.add(4, 0, 1000, 0.004)
    for _ in range(5):
        times.add(4, 256, 1256, 0.004)
    assert times.most_tokens(4, 1000, 1.0, 8192) == 512


@pytest.mark.parametrize("at", [0, 1, 10])
def test_a_step_that_captured_a_graph_is_forgotten(at: int) -> None:
    times = StepTimes()
    for number in range(25):
        times.add(4, 0, 1000, 2.0 if number == at else 0.004)
        times.add(4, 256, 1256, 2.0 if number == at else 0.007)
    said = times.predict(4, 256, 1256)
    assert said is not None and said == pytest.approx(0.007, rel=0.1)


def test_a_device_that_slows_down_is_noticed() -> None:
    times = learned(noise=0.0)
    before = times.most_tokens(20, 4000, 0.012, 8192)
    for _ in range(40):
        times.add(20, 0, 4000, 0.008)
    after = times.most_tokens(20, 4000, 0.012, 8192)
    assert 16 < after < 0.7 * before


# Loads by the times of Llama-3-8B on an H200


@cache
def load(dataset: str, rate: float, max_step_ms: float, max_num_mixed_tokens: int = 0) -> Simulated:
    works = mix(dataset, 250, 1000)
    times = arrivals(len(works), rate, 1.0)
    return simulate(works, times, max_num_mixed_tokens, max_step_ms)


def longest(simulated: Simulated) -> float:
    return float(np.percentile(simulated.gaps, 99))


@pytest.mark.parametrize("bound", [8.0, 12.0, 20.0])
def test_gaps_stay_below_the_bound_at_the_same_throughput(bound: float) -> None:
    free, bounded = load("prefill-heavy", 40, 0), load("prefill-heavy", 40, bound)
    assert longest(free) > 1.5 * bound
    assert longest(bounded) <= 1.05 * bound
    assert bounded.seconds <= 1.01 * free.seconds
    tokens = [sum(step) for step in bounded.steps if all(step)]
    assert np.percentile([step_ms(size) for size in tokens], 90) > 0.9 * bound, "it is used"


def test_small_chunks_of_a_server_stay_where_the_bound_is_larger() -> None:
    small, both = load("chat", 20, 0, 256), load("chat", 20, 12, 256)
    assert both.steps == small.steps


def test_a_bound_holds_while_much_waits_too() -> None:
    assert longest(load("prefill-heavy", inf, 0, 256)) > 100
    assert longest(load("prefill-heavy", inf, 12, 256)) <= 1.05 * 12


def test_a_prompt_by_itself_is_as_fast_as_without_a_bound() -> None:
    long = [Work([7] * 2000, 4)]
    bounded, free = (simulate(long, [0.0], 0, bound) for bound in (5.0, 0.0))
    assert bounded.ttft == free.ttft and bounded.steps == free.steps


def test_prompts_go_on_where_decodes_alone_take_as_long_as_the_bound() -> None:
    works = [Work([7] * 60, 200)] * 20 + [Work([7] * 400, 2)]
    slow = simulate(works, [0.0] * 20 + [0.1], 0, 1.0)
    beside = [prompt for decodes, prompt in slow.steps if decodes and prompt]
    assert beside == [16] * (400 // 16) and len(slow.ttft) == 21


def test_the_same_times_are_followed_by_the_same_steps() -> None:
    assert load("chat", 40, 12).steps == load.__wrapped__("chat", 40, 12).steps


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_step_ms": -1.0}, "max_step_ms=-1.0: expected 0 \\(no bound\\) or a number of mill"),
        ({"max_step_ms": float("nan")}, "max_step_ms=nan: expected 0"),
        (
            {"max_step_ms": 5.0, "enable_chunked_prefill": False},
            "max_step_ms=5.0 splits prompts, which enable_chunked_prefill=False forbids",
        ),
    ],
)
def test_a_bound_that_cannot_be_kept_is_refused(options: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_options(EngineOptions(**options))  # type: ignore[arg-type]
