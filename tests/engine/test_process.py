"""Claims about the engine in a process of its own: it answers as in ours, and no end of either
process leaves the other waiting."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from math import inf
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import pytest
import zmq

from fusewright import LLM, SamplingParams
from fusewright.config import EngineDeadError, EngineOptions, UserError
from fusewright.engine.frontend.outputs import RequestOutput
from fusewright.engine.messages.requests import CoreStats, StepOutputs
from fusewright.engine.process import child
from fusewright.engine.process.client import EngineClient
from fusewright.engine.process.heartbeat import Heartbeat
from fusewright.engine.process.output_stream import OutputStream
from fusewright.engine.process.wire import Kind, frame, make_socket, unframed
from tests.serve.server_process import is_running, wait_for

_T = TypeVar("_T")
pytestmark = pytest.mark.usefixtures("warm")
OPTIONS: dict[str, Any] = {
    "optimization_level": 0,
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "block_size": 8,
    "max_model_len": 64,
    "num_gpu_blocks_override": 32,
}
LONG = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=8),
    SamplingParams(seed=3, top_p=0.9, top_k=20, min_p=0.01, max_tokens=12, n=2),
    SamplingParams(max_tokens=12, logprobs=3, min_tokens=4, seed=1, prompt_logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, stop=["7", "99"], ignore_eos=True),
]
TIMEOUT_S = 300
STATS = CoreStats(0, 0, 0, 0, [], [], 0, False, 0, 0, {}, 0.0, {}, {}, {}, 0)


class Engine:
    """A client on an event loop of its own, for tests that are no coroutines."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.client = EngineClient(EngineOptions(**OPTIONS))
        self.run(self._start)

    async def _start(self) -> None:
        self.client.start()
        await self.client.ready()

    def run(self, work: Callable[[], Awaitable[_T]]) -> _T:
        async def limited() -> _T:
            return await asyncio.wait_for(work(), TIMEOUT_S)

        return self.runner.run(limited())

    def close(self) -> None:
        self.run(self.client.stop)
        self.runner.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.close()


async def last_of(stream: OutputStream) -> RequestOutput:
    while True:
        (output,) = await stream.next()
        if output.finished:
            return output


async def generate(client: EngineClient, prompt: Any, params: SamplingParams) -> RequestOutput:
    stream = client.submit([await client.check(prompt, params)])
    return await last_of(stream)


async def counted(client: EngineClient, holds: Callable[[Any], bool]) -> None:
    while not client.counters or not holds(client.counters[0].core):
        await asyncio.sleep(0.01)


def exact(output: RequestOutput) -> Any:
    return [(c.text, c.token_ids, c.finish_reason, c.stop_reason) for c in output.outputs]


def logprobs(output: RequestOutput) -> list[float]:
    steps = [step for c in output.outputs for step in c.logprobs or ()]
    steps += [step for step in output.prompt_logprobs or () if step is not None]
    return [entry.logprob for step in steps for entry in step.values()]


def test_it_answers_as_the_engine_in_one_process(engine: Engine) -> None:
    prompts = [f"{12 + i}+{34 * i}=" for i in range(12)]
    params = [PARAMS[i % len(PARAMS)] for i in range(12)]

    async def answers() -> list[RequestOutput]:
        pairs = zip(prompts, params, strict=True)
        return await asyncio.gather(*(generate(engine.client, p, q) for p, q in pairs))

    expected = LLM("abacus", **OPTIONS).generate(prompts, params, use_tqdm=False)
    for ours, theirs in zip(engine.run(answers), expected, strict=True):
        assert exact(ours) == exact(theirs)
        # Their last bits depend on the batch.
        assert logprobs(ours) == pytest.approx(logprobs(theirs), abs=1e-3)


def test_many_prompts_are_queued_behind_what_the_event_loop_has_to_do(engine: Engine) -> None:
    async def queued() -> list[tuple[int, int]]:
        client, params = engine.client, SamplingParams(max_tokens=1)
        stream = client.submit([await client.check("1+1=", params) for _ in range(300)])
        counts = [(client.core.num_unfinished, client.num_open)]
        await asyncio.sleep(0)
        counts.append((client.core.num_unfinished + client._num_unqueued, client._num_unqueued))
        client.abort(stream)
        while client._num_unqueued:
            await asyncio.sleep(0)
        return [*counts, (client.core.num_unfinished, client.num_open)]

    first, (open_later, unqueued), last = engine.run(queued)
    assert first == (64, 300) and last == (0, 0)
    assert open_later <= 300 and 0 < unqueued < 236


def test_a_long_text_is_encoded_in_a_thread_and_refused_like_a_short_one(engine: Engine) -> None:
    with pytest.raises(UserError, match="max_model_len=64"):
        engine.run(lambda: engine.client.check("1" * 5000, LONG))
    with pytest.raises(UserError, match="prompt is empty"):
        engine.run(lambda: engine.client.check("", LONG))
    with pytest.raises(UserError, match="priority"):
        engine.run(lambda: engine.client.check("1", LONG, priority=1))


def test_an_abort_frees_the_blocks_while_others_run_on(engine: Engine) -> None:
    async def leave() -> str:
        client = engine.client
        stream = client.submit([await client.check(f"{i}+1=", LONG) for i in range(2)])
        await stream.next()
        other = asyncio.ensure_future(generate(client, "12+34=", PARAMS[0]))
        client.abort(stream)
        assert not stream.open
        answer = (await other).outputs[0].text
        await counted(client, lambda core: core.num_free_kv_blocks == core.num_kv_blocks)
        return answer

    assert engine.run(leave) == "46"
    assert engine.client.num_open == 0


def test_the_report_is_that_of_the_other_process(engine: Engine) -> None:
    (facts,) = engine.run(engine.client.ask)
    assert facts["level"] == 0
    assert facts["num_kv_blocks"] == 32


def test_the_heart_beats_at_rest_and_stops_with_the_process(engine: Engine) -> None:
    heartbeat, pid = engine.client.replicas[0].heartbeat, engine.client.replicas[0].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: heartbeat.read()[1] > 1.5)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: heartbeat.read()[1] < 1.0)


def test_a_killed_engine_fails_its_requests_and_every_later_one() -> None:
    engine = Engine()
    deaths: list[Exception] = []
    engine.client.on_death = deaths.append

    async def lose() -> None:
        client = engine.client
        stream = client.submit([await client.check("1+1=", LONG)])
        os.kill(client.replicas[0].pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await last_of(stream)
        with pytest.raises(EngineDeadError):
            await client.check("1+1=", LONG)
        with pytest.raises(EngineDeadError):
            await client.ask()

    engine.run(lose)
    assert [str(error) for error in deaths] == [str(engine.client.dead)]
    engine.close()


def test_an_engine_that_cannot_start_says_why() -> None:
    async def start() -> EngineClient:
        small = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1}
        client = EngineClient(EngineOptions(**{**OPTIONS, **small}))
        client.start()
        try:
            with pytest.raises(EngineDeadError, match="kv_cache_memory_bytes leaves 1 bytes"):
                await client.ready()
        finally:
            await client.stop()
        return client

    assert asyncio.run(start()).exit_code == 2


PARENT = f"""
import asyncio
from fusewright.config import EngineOptions
from fusewright.engine.process.client import EngineClient

async def main():
    client = EngineClient(EngineOptions(**{OPTIONS!r}))
    client.start()
    await client.ready()
    print(client.replicas[0].pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.usefixtures("cold")
def test_an_engine_ends_with_its_killed_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_running(child)
        parent.kill()
        wait_for(lambda: not is_running(child))


@pytest.mark.usefixtures("cold")
def test_the_frontend_of_the_other_process_imports_no_torch() -> None:
    code = "import sys, fusewright.engine.process.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("quiet_s", "begun"), [(0.0, True), (inf, False)])
def test_work_that_can_wait_is_begun_when_no_request_came_for_a_while(
    quiet_s: float, begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a client that asks again at once would wait for it.  A message ends the rest by itself:
    nothing looks for one now and then, and behind a step nothing sleeps."""
    monkeypatch.setattr(child, "_BEAT_S", 3600.0)

    class OneStep:
        num_unfinished = 1

        def step(self) -> StepOutputs:
            self.num_unfinished = 0
            return StepOutputs(None, [], [])

        def stats(self) -> CoreStats:
            return STATS

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox, outbox = make_socket(context, zmq.PULL), make_socket(context, zmq.PUSH)
    requests, outputs = make_socket(context, zmq.PUSH), make_socket(context, zmq.PULL)
    inbox.bind("inproc://requests")
    requests.connect("inproc://requests")
    outputs.bind("inproc://outputs")
    outbox.connect("inproc://outputs")
    calls: list[None] = []
    slept: list[int] = []

    class Inbox:
        recv = inbox.recv

        def poll(self, timeout_ms: int) -> int:
            slept.append(timeout_ms)
            return int(inbox.poll(timeout_ms))

    def work() -> bool:
        calls.append(None)
        return False

    heartbeat = Heartbeat(tmp_path / "heartbeat")
    server = child.CoreServer(
        child.Served(OneStep(), at_rest=work),  # type: ignore[arg-type]
        Inbox(),  # type: ignore[arg-type]
        [outbox],
        heartbeat,
        quiet_s=quiet_s,
    )
    thread = Thread(target=server.run)
    thread.start()
    try:
        for _ in range(3):  # behind each answer it rests before it can give the next
            requests.send(frame(Kind.REPORT, 0))
            while unframed(outputs.recv())[0] is not Kind.REPORT:
                pass
        if begun:  # on a busy machine each of the next requests may have been there before the rest
            wait_for(lambda: bool(calls) and any(slept))
    finally:
        requests.send(frame(Kind.STOP, 0))
        thread.join()
        context.destroy()
    assert bool(calls) is begun
    assert any(slept) is begun


def test_a_beat_is_never_read_half_written(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "heartbeat")
    heartbeat.beat(0)
    if (writer := os.fork()) == 0:
        for step in itertools.count():
            heartbeat.beat(step)
    oldest = step = 0.0
    try:
        while step < 100_000:
            step, age = heartbeat.read()
            oldest = max(oldest, age)
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    assert oldest < 60
