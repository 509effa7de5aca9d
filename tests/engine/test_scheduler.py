"""The scheduler alone: what each step computes, and who has to wait."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from fusewright.config import NO_SLOT, UserError
from fusewright.engine.core.batch import ScheduledStep
from fusewright.engine.core.chunks import StepLimits
from fusewright.engine.core.kv_blocks import BlockPool
from fusewright.engine.core.request import Request, RequestStatus
from fusewright.engine.core.scheduler import Scheduler
from fusewright.engine.core.waiting import WaitingQueue
from fusewright.engine.messages.cache_group import CacheGroup
from fusewright.engine.messages.sampling_params import SamplingParams
from fusewright.engine.messages.step import StepResult

from ..effort import calls
from .toy import EOS, Setup, check_invariants, in_order

Shape = list[tuple[str, int, int]]


def request(name: str, num_prompt: int, max_tokens: int = 10) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=[7] * num_prompt,
        sampling_params=SamplingParams(max_tokens=max_tokens),
        max_total_tokens=num_prompt + max_tokens,
        eos_token_ids=frozenset({EOS}),
    )


def result(step: ScheduledStep, token: int = 7) -> StepResult:
    """The same token for every row."""
    return StepResult(np.full(len(step.scheduled), token, np.int32))


def shape(step: ScheduledStep | None) -> Shape:
    """(request, start, number of tokens) of every entry."""
    entries = [] if step is None else step.scheduled
    return [(e.request.request_id, e.start, e.num_tokens) for e in entries]


def run(scheduler: Scheduler, step: ScheduledStep | None, token: int = 7) -> None:
    assert step is not None
    scheduler.cache_blocks()
    scheduler.update(step, result(step, token))
    check_invariants(scheduler)


def test_decodes_come_first_and_the_rest_of_the_budget_prefills() -> None:
    scheduler = Setup(max_num_batched_tokens=16).scheduler()
    scheduler.add(request("a", 3))
    run(scheduler, scheduler.schedule())
    scheduler.add(request("b", 40))
    scheduler.add(request("c", 2))
    assert shape(scheduler.schedule()) == [("a", 3, 1), ("b", 0, 15)]
    assert shape(scheduler.schedule()) == [("a", 4, 1), ("b", 15, 15)]
    assert shape(scheduler.schedule()) == [("a", 5, 1), ("b", 30, 10), ("c", 0, 2)]
    assert shape(scheduler.schedule()) == [("a", 6, 1), ("b", 40, 1), ("c", 2, 1)]


def test_a_one_token_prompt_is_placed_among_the_decodes() -> None:
    scheduler = Setup().scheduler()
    scheduler.add(request("long", 5))
    scheduler.add(request("short", 1))
    assert shape(scheduler.schedule()) == [("short", 0, 1), ("long", 0, 5)]


def test_a_step_fills_up_to_max_num_seqs() -> None:
    scheduler = Setup(max_num_seqs=8, num_blocks=200, max_num_batched_tokens=64).scheduler()
    for i in range(20):
        scheduler.add(request(str(i), 4))
    assert [name for name, *_ in shape(scheduler.schedule())] == [str(i) for i in range(8)]
    assert len(scheduler.running) == 8 and len(scheduler.waiting) == 12


def test_the_next_step_uses_a_token_that_is_still_in_flight() -> None:
    scheduler = Setup().scheduler()
    scheduler.add(request("a", 3))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None and second is not None
    assert first.batch.feed_slots.tolist() == [NO_SLOT] * 3
    assert second.batch.feed_slots.tolist() == second.batch.slots.tolist()
    assert second.batch.query_len == 1 and first.batch.query_len == 3


def test_nothing_runs_beyond_max_tokens_counting_tokens_in_flight() -> None:
    scheduler = Setup().scheduler()
    scheduler.add(request("a", 3, max_tokens=2))
    batches = [scheduler.schedule() for _ in range(3)]
    assert [shape(b) for b in batches] == [[("a", 0, 3)], [("a", 3, 1)], []]
    run(scheduler, batches[0])
    assert scheduler.schedule() is None
    run(scheduler, batches[1])
    assert scheduler.num_unfinished == 0


def test_the_step_after_the_end_is_discarded() -> None:
    scheduler = Setup().scheduler()
    a = request("a", 3)
    scheduler.add(a)
    first, second = scheduler.schedule(), scheduler.schedule()
    run(scheduler, first, EOS)
    assert a.finish_reason == "stop" and a.stop_id == EOS
    assert scheduler.pool.num_free == scheduler.pool.num_blocks, "blocks return at once"
    run(scheduler, second)
    assert a.output_token_ids == [EOS]
    assert a.num_in_flight == 0


def preempting(num_steps: int) -> tuple[Scheduler, Request, Request, list[ScheduledStep | None]]:
    """Two requests of 4 + 10 tokens in 5 blocks of 4, scheduled without any result."""
    scheduler = Setup(num_blocks=5, block_size=4).scheduler()
    a, b = request("a", 4), request("b", 4)
    scheduler.add(a)
    scheduler.add(b)
    return scheduler, a, b, [scheduler.schedule() for _ in range(num_steps)]


def test_the_latest_arrival_is_preempted_and_comes_back_first() -> None:
    scheduler, a, b, batches = preempting(1)
    c = request("c", 1)
    scheduler.add(c)
    for _ in range(20):
        run(scheduler, batches[-1])
        batches.append(scheduler.schedule())
        if b.status is RequestStatus.PREEMPTED:
            break
    assert a.status is RequestStatus.RUNNING
    assert (
        scheduler.take_outputs(None).preempted == ["b"] and b.slot == -1 and b.blocks.tables == []
    )
    assert in_order(scheduler) == [b, c]
    while a.status is RequestStatus.RUNNING:
        run(scheduler, batches[-1])
        batches.append(scheduler.schedule())
    known = b.num_known_tokens
    assert ("b", 0, known) in shape(batches[-1]), "recomputed from prompt and outputs"


def test_a_preempted_request_keeps_its_token_in_flight_and_waits_for_it() -> None:
    scheduler, a, b, batches = preempting(1)
    while b.status is not RequestStatus.PREEMPTED:
        batches.append(scheduler.schedule())
    in_flight = b.num_in_flight
    assert in_flight > 0
    scheduler.abort("a")
    assert scheduler.pool.num_free == 5
    for batch in batches[:-1]:
        assert scheduler.schedule() is None, "b would be recomputed without the tokens in flight"
        run(scheduler, batch)
    assert len(b.output_token_ids) == in_flight
    assert shape(scheduler.schedule()) == [("b", 0, 4 + in_flight)]
    assert a.finish_reason == "abort"


def test_a_newcomer_leaves_a_block_to_each_running_request() -> None:
    scheduler = Setup(num_blocks=5, block_size=4, max_model_len=20).scheduler()
    scheduler.add(request("a", 4, max_tokens=2))
    scheduler.add(request("b", 16, max_tokens=1))
    assert shape(scheduler.schedule()) == [("a", 0, 4)], "b would take the block that a needs next"
    assert [each.request_id for each in scheduler.waiting] == ["b"]


def test_a_slot_goes_to_the_next_request() -> None:
    scheduler = Setup(max_num_seqs=1).scheduler()
    for name in "ab":
        scheduler.add(request(name, 3, max_tokens=1))
    first = scheduler.schedule()
    assert first is not None and [new.slot for new in first.batch.new] == [0]
    assert scheduler.schedule() is None
    run(scheduler, first)
    second = scheduler.schedule()
    assert second is not None and [new.slot for new in second.batch.new] == [0]
    assert shape(second) == [("b", 0, 3)] and second.scheduled[0].request.slot == 0


@pytest.mark.parametrize("started", [False, True])
def test_abort_frees_at_once(started: bool) -> None:
    scheduler = Setup().scheduler()
    a = request("a", 9)
    scheduler.add(a)
    if started:
        scheduler.schedule()
    scheduler.abort("a")
    assert a.finish_reason == "abort" and scheduler.num_unfinished == 0
    scheduler.abort("a")
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


def test_a_request_that_can_never_fit_is_refused() -> None:
    scheduler = Setup(num_blocks=5, block_size=4).scheduler()
    scheduler.add(request("fits", 11, max_tokens=10))
    with pytest.raises(UserError, match=r"KV cache too small.*11 prompt \+ 11 output.* 6 blocks"):
        scheduler.add(request("large", 11, max_tokens=11))


def test_a_waiting_crowd_costs_a_step_nothing() -> None:
    """A step looks at the first waiting request only, however many there are."""
    scheduler = Setup(max_num_seqs=1).scheduler()
    for i in range(1000):
        scheduler.add(request(str(i), 4))
    begun: list[str] = []

    class Counting(WaitingQueue):
        def first(self) -> Request | None:
            request = super().first()
            if request is not None:
                begun.append(request.request_id)
            return request

        def __iter__(self) -> Iterator[Request]:
            raise AssertionError("a step walks over everything that waits")

    scheduler.waiting.__class__ = Counting
    for _ in range(5):
        scheduler.schedule()
    assert set(begun) == {"0"}


def _effort_of_a_step(num_running: int, num_waiting: int) -> int:
    """Function calls of schedule() and update() with prefix caching on, in the cheapest of 40
    decode steps."""
    scheduler = Scheduler(
        BlockPool(60_000, 16),
        StepLimits(num_running, 8192, max_model_len=4096),
        prefix_caching=True,
    )
    for i in range(num_running + num_waiting):
        scheduler.add(request(str(i), 128, max_tokens=1000))
    batches: list[ScheduledStep | None] = [None]

    def step() -> None:
        batches.append(scheduler.schedule())
        if (before := batches.pop(0)) is not None:
            scheduler.update(before, result(before))

    for _ in range(20):
        step()
    assert len(scheduler.running) == num_running and len(scheduler.waiting) == num_waiting
    return min(calls(step) for _ in range(40))


def test_a_step_costs_the_same_whatever_waits() -> None:
    assert _effort_of_a_step(256, 10_000) == _effort_of_a_step(256, 10)


def test_a_step_takes_19_calls_for_each_request_that_runs() -> None:
    """About a microsecond; other versions of Python may count a few more."""
    few, many = (_effort_of_a_step(count, 0) for count in (64, 256))
    assert (many - few) / (256 - 64) < 25


def test_whole_prompts_need_a_budget_as_long_as_the_longest() -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens=16 < max_model_len=64"):
        Setup(enable_chunked_prefill=False).scheduler()


def test_a_result_of_another_size_is_refused() -> None:
    scheduler = Setup().scheduler()
    scheduler.add(request("a", 3))
    batch = scheduler.schedule()
    assert batch is not None
    with pytest.raises(RuntimeError, match="2 tokens for 1 requests"):
        scheduler.update(batch, StepResult(np.array([1, 2], np.int32)))


def test_blocks_are_allocated_once_and_freed_once() -> None:
    pool = BlockPool(num_blocks=4, block_size=16)
    taken = pool.allocate(3)
    assert len({*taken, *pool.allocate(1)}) == 4 and pool.num_free == 0
    pool.free(taken[:1])
    with pytest.raises(RuntimeError, match="not an allocated block"):
        pool.free(taken[:1])
    for invalid in (-1, 4):
        with pytest.raises(RuntimeError, match=rf"free\({invalid}\)"):
            pool.free([invalid])
    with pytest.raises(RuntimeError, match=r"allocate\(2\): 1 of 4"):
        pool.allocate(2)


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_num_blocks_rounds_up(num_tokens: int, blocks: int) -> None:
    assert CacheGroup().num_blocks(num_tokens, block_size=16) == blocks
