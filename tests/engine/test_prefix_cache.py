"""Requests that begin alike share blocks: what is computed, what is cached, who may share."""

from __future__ import annotations

from fusewright.engine.core.kv_blocks import BlockPool
from fusewright.engine.core.request import Request, RequestStatus
from fusewright.engine.core.scheduler import Scheduler
from fusewright.engine.messages.sampling_params import SamplingParams

from .test_scheduler import run, shape
from .toy import EOS, Setup, check_invariants

SETUP = Setup(num_blocks=12, block_size=4, max_num_batched_tokens=64, prefix_caching=True)


def request(
    name: str,
    prompt: list[int],
    max_tokens: int = 3,
    salt: str | None = None,
    priority: int = 0,
) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=max_tokens),
        max_total_tokens=len(prompt) + max_tokens,
        eos_token_ids=frozenset({EOS}),
        cache_salt=salt,
        priority=priority,
    )


def finish(scheduler: Scheduler) -> None:
    while scheduler.num_unfinished:
        run(scheduler, scheduler.schedule())


def test_a_prompt_starts_behind_the_full_blocks_that_another_computed() -> None:
    scheduler = SETUP.scheduler()
    scheduler.add(request("a", [*range(10)]))
    finish(scheduler)
    b = request("b", [*range(9), 99])
    scheduler.add(b)
    assert shape(scheduler.schedule()) == [("b", 8, 2)]
    assert (b.num_cached_blocks, scheduler.num_prefix_hits) == (2, 8)
    check_invariants(scheduler)


def test_outputs_are_shared_too_and_the_last_token_is_always_computed() -> None:
    scheduler = SETUP.scheduler()
    scheduler.add(request("a", [1, 2, 3], max_tokens=6))
    finish(scheduler)
    scheduler.add(request("b", [1, 2, 3, 7, 7, 7, 7, 7]))  # all of it is there, in two blocks
    assert shape(scheduler.schedule()) == [("b", 4, 4)]


def test_equal_prompts_of_one_step_share_blocks_that_this_step_fills() -> None:
    scheduler = SETUP.scheduler()
    for name in "ab":
        scheduler.add(request(name, [*range(9)]))
    assert shape(scheduler.schedule()) == [("b", 8, 1), ("a", 0, 9)]
    a, b = scheduler.running["a"], scheduler.running["b"]
    (of_a,), (of_b,) = a.blocks.tables, b.blocks.tables
    assert of_a[:2] == of_b[:2]
    assert of_a[2] != of_b[2]
    check_invariants(scheduler)


def test_what_nobody_asks_for_is_hashed_after_the_launch() -> None:
    """A lone prompt waits for one key, and for no block to be cached."""
    scheduler = SETUP.scheduler()
    a = request("a", [*range(17)])
    scheduler.add(a)
    step = scheduler.schedule()
    assert len(a.block_keys) == 1 and scheduler.pool.num_cached == 0
    scheduler.cache_blocks()
    assert len(a.block_keys) == scheduler.pool.num_cached == 4
    run(scheduler, step)
    check_invariants(scheduler)


def test_another_salt_shares_nothing() -> None:
    scheduler = SETUP.scheduler()
    scheduler.add(request("a", [*range(9)], salt="x"))
    finish(scheduler)
    for name, salt, start in (("b", None, 0), ("c", "y", 0), ("d", "x", 8)):
        scheduler.add(request(name, [*range(9)], salt=salt))
        batch = scheduler.schedule()
        assert shape(batch) == [(name, start, 9 - start)]
        run(scheduler, batch)
        finish(scheduler)


def test_an_equal_block_behind_another_prefix_is_not_shared() -> None:
    scheduler = SETUP.scheduler()
    scheduler.add(request("a", [1, 1, 1, 1, 5, 5, 5, 5, 9]))
    finish(scheduler)
    scheduler.add(request("b", [2, 2, 2, 2, 5, 5, 5, 5, 9]))
    assert shape(scheduler.schedule()) == [("b", 0, 9)]


def test_the_prefix_freed_longest_ago_gives_way_and_its_beginning_last() -> None:
    scheduler = Setup(num_blocks=6, block_size=4, prefix_caching=True).scheduler()
    scheduler.add(request("old", [1] * 12, max_tokens=1))  # 3 full blocks, cached
    finish(scheduler)
    scheduler.add(request("new", [2] * 8, max_tokens=1))
    finish(scheduler)
    assert scheduler.pool.num_cached == 5
    scheduler.add(request("large", [3] * 11, max_tokens=1))  # 1 empty block, 2 of the oldest
    finish(scheduler)
    scheduler.add(request("old again", [1] * 12, max_tokens=1))
    assert shape(scheduler.schedule()) == [("old again", 4, 8)]
    scheduler.cache_blocks()
    check_invariants(scheduler)


def test_a_preempted_request_comes_back_to_its_blocks() -> None:
    scheduler = Setup(num_blocks=6, block_size=4, prefix_caching=True).scheduler()
    a, b = request("a", [1] * 8, max_tokens=12), request("b", [2] * 8, max_tokens=12)
    for r in (a, b):
        scheduler.add(r)
    while b.status is not RequestStatus.PREEMPTED:
        run(scheduler, scheduler.schedule())
    scheduler.abort("a")
    batch = scheduler.schedule()
    assert batch is not None
    assert batch.scheduled[0].start >= 4, "its first block was not handed out meanwhile"
    scheduler.cache_blocks()
    check_invariants(scheduler)


def test_an_admission_counts_idle_shared_blocks_as_taken() -> None:
    scheduler = Setup(
        num_blocks=5, block_size=4, max_num_batched_tokens=64, prefix_caching=True
    ).scheduler()
    scheduler.add(request("a", [1] * 9, max_tokens=1))
    finish(scheduler)
    scheduler.add(request("hold", [9], max_tokens=3))
    scheduler.add(request("b", [1] * 17, max_tokens=3))  # shares 2, needs 3 of the 2 others
    batch = scheduler.schedule()
    assert shape(batch) == [("hold", 0, 1)]
    run(scheduler, batch)
    finish(scheduler)


def test_nothing_is_found_after_forget_all() -> None:
    scheduler = SETUP.scheduler()
    scheduler.add(request("a", [*range(9)]))
    finish(scheduler)
    scheduler.pool.forget_all()
    scheduler.add(request("b", [*range(9)]))
    assert shape(scheduler.schedule()) == [("b", 0, 9)]


def test_without_prefix_caching_nothing_is_cached() -> None:
    scheduler = Setup(num_blocks=12, block_size=4).scheduler()
    for name in "ab":
        scheduler.add(request(name, [*range(9)]))
        run(scheduler, batch := scheduler.schedule())
        assert (name, 0, 9) in shape(batch)
    finish(scheduler)
    assert (scheduler.pool.num_cached, scheduler.num_prefix_tokens) == (0, 0)


def test_a_lower_priority_number_runs_first_and_is_preempted_last() -> None:
    scheduler = Setup(
        num_blocks=6, block_size=4, max_num_seqs=2, max_num_batched_tokens=64, heed_priority=True
    ).scheduler()
    late, urgent, usual = (
        request("late", [1] * 4, 12, priority=5),
        request("urgent", [2] * 4, 12, priority=-1),
        request("usual", [3] * 4, 12),
    )
    for r in (late, urgent, usual):
        scheduler.add(r)
    batch = scheduler.schedule()
    assert [name for name, *_ in shape(batch)] == ["urgent", "usual"]
    while usual.status is RequestStatus.RUNNING:
        run(scheduler, batch)
        batch = scheduler.schedule()
    assert urgent.status is RequestStatus.RUNNING and usual.status is RequestStatus.PREEMPTED
    assert scheduler.take_outputs(None).preempted == ["usual"]


def test_arrival_decides_where_priorities_are_not_heeded() -> None:
    scheduler = Setup(max_num_seqs=1).scheduler()
    scheduler.add(request("a", [1], priority=5))
    scheduler.add(request("b", [1], priority=0))
    assert [name for name, *_ in shape(scheduler.schedule())] == ["a"]


def test_a_long_prompt_leaves_room_in_every_step_for_others() -> None:
    scheduler = Setup(
        max_num_batched_tokens=16, num_blocks=64, long_prefill_token_threshold=6
    ).scheduler()
    scheduler.add(request("long", [1] * 30))
    scheduler.add(request("short", [2] * 5))
    assert shape(scheduler.schedule()) == [("long", 0, 6), ("short", 0, 5)]
    assert shape(scheduler.schedule()) == [("short", 5, 1), ("long", 6, 6)]


def test_a_key_that_is_cached_already_is_not_cached_twice() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    first, second = pool.allocate(2)
    pool.cache(first, b"key")
    pool.cache(second, b"key")
    assert pool.find([b"key", b"other"]).held() == [first]
    pool.free([second, first])
    pool.share(pool.find([b"key"]).held())
    assert (pool.ref_count(first), pool.num_free) == (1, 2)
