"""The end of one rank is the end of all, within seconds and with its reason."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from fusewright import LLM, SamplingParams
from fusewright.config import EngineDeadError, EngineOptions, UserError
from fusewright.engine.process.client import EngineClient
from fusewright.engine.ranks import leader as leader_module
from fusewright.engine.ranks.leader import Leader
from fusewright.engine.worker.hardware import detect_hardware
from tests.serve.server_process import wait_for

pytestmark = pytest.mark.usefixtures("warm")
OPTIONS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "optimization_level": 0,
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_model_len": 64,
}
LONG = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
TIMEOUT_S = 300


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may take long to end, or to say why: rank 0 waits for that before it blames itself."""
    monkeypatch.setattr(leader_module, "_CAUSE_S", float(TIMEOUT_S))


def is_gone(pid: int) -> bool:
    """Neither running nor a zombie that nobody waits for."""
    return not Path(f"/proc/{pid}").exists()


def others(llm: LLM) -> list[int]:
    return list(llm.report()["ranks"]["processes"])


@pytest.mark.product(2)
@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, r"^rank 1 of 2 has ended \(signal SIGKILL\)"),
        (signal.SIGSTOP, r"^rank 1 of 2 has ended \(it was stopped, and did not go on\)"),
    ],
)
def test_a_rank_lost_in_a_step_ends_the_engine(number: signal.Signals, reason: str) -> None:
    with LLM("abacus", **OPTIONS) as llm:
        (pid,) = others(llm)

        def lose(_: object) -> None:
            os.kill(pid, number)

        llm.engine.on_tokens = lose
        with pytest.raises(EngineDeadError, match=reason):
            llm.generate(["12+34="] * 3, LONG, use_tqdm=False)
        with pytest.raises(EngineDeadError, match=reason):
            llm.generate("1+1=", use_tqdm=False)
        wait_for(lambda: is_gone(pid))  # callers learn of it before the kernel has ended it
    if number == signal.SIGKILL:
        with LLM("abacus", **OPTIONS) as again:
            assert again.generate("37+58=", use_tqdm=False)[0].outputs[0].token_ids


def connections(family: socket.AddressFamily) -> set[int]:
    """Descriptors of this process's connections to other ranks: over Unix sockets it sends them
    batches, over TCP gloo sums."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if not str(path.readlink()).startswith("socket:"):
                continue  # no socket is made of it, which would leave its descriptor open
            with socket.socket(fileno=os.dup(int(path.name))) as end:
                end.getpeername()  # a socket that listens has none
                if end.family == family:
                    found.add(int(path.name))
    return found


def break_connections(descriptors: set[int]) -> None:
    """Shut connections for both sides; all processes live on."""
    assert descriptors
    for number in descriptors:
        with socket.socket(fileno=os.dup(number)) as end:
            end.shutdown(socket.SHUT_RDWR)


@pytest.mark.product(2)
@pytest.mark.parametrize(
    ("family", "reason"),
    [
        (socket.AF_UNIX, r"^rank 1 of 2 has ended \(its connection to rank 0 broke\)"),
        (socket.AF_INET, r"^rank 1 of 2: the engine failed: RuntimeError: .*gloo"),
    ],
)
def test_a_connection_that_breaks_in_a_step_ends_the_engine(
    family: socket.AddressFamily, reason: str
) -> None:
    before = connections(family)
    with LLM("abacus", **OPTIONS) as llm:
        (pid,) = others(llm)
        llm.engine.on_tokens = lambda _: break_connections(connections(family) - before)
        with pytest.raises(EngineDeadError, match=reason):
            llm.generate(["12+34="] * 3, LONG, use_tqdm=False)
        wait_for(lambda: is_gone(pid))


def test_an_interrupt_in_a_step_of_all_ranks_is_the_caller_s_and_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others have begun a step that rank 0 never launches."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with LLM("abacus", **OPTIONS) as llm:
        pids = others(llm)
        monkeypatch.setattr(llm.engine.runner, "launch", interrupted)  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt):
            llm.generate("1+1=", LONG, use_tqdm=False)
        with pytest.raises(EngineDeadError, match="a step that other ranks had begun failed"):
            llm.generate("1+1=", LONG, use_tqdm=False)
    assert all(is_gone(pid) for pid in pids)


def test_a_rank_lost_in_the_start_ends_it() -> None:
    leader = Leader(EngineOptions(**OPTIONS), detect_hardware("cpu"))
    wait_for(leader.report)
    (pid,) = leader.report()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"rank 1 of 2 has ended \(signal SIGKILL\)"):
        leader.ready()
    leader.stop()
    assert is_gone(pid)


def test_a_connection_that_breaks_in_the_start_ends_it() -> None:
    """A rank that does not listen, as one that compiles, is ended too."""
    before = connections(socket.AF_UNIX)
    leader = Leader(EngineOptions(**OPTIONS), detect_hardware("cpu"))
    wait_for(leader.report)
    (pid,) = leader.report()
    break_connections(connections(socket.AF_UNIX) - before)
    with pytest.raises(EngineDeadError, match=r"rank 1 of 2 has ended \(its connection .* broke\)"):
        leader.ready()
    leader.stop()
    assert is_gone(pid)


def test_sums_that_break_in_the_start_end_it() -> None:
    """Each is broken as soon as it stands, until the start has ended."""
    before, started = connections(socket.AF_INET), Event()

    def lose() -> None:
        while not started.is_set():
            if found := connections(socket.AF_INET) - before:
                with suppress(OSError):  # one has been closed
                    break_connections(found)

    thread = Thread(target=lose)
    thread.start()
    try:
        with pytest.raises(EngineDeadError, match=r"^(rank 1 of 2: )?the (ranks|engine) .*gloo"):
            LLM("abacus", **OPTIONS)
    finally:
        started.set()
        thread.join()
    with LLM("abacus", **OPTIONS) as again:
        assert again.generate("37+58=", use_tqdm=False)[0].outputs[0].token_ids


def test_a_mistake_that_only_another_rank_meets_is_told_as_its_own(tmp_path: Path) -> None:
    leader = Leader(EngineOptions(model=str(tmp_path), **OPTIONS), detect_hardware("cpu"))
    with pytest.raises(UserError, match=r"^rank 1 of 2: model .*no config\.json in it"):
        leader.ready()
    leader.stop()


def test_a_failed_start_leaves_no_rank_behind(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="num_gpu_blocks_override"):
        LLM("abacus", num_gpu_blocks_override=2**40, **OPTIONS)
    with LLM("abacus", **OPTIONS) as llm:
        pids = others(llm)
    assert all(is_gone(pid) for pid in pids)


SPAWNED = """
import sys
from fusewright.engine.ranks import spawn

def spawned(self, count):
    sys.exit(f"{count} ranks, torch imported: {'torch' in sys.modules}")

spawn.SpawnedRanks.__init__ = spawned
from fusewright import LLM
LLM("abacus", tensor_parallel_size=2, device="cpu")
"""


@pytest.mark.usefixtures("cold")
def test_ranks_are_started_before_rank_0_imports_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", SPAWNED], capture_output=True, text=True, check=False
    )
    assert done.stderr.strip() == "1 ranks, torch imported: False"


ORPHANS = """
import sys, time
from fusewright import LLM
llm = LLM(
    "abacus", tensor_parallel_size=2, optimization_level=0, device="cpu", max_num_seqs=4,
    distributed_executor=sys.argv[1],
)
print(*llm.report()["ranks"]["processes"], flush=True)
time.sleep(600)
"""


@contextmanager
def rank_0_killed(executor: str) -> Iterator[int]:
    """Kill a process that is rank 0 of two ranks when the block ends; gives rank 1's process."""
    command = [sys.executable, "-P", "-c", ORPHANS, executor]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            (pid,) = map(int, process.stdout.readline().split())
            assert not is_gone(pid)
            yield pid
        finally:
            process.kill()
            process.wait()


@pytest.mark.usefixtures("cold")
def test_no_rank_outlives_rank_0() -> None:
    with rank_0_killed("mp") as pid:
        pass
    wait_for(lambda: is_gone(pid))


@pytest.mark.usefixtures("warm_servers")
def test_a_rank_lost_at_rest_ends_the_server_s_engine() -> None:
    """The engine in a process of its own looks after its ranks between requests too."""

    async def lose() -> None:
        client = EngineClient(EngineOptions(**OPTIONS))
        client.start()
        try:
            await client.ready()
            (pid,) = (await client.ask())[0]["ranks"]["processes"]
            stream = client.submit([await client.check("12+34=", LONG)])
            while stream.open:
                await stream.next()
            os.kill(pid, signal.SIGKILL)
            while client.dead is None:
                await asyncio.sleep(0.05)
            assert str(client.dead).startswith("rank 1 of 2 has ended (signal SIGKILL)")
        finally:
            await client.stop()
        assert is_gone(client.replicas[0].pid) and is_gone(pid)

    asyncio.run(asyncio.wait_for(lose(), TIMEOUT_S))
