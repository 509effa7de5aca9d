"""Claims about requests for many outputs, and about floods: what is abandoned costs nobody much."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import zmq

from fusewright.config import UserError
from fusewright.engine.core.loop import EngineCore
from fusewright.engine.frontend.driver import Inbox, driver_of
from fusewright.engine.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput
from fusewright.engine.messages.codec import decode
from fusewright.engine.messages.open_outputs import OpenOutputs
from fusewright.engine.messages.requests import AbortRequests, AddRequest
from fusewright.engine.messages.sampling_params import SamplingParams
from fusewright.engine.process.child import CoreServer, Served as ServedCore
from fusewright.engine.process.heartbeat import Heartbeat
from fusewright.engine.process.output_stream import OutputStream
from fusewright.engine.process.owners import Owners
from fusewright.engine.process.router import Router
from fusewright.engine.process.wire import Counters, Kind, Queued, frame, make_socket, unframed

from ..effort import calls
from .toy import EOS, Setup, ToyRunner, check_invariants, solo

MANY = 16384


def asked(name: str, n: int = 1, max_tokens: int = 4, **more: Any) -> AddRequest:
    params = SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True)
    return AddRequest(name, [7] * 6, params, 6 + max_tokens, frozenset({EOS}), **more)


def test_many_outputs_cost_what_one_does_until_they_begin() -> None:
    def effort(n: int) -> list[int]:
        core = EngineCore(Setup(max_num_seqs=2).scheduler(), Setup(max_num_seqs=2).runner())
        core.add(asked("running", max_tokens=50))
        core.step()
        added = calls(lambda: core.add(asked("many", n=n)))
        stepped = [calls(core.step) for _ in range(4)]
        return [added, *stepped, calls(lambda: core.abort(AbortRequests(["many"])))]

    assert effort(MANY) == effort(4)


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_an_abort_ends_outputs_that_run_wait_and_have_not_begun(async_scheduling: bool) -> None:
    setup = Setup(max_num_seqs=3, num_blocks=12, async_scheduling=async_scheduling)
    scheduler = setup.scheduler()
    core = EngineCore(scheduler, setup.runner(), async_scheduling=async_scheduling)
    core.add(asked("many", n=50, max_tokens=40))
    core.add(asked("other", max_tokens=20))
    for _ in range(12):  # long enough that some are preempted
        core.step()
        check_invariants(scheduler)
    assert scheduler.num_preemptions > 0
    core.abort(AbortRequests(["many#0"]))
    assert "many#0" not in scheduler and "many#49" in scheduler
    core.abort(AbortRequests(["many"]))
    assert core.num_unfinished == 1
    finished = [each for _ in range(20) if core.num_unfinished for each in core.step().finished]
    assert [(each.request_id, each.num_output_tokens) for each in finished] == [("other", 20)]
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    core.add(asked("many", n=2))  # the id is free again


def test_outputs_equal_those_of_as_many_requests_for_one() -> None:
    engine = Setup(num_blocks=20, max_num_seqs=3).engine()
    params = SamplingParams(n=9, seed=3, max_tokens=12)
    engine.add_request([97, 98, 99], params, "many", final_only=True)
    outputs = [each for _ in range(200) if engine.has_unfinished() for each in engine.step()]
    (output,) = outputs
    assert [c.index for c in output.outputs] == [*range(9)]
    for index, completion in enumerate(output.outputs):
        expected = solo([97, 98, 99], params.of_child(index), 64)
        assert completion.token_ids == expected.token_ids
        assert (completion.text, completion.finish_reason) == (
            expected.text,
            expected.finish_reason,
        )


def test_an_abort_returns_outputs_that_have_not_begun_too() -> None:
    engine = Setup(max_num_seqs=2).engine()
    engine.add_request("abc", SamplingParams(n=5, max_tokens=30, ignore_eos=True), "x")
    for _ in range(5):
        engine.step()
    output = engine.abort("x")
    assert output is not None and output.finished and not engine.has_unfinished()
    assert [c.finish_reason for c in output.outputs] == ["abort"] * 5
    lengths = [len(c.token_ids) for c in output.outputs]
    assert min(lengths[:2]) > 0 and lengths[2:] == [0, 0, 0]
    engine.add_request("abc", SamplingParams(n=5), "x")


def test_a_step_shows_the_server_what_it_changed() -> None:
    """Else a stream of n outputs would cost n a step."""
    engine = Setup(max_num_seqs=2).engine()
    engine._outputs._shares_lists = True
    engine.add_request("abc", SamplingParams(n=6, max_tokens=3, ignore_eos=True), "x")
    outputs = [each for _ in range(60) if engine.has_unfinished() for each in engine.step()]
    assert max(len(each.outputs) for each in outputs[:-1]) == 2
    assert outputs[-1].finished and len(outputs[-1].outputs) == 6


def test_the_ids_of_outputs_are_no_other_requests() -> None:
    engine = Setup().engine()
    engine.add_request("a", SamplingParams(), "pair#1")
    with pytest.raises(UserError, match="request_id 'pair' is in use"):
        engine.add_request("a", SamplingParams(n=2), "pair")
    engine.add_request("a", SamplingParams(n=2), "pairs")
    with pytest.raises(UserError, match="request_id 'pairs#0' is in use"):
        engine.add_request("a", SamplingParams(), "pairs#0")
    engine.add_request("a", SamplingParams(), "pairs#2")


def test_open_outputs_are_those_that_were_opened_and_not_closed() -> None:
    rng, opened, expected = random.Random(5), OpenOutputs[str](), dict[str, str]()
    for number in range(300):
        n = rng.choice((1, 1, 3, 20))
        request_id = f"r{number}{'#x' * rng.randrange(2)}"
        assert not opened.clashes(request_id, n)
        opened.add(request_id, request_id, n)
        assert opened.clashes(request_id, 1)
        expected |= {request_id if n == 1 else f"{request_id}#{i}": request_id for i in range(n)}
        for _ in range(rng.randrange(6)):
            gone = rng.choice([*expected, *expected.values(), "unknown", "r1#", "#", "r3#\u00b2"])
            names = {name for name, of in expected.items() if gone in (name, of)}
            closed = opened.close(gone)
            assert (0 if closed is None else len(closed[1])) == len(names)
            for name in names:
                del expected[name]
        assert len(opened) == len(expected)
        assert all(opened.get(name) == value for name, value in expected.items())
    opened.clear()
    assert not len(opened) and opened.get("r1") is None


def test_many_outputs_spread_over_replicas_in_one_message_each() -> None:
    router = Router(3, num_blocks=100, block_size=8)
    chosen = router.choose(asked("many", n=1000))
    assert sorted(chosen) == [0, 1, 2]
    assert sorted(i for part in chosen.values() for i in part) == [*range(1000)]
    assert max(map(len, chosen.values())) - min(map(len, chosen.values())) < 150
    assert len(router) == 1000 and router.num_open(1) == len(chosen[1])
    first = chosen[2].start
    assert router.close(f"many#{first}") == [2] and router.close(f"many#{first}") == []
    assert router.num_open(2) == len(chosen[2]) - 1
    assert sorted(router.close("many")) == [0, 1, 2] and len(router) == 0
    assert [router.num_open(replica) for replica in range(3)] == [0, 0, 0]


def test_an_owner_of_a_part_of_the_outputs_is_found_for_these() -> None:
    owners = Owners(2)
    owners.add(asked("many", n=5, outputs=(2, 4)), 1)
    assert [owners._of.get(f"many#{index}") for index in range(5)] == [None, None, 1, 1, None]
    owners.forget(["many#2", "many#3"])
    assert owners._of.get("many") is None and len(owners._of) == 0


class Served:
    """A server of a toy core, whose messages are sent and read by hand."""

    def __init__(self, tmp_path: Path, max_num_seqs: int = 4) -> None:
        setup = Setup(max_num_seqs=max_num_seqs)
        self.added: list[str] = []
        served = self

        class Core(EngineCore):
            def add(self, request: AddRequest) -> None:
                served.added.append(request.request_id)
                super().add(request)

        self.core = Core(setup.scheduler(), setup.runner(ToyRunner))
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        inbox, outbox = make_socket(self.context, zmq.PULL), make_socket(self.context, zmq.PUSH)
        self.requests = make_socket(self.context, zmq.PUSH)
        self.outputs = make_socket(self.context, zmq.PULL)
        inbox.bind("inproc://requests")
        self.requests.connect("inproc://requests")
        self.outputs.bind("inproc://outputs")
        outbox.connect("inproc://outputs")
        self.server = CoreServer(
            ServedCore(self.core), inbox, [outbox], Heartbeat(tmp_path / "heartbeat")
        )

    def add(self, request: AddRequest) -> None:
        self.requests.send(frame(Kind.ADD, 0, Queued.of(request)))

    def abort(self, *names: str) -> None:
        self.requests.send(frame(Kind.ABORT, 0, AbortRequests([*names])))

    def counters(self) -> Counters:
        """The last that were sent."""
        self.server._send_counters(0.0)
        while True:
            kind, _, body = unframed(self.outputs.recv())
            found = decode(body, Counters) if kind is Kind.COUNTERS else None
            if found is not None and not self.outputs.poll(0):
                return found

    def close(self) -> None:
        self.context.destroy(linger=0)


def test_an_abort_overtakes_every_request_before_it(tmp_path: Path) -> None:
    served = Served(tmp_path)
    try:
        for number in range(500):
            served.add(asked(f"0-{number}", n=1 + number % 3))
            if number > 40:
                served.abort(f"0-{number}")
        served.add(asked("0-last"))
        served.server._take_in()
        # One between two steps: what was aborted has never been added, what was not comes in order.
        assert served.added == [f"0-{number}" for number in range(len(served.added))]
        assert 1 <= len(served.added) <= 32
        counters = served.counters()
        waiting = counters.core.num_waiting + counters.num_backlog
        assert waiting == sum(1 + number % 3 for number in range(41)) + 1
        while served.added[-1] != "0-last":
            served.server._take_in()
        assert len(served.added) == 42
        served.abort(*served.added)
        served.server._take_in()
        assert served.core.num_unfinished == 0 and served.counters().num_backlog == 0
    finally:
        served.close()


def test_a_request_is_taken_up_beside_thousands_of_prompts_of_a_call(tmp_path: Path) -> None:
    served = Served(tmp_path)
    try:
        for number in range(2000):
            served.add(asked(f"0-{number}", call="0-large"))
        for number in range(2):
            served.add(asked(f"0-lone{number}"))
        while len(served.added) < 4:  # on a busy machine one call may be all that has its time
            served.server._take_in()
        assert served.added[:4] == ["0-0", "0-lone0", "0-lone1", "0-1"]
        served.abort(*(f"0-{number}" for number in range(2000)), "0-lone1")
        served.server._take_in()
        assert served.core.num_unfinished == 1 and not served.server._backlog._calls
    finally:
        served.close()


def test_what_is_dropped_before_it_was_queued_is_never_queued() -> None:
    """Aborts overtake, whoever drives: they do not come behind the requests of others."""
    engine = Setup().engine()
    driver, mine, others = driver_of(engine), Inbox(), Inbox()
    queued: list[str] = []
    engine.queue = lambda checked: queued.append(checked.request_id)  # type: ignore[method-assign]
    leader = Inbox()
    assert driver._lead(leader)
    driver.submit([engine.check_request("a", request_id=f"m{i}") for i in range(500)], mine)
    driver.submit([engine.check_request("a", request_id=f"o{i}") for i in range(3)], others)
    driver.drop([f"m{i}" for i in range(1, 500)], mine)
    driver._take_in()
    assert queued == ["m0", "o0", "o1", "o2"] and not driver._pending


def test_an_abort_by_id_gives_an_output_to_whoever_is_about_to_be_queued() -> None:
    engine = Setup().engine()
    driver, mine, leader = driver_of(engine), Inbox(), Inbox()
    assert driver._lead(leader)
    driver.submit([engine.check_request("a", request_id="x")], mine)
    driver.abort(["x"])
    driver._hand_on(leader)
    assert driver.wait(mine).outputs[0].finish_reason == "abort"


def test_a_slow_reader_of_a_stream_gets_all_outputs_that_have_changed() -> None:
    def output(finished: bool = False, **texts: str) -> RequestOutput:
        outputs = [
            CompletionOutput(int(name[1:]), text, [], None, None) for name, text in texts.items()
        ]
        return RequestOutput("r", None, [], outputs, finished, RequestMetrics(0.0))

    async def read() -> list[dict[int, str]]:
        stream, found = OutputStream(["r"]), []
        shown = [[output(_0="a"), output(_1="b"), output(_0="aa", _2="c")], [output(_1="bb")]]
        for several in [*shown, [output(_2="cc"), output(True, _0="aa", _1="bb", _2="cc")]]:
            for each in several:
                stream.show(each)
            (taken,) = await stream.next()
            found.append({c.index: c.text for c in taken.outputs})
        assert stream.is_done
        return found

    whole = {0: "aa", 1: "bb", 2: "cc"}
    assert asyncio.run(read()) == [{0: "aa", 1: "b", 2: "c"}, {1: "bb"}, whole]
