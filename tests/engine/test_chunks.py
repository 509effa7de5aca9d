"""How prompts are split beside decodes: the scheduler alone, and a chat load by a virtual clock."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf

import numpy as np

from fusewright.bench.workloads import Work, arrivals, mix
from fusewright.engine.core.scheduler import Scheduler

from .test_scheduler import request, run, shape
from .toy import Setup
from .virtual_gpu import Simulated, simulate

SETUP = Setup(
    num_blocks=4000,
    max_num_seqs=64,
    max_num_batched_tokens=400,
    max_model_len=4000,
    max_num_mixed_tokens=16,
)


def decoding() -> Scheduler:
    """A scheduler with a request "a" whose prompt of 3 tokens has been computed."""
    scheduler = SETUP.scheduler()
    scheduler.add(request("a", 3))
    run(scheduler, scheduler.schedule())
    return scheduler


def test_a_prompt_by_itself_has_the_whole_step() -> None:
    scheduler = SETUP.scheduler()
    scheduler.add(request("a", 900))
    sizes = [shape(scheduler.schedule()) for _ in range(4)]
    assert sizes == [[("a", 0, 400)], [("a", 400, 400)], [("a", 800, 100)], [("a", 900, 1)]]


def test_a_prompt_beside_decodes_fills_a_small_step() -> None:
    scheduler = decoding()
    scheduler.add(request("b", 40))
    assert shape(scheduler.schedule()) == [("a", 3, 1), ("b", 0, 15)]
    assert shape(scheduler.schedule()) == [("a", 4, 1), ("b", 15, 15)]
    assert shape(scheduler.schedule()) == [("a", 5, 1), ("b", 30, 10)]


def test_what_a_small_step_has_left_goes_to_the_next_prompt() -> None:
    scheduler = decoding()
    for name in "bc":
        scheduler.add(request(name, 10))
    assert shape(scheduler.schedule()) == [("a", 3, 1), ("b", 0, 10), ("c", 0, 5)]
    assert shape(scheduler.schedule()) == [("a", 4, 1), ("b", 10, 1), ("c", 5, 5)]


def test_many_decodes_let_in_as_many_prompt_tokens() -> None:
    scheduler = SETUP.scheduler()
    for number in range(30):
        scheduler.add(request(str(number), 4))
    run(scheduler, scheduler.schedule())
    scheduler.add(request("long", 100))
    step = scheduler.schedule()
    assert step is not None and step.batch.num_tokens == 60
    assert shape(step)[-1] == ("long", 0, 30)


def test_chunks_grow_with_what_waits() -> None:
    scheduler = decoding()
    scheduler.add(request("b", 160))
    scheduler.add(request("c", 160))
    assert shape(scheduler.schedule()) == [("a", 3, 1), ("b", 0, 40)], "an eighth of 320"
    assert shape(scheduler.schedule()) == [("a", 4, 1), ("b", 40, 35)], "an eighth of 280"


def test_what_fills_a_step_has_all_of_it() -> None:
    scheduler = decoding()
    for name in "bc":
        scheduler.add(request(name, 300))
    assert shape(scheduler.schedule()) == [("a", 3, 1), ("b", 0, 300), ("c", 0, 99)]
    assert shape(scheduler.schedule()) == [("a", 4, 1), ("b", 300, 1), ("c", 99, 25)]


def test_an_aborted_prompt_waits_no_more() -> None:
    scheduler = decoding()
    for name in "bc":
        scheduler.add(request(name, 240))
    scheduler.abort("b")
    assert shape(scheduler.schedule()) == [("a", 3, 1), ("c", 0, 30)]
    scheduler.abort("c")
    scheduler.add(request("d", 40))
    assert shape(scheduler.schedule()) == [("a", 4, 1), ("d", 0, 15)]


def test_requests_that_have_their_last_token_in_flight_hold_up_no_prompt() -> None:
    scheduler = SETUP.scheduler()
    scheduler.add(request("a", 3, max_tokens=1))
    scheduler.schedule()
    scheduler.add(request("b", 300))
    assert shape(scheduler.schedule()) == [("b", 0, 300)]


def test_an_urgent_prompt_leaves_decodes_their_tokens() -> None:
    scheduler = replace(SETUP, heed_priority=True).scheduler()
    for number in range(7):
        scheduler.add(request(str(number), 4))
    run(scheduler, scheduler.schedule())
    urgent = request("urgent", 70)
    urgent.priority = -1
    scheduler.add(urgent)
    for start in (0, 9):
        step = scheduler.schedule()
        assert step is not None and len(step.scheduled) == 8
        assert shape(step)[-1] == ("urgent", start, 9)


# A chat load, by the times of Llama-3-8B on an H200


@cache
def chat(rate: float, max_num_mixed_tokens: int) -> Simulated:
    works = mix("chat", 500, 1000)
    return simulate(works, arrivals(len(works), rate, 1.0), max_num_mixed_tokens)


def percentile(values: list[float] | list[int], p: float) -> float:
    return float(np.percentile(values, p))


def test_gaps_at_20_requests_a_second_are_at_most_twice_the_median() -> None:
    limited, free = chat(20, 256), chat(20, 0)
    assert percentile(limited.mixed, 99) <= 256 < percentile(free.mixed, 90)
    assert percentile(limited.gaps, 99) <= 2 * percentile(limited.gaps, 50)
    assert percentile(free.gaps, 99) > 2 * percentile(free.gaps, 50)
    assert percentile(limited.ttft, 50) <= 1.02 * percentile(free.ttft, 50)
    assert percentile(limited.ttft, 99) <= 2 * percentile(free.ttft, 99)


def test_requests_at_once_take_as_long_as_without_a_limit() -> None:
    limited, free = chat(inf, 256), chat(inf, 0)
    assert limited.seconds <= 1.005 * free.seconds
    assert max(limited.mixed) == 8192, "much waits: the chunks are large"


def test_a_lone_long_prompt_is_as_fast_as_without_a_limit() -> None:
    long = [Work([7] * 2000, 4)]
    limited, free = (simulate(long, [0.0], most) for most in (256, 0))
    assert limited.ttft == free.ttft and limited.steps == free.steps


def test_the_same_arrivals_are_split_alike() -> None:
    works = mix("chat", 100, 1000)
    times = arrivals(len(works), 20, 1.0)
    assert simulate(works, times, 256).steps == simulate(works, times, 256).steps
