"""Claims about who is next: the outputs of a call take turns with other requests, a small call is
first come, first served, and a lone request starts at once."""

from __future__ import annotations

import pytest

from fusewright.engine.core.loop import EngineCore
from fusewright.engine.core.request import Request
from fusewright.engine.core.waiting import WaitingQueue
from fusewright.engine.messages.sampling_params import SamplingParams

from .test_many_outputs import MANY, asked
from .toy import Setup, check_invariants


def waiting(name: str, n: int = 1, priority: int = 0, call: str = "") -> Request:
    return Request(name, [7] * 4, SamplingParams(n=n), 10, priority=priority, call=call)


def taken(queue: WaitingQueue, count: int) -> list[Request]:
    requests = []
    for _ in range(count):
        request = queue.first()
        assert request is not None and queue.first() is request
        queue.take(request)
        requests.append(request)
    return requests


def taken_names(queue: WaitingQueue, count: int) -> list[str]:
    return [each.request_id for each in taken(queue, count)]


IN_ORDER = ["a", "b#0", "b#1", "b#2", "c", "d"]


@pytest.mark.parametrize(
    ("share", "order"),
    [
        (8, IN_ORDER),
        (3, IN_ORDER),
        (2, ["a", "b#0", "b#1", "c", "d", "b#2"]),
        (1, ["a", "b#0", "c", "d", "b#1", "b#2"]),
    ],
)
def test_outputs_beyond_the_share_of_their_request_begin_behind_others(
    share: int, order: list[str]
) -> None:
    queue = WaitingQueue(heed_priority=False, share=share)
    for request in (waiting("a"), waiting("b", n=3), waiting("c"), waiting("d")):
        queue.add(request)
    assert (len(queue), queue.num_tokens) == (6, 24)
    assert "b" in queue and "b#2" in queue and "b#3" not in queue and "e" not in queue
    requests = taken(queue, 6)
    assert [each.request_id for each in requests] == order
    # Its noise is what it would be in another order.
    assert [each.request_id for each in sorted(requests, key=lambda r: r.arrival)] == IN_ORDER
    assert (len(queue), queue.num_tokens, queue.first()) == (0, 0, None)


def test_prompts_of_a_call_wait_as_one() -> None:
    queue = WaitingQueue(heed_priority=False, share=2)
    for number in range(3):
        queue.add(waiting(f"a{number}", n=1 + number % 2, call="a"))
    queue.add(waiting("b"))
    assert taken_names(queue, 3) == ["a0", "a1#0", "b"]
    queue.add(waiting("c"))
    assert taken_names(queue, 1) == ["c"]
    for request in queue.find("a1"):
        queue.leave(request)
    queue.add(waiting("d"))
    assert taken_names(queue, 2) == ["a2", "d"] and queue.first() is None


def test_priority_is_heeded_between_the_outputs_of_others() -> None:
    queue = WaitingQueue(heed_priority=True, share=8)
    queue.add(waiting("low", n=3, priority=1))
    assert taken_names(queue, 1) == ["low#0"]
    queue.add(waiting("high", n=2, priority=-1))
    assert taken_names(queue, 4) == ["high#0", "high#1", "low#1", "low#2"]


def test_a_preempted_output_comes_back_before_its_siblings() -> None:
    queue = WaitingQueue(heed_priority=False, share=8)
    queue.add(waiting("a", n=4))
    request = queue.first()
    assert request is not None
    queue.take(request)
    queue.put(request)
    assert taken_names(queue, 2) == ["a#0", "a#1"]


def test_seeds_of_outputs_differ_and_the_first_alone_has_its_prompt_scored() -> None:
    params = SamplingParams(n=3, seed=5, prompt_logprobs=1)
    queue = WaitingQueue(heed_priority=False, share=8)
    queue.add(Request("a", [1], params, 4))
    requests = []
    while (request := queue.first()) is not None:
        queue.take(request)
        requests.append(request)
    assert [each.sampling_params for each in requests] == [params.of_child(i) for i in range(3)]


def test_abandoned_requests_leave_nothing_in_the_queue() -> None:
    """Also while what is before them cannot run, so that no entry comes up."""
    queue = WaitingQueue(heed_priority=False, share=8)
    queue.add(waiting("first"))
    for number in range(2000):
        queue.add(waiting(str(number), n=1 + number % 2))
        for request in queue.find(str(number)):
            queue.remove(request)
    assert len(queue) == 1 and len(queue._line) < 200
    assert not queue._several and not queue._calls
    assert taken_names(queue, 1) == ["first"]


def steps_until_it_starts(core: EngineCore, name: str, most: int) -> int:
    for number in range(1, most + 1):
        outputs = core.step()
        check_invariants(core.scheduler)
        if name in outputs.started:
            return number
    raise AssertionError(f"{name} has not started in {most} steps")


@pytest.mark.parametrize("num_prompts", [1, 40])
def test_a_lone_request_starts_at_once_beside_one_of_many_outputs(num_prompts: int) -> None:
    """Also where these are long, hold all places and nearly all memory."""
    setup = Setup(max_num_seqs=16, num_blocks=50, max_num_batched_tokens=64)
    core = EngineCore(setup.scheduler(), setup.runner())
    for number in range(num_prompts):
        core.add(asked(f"many{number}", n=MANY // num_prompts, max_tokens=50, call="many"))
    for number in range(5):
        for _ in range(7 * number):
            core.step()
        core.add(asked(f"lone{number}", max_tokens=12))
        assert steps_until_it_starts(core, f"lone{number}", 8) <= (8 if number == 1 else 3)
    assert core.scheduler.num_preemptions > 0


def test_a_call_keeps_its_share_and_calls_do_not_take_places_in_turn() -> None:
    setup = Setup(max_num_seqs=16, num_blocks=400, max_num_batched_tokens=128)
    core = EngineCore(setup.scheduler(), setup.runner())
    core.add(asked("first", n=500, max_tokens=50))
    core.step()
    core.add(asked("second", n=500, max_tokens=50))
    for number in range(20):
        core.add(asked(f"lone{number}", max_tokens=50))
    for _ in range(40):
        core.step()
        check_invariants(core.scheduler)
    running = [name.partition("#")[0] for name in core.scheduler.running]
    assert (running.count("first"), running.count("second"), len(running)) == (2, 2, 16)
    assert core.scheduler.num_preemptions == 14
    finished: list[str] = []
    while not any(name.startswith("lone") for name in finished):
        finished += [each.request_id for each in core.step().finished]
    for _ in range(3):
        core.step()
    names = [name for name in core.scheduler.running if name.startswith("lone")]
    assert len(names) > 6, "the places of those that end go to those that wait with fewer"


def test_a_priority_is_not_given_up_for_a_share() -> None:
    setup = Setup(max_num_seqs=8, num_blocks=100, heed_priority=True)
    core = EngineCore(setup.scheduler(), setup.runner())
    core.add(asked("urgent", n=20, max_tokens=30, priority=-1))
    core.add(asked("lone", max_tokens=3))
    for _ in range(60):
        core.step()
        assert "lone" not in core.scheduler.running
    assert core.scheduler.num_preemptions == 0
