"""Claims about several API processes over several engines: one server to its clients, which ends as
a whole."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from fusewright.engine.process.child import _COUNTERS_S

from .server_process import (
    ADMIN_KEY,
    LONG,
    TIMEOUT_S,
    WAITED_FOR,
    ServerProcess,
    is_idle,
    is_running,
    send,
    wait_for,
)

MANY = 32
"""Connections: that one of two processes gets none of them happens once in 2**31 runs."""


def num_sockets(pid: int) -> int:
    links = (each.readlink() for each in Path(f"/proc/{pid}/fd").iterdir())
    return sum(str(link).startswith("socket:") for link in links)


@contextmanager
def started(num_api: int, num_replicas: int) -> Iterator[ServerProcess]:
    counts = ("--api-server-count", str(num_api), "--data-parallel-size", str(num_replicas))
    # On a slow machine the open requests may take longer than a drain has by default.
    more = ("--admin-api-key", ADMIN_KEY, "--shutdown-timeout", str(TIMEOUT_S))
    server = ServerProcess(*counts, *more).wait_ready()
    all_pids = server.children()
    try:
        assert len(server.children(".child")) == num_replicas
        assert len(server.children(".helper")) == num_api - 1
        yield server
        wait_for(lambda: not any(map(is_running, all_pids)))
    finally:
        server.kill()


@contextmanager
def open_streams(
    server: ServerProcess, count: int, asked: dict[str, Any] = LONG
) -> Iterator[list[Iterator[str]]]:
    """The events of long completions that have begun, over a connection each; none ends meanwhile,
    however slow the machine: the engines run only until the next one has begun."""
    with ExitStack() as stack, ExitStack() as held:
        body = {**asked, "stream": True}
        streams = []
        for _ in range(count):
            client = stack.enter_context(server.client())
            held.close()
            response = stack.enter_context(client.stream("POST", "/v1/completions", json=body))
            assert response.status_code == 200
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            held.enter_context(server.engine_stopped())
            streams.append(lines)
        yield streams


def last_event(lines: Iterator[str]) -> Any:
    rest = list(lines)
    assert rest[-1] == "data: [DONE]"
    return json.loads(rest[-2].removeprefix("data: "))


@pytest.mark.product(2, of="several API processes")
@pytest.mark.slow
def test_two_api_processes_over_two_replicas_are_one_server() -> None:
    with started(2, 2) as server:
        (helper,) = server.children(".helper")
        before = num_sockets(helper)
        with ExitStack() as stack:
            for number in range(MANY):  # open together: a port is not used twice
                client = stack.enter_context(server.client())
                body = {"prompt": f"{number}+1=", "temperature": 0}
                answer = client.post("/v1/completions", json=body).json()
                assert answer["choices"][0]["text"] == str(number + 1)
            assert num_sockets(helper) > before
            for client_of_any in (server.client(), client):
                text = client_of_any.get("/metrics").text
                assert f'finished_reason="stop",model_name="abacus"}} {MANY}.0' in text
                steps = [line for line in text.splitlines() if "fusewright:engine_step{" in line]
                assert len(steps) == 2 and all(float(line.split()[-1]) > 0 for line in steps)
        with server.client() as client:
            body = {"prompt": "37+58=", "temperature": 0, "bad_words": ["95"]}
            answer = client.post("/v1/completions", json=body).json()
            assert answer["choices"][0]["text"][:2] not in ("", "95")
            time.sleep(2 * _COUNTERS_S)  # so that the next step tells its own
            with open_streams(server, 8):
                assert server.metric("vllm:kv_cache_usage_perc") > 0
            wait_for(lambda: is_idle(client))
            with open_streams(server, 8) as streams:
                admin = {"authorization": f"Bearer {ADMIN_KEY}"}
                every = {"request_ids": "all"}
                assert client.post("/abort_requests", json=every).status_code == 403
                aborted = client.post("/abort_requests", json=every, headers=admin).json()
                assert len(aborted["aborted"]) == 8
                codes = [last_event(lines)["error"]["code"] for lines in streams]
                assert codes == ["aborted"] * 8
            wait_for(lambda: is_idle(client))
        with open_streams(server, 8) as streams:
            send(server.children(".child")[1], signal.SIGKILL)
            codes = [last_event(lines)["error"]["code"] for lines in streams]
        assert codes == ["engine_dead"] * 8
        assert server.ended() == 1
        message = "error: the engine's process of replica 1 has ended (signal SIGKILL)"
        assert server.lines[-1].startswith(message)


@pytest.mark.product(2, of="several API processes")
def test_sigterm_lets_the_requests_of_all_api_processes_finish() -> None:
    with started(2, 1) as server, open_streams(server, 8, WAITED_FOR) as streams:
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: any("draining: 8 requests" in line for line in server.lines))
        send(server.engine_pid, signal.SIGCONT)
        reasons = [last_event(lines)["choices"][0]["finish_reason"] for lines in streams]
        assert reasons == ["length"] * 8
        assert server.ended() == 0


def test_health_tells_of_an_api_process_that_hangs() -> None:
    server = ServerProcess("--api-server-count", "2", "--stall-timeout", "1").wait_ready()
    try:
        (helper,) = server.children(".helper")

        def found() -> set[str]:
            """What the processes that answer say, each over some of the connections."""
            statuses = set()
            for _ in range(4):
                with suppress(httpx.TimeoutException), server.client() as client:
                    statuses.add(client.get("/health", timeout=2).json()["status"])
            return statuses

        wait_for(lambda: found() == {"ok"})
        send(helper, signal.SIGSTOP)
        wait_for(lambda: any("API process 1 has not moved" in each for each in found()))
        send(helper, signal.SIGCONT)
        wait_for(lambda: found() == {"ok"})
        assert server.stop() == 0
    finally:
        server.kill()


def test_a_start_that_fails_is_told_once_and_leaves_nobody() -> None:
    server = ServerProcess("--api-server-count", "2", "--kv-cache-memory-bytes", "1")
    assert server.ended() == 2
    assert [line for line in server.lines if "error" in line] == server.lines[-1:]
    assert "kv_cache_memory_bytes leaves 1 bytes" in server.lines[-1]


@pytest.mark.parametrize("first", [False, True], ids=["another", "the first"])
def test_an_api_process_that_is_killed_ends_all_others(first: bool) -> None:
    server = ServerProcess("--api-server-count", "2")
    wait_for(lambda: server.children(".helper"))
    pids = [server.process.pid, *server.children("")]
    send(server.process.pid if first else server.children(".helper")[0], signal.SIGKILL)
    code = server.ended()
    wait_for(lambda: not any(map(is_running, pids)))
    if not first:
        assert code == 1
        assert server.lines[-1].startswith("error: API process 1 has ended (signal SIGKILL)")
