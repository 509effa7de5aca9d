"""Claims about ends of the server: at signals, and when one of its processes is lost."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from .server_process import (
    LONG,
    TIMEOUT_S,
    WAITED_FOR,
    ServerProcess,
    is_running,
    send,
    wait_for,
)

DRAIN = ("--shutdown-timeout", str(TIMEOUT_S))
"""On a slow machine an open request may take longer than a drain has by default."""


@contextmanager
def started(*flags: str) -> Iterator[ServerProcess]:
    server = ServerProcess(*flags)
    try:
        yield server.wait_ready()
    finally:
        server.kill()


@contextmanager
def open_stream(
    server: ServerProcess, asked: dict[str, Any] = WAITED_FOR
) -> Iterator[Iterator[Any]]:
    """The events of a long completion that has begun; ``LONG`` where the test ends it."""
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json={**asked, "stream": True}) as response,
    ):
        assert response.status_code == 200
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        yield lines


def health(server: ServerProcess) -> tuple[int, str]:
    with server.client() as client:
        answer = client.get("/health")
        return answer.status_code, answer.json()["status"]


def test_sigterm_lets_open_requests_finish_and_takes_no_more() -> None:
    with started(*DRAIN) as server:
        engine = server.engine_pid
        assert health(server) == (200, "ok")
        with open_stream(server) as lines:
            with server.engine_stopped(), server.client() as client:
                server.process.send_signal(signal.SIGTERM)
                wait_for(lambda: health(server) == (503, "draining"))
                assert client.post("/v1/completions", json={"prompt": "1"}).status_code == 503
                assert client.get("/live").status_code == 200
            rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        last = json.loads(rest[-2].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] == "length"
        assert server.ended() == 0
        assert not is_running(engine)


def free_port() -> int:
    """A port that nobody has, of those that the kernel gives to nobody: other tests, which ask it
    for ports all the time, do not get this one before the server has it."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    others = [port for port in range(10_000, 65_536) if not first <= port <= last] or [0]
    while True:
        with (
            suppress(OSError),
            socket.create_server(("127.0.0.1", Random().choice(others))) as taken,
        ):
            port: int = taken.getsockname()[1]
            return port


@pytest.mark.slow
@pytest.mark.product
@pytest.mark.parametrize("stderr", ["a dead pipe", "a full pipe", "a full disk"])
def test_a_drain_needs_nobody_who_reads_stderr(stderr: str) -> None:
    port = str(free_port())
    with ExitStack() as stack:
        if stderr == "a full disk":
            full = stack.enter_context(Path("/dev/full").open("w"))
            server = ServerProcess(*DRAIN, port=port, stderr=full)
        else:
            reads, writes = os.pipe()
            stack.callback(os.close, reads)
            with os.fdopen(writes, "wb") as pipe:
                if stderr == "a full pipe":
                    os.set_blocking(writes, False)
                    with suppress(BlockingIOError):
                        while os.write(writes, b"x" * 4096):
                            pass
                    os.set_blocking(writes, True)
                server = ServerProcess(*DRAIN, port=port, stderr=pipe)
            if stderr == "a dead pipe":
                stack.pop_all().close()
        stack.callback(server.kill)
        server.url = f"http://127.0.0.1:{port}"

        def serves() -> bool:
            with suppress(httpx.ConnectError):
                return health(server) == (200, "ok")
            return False

        wait_for(serves)
        with open_stream(server) as lines:
            server.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        last = json.loads(rest[-2].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] == "length"
        assert server.ended() == 0


@pytest.mark.product(2)
@pytest.mark.parametrize("flags", [(), ("--shutdown-timeout", "0")], ids=["twice", "in no time"])
def test_a_second_sigterm_or_the_end_of_time_answers_everyone(flags: tuple[str, ...]) -> None:
    with started(*flags) as server:
        with open_stream(server, LONG) as lines, server.engine_stopped():
            server.process.send_signal(signal.SIGTERM)
            if not flags:
                wait_for(lambda: any("draining" in line for line in server.lines))
                server.process.send_signal(signal.SIGINT)
            rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        error = json.loads(rest[-2].removeprefix("data: "))["error"]
        assert error["code"] == "shutting_down"
        assert server.ended() == 0


def test_a_killed_engine_fails_open_requests_and_ends_the_server() -> None:
    with started() as server:
        with open_stream(server, LONG) as lines:
            send(server.engine_pid, signal.SIGKILL)
            rest = list(lines)
        error = json.loads(rest[-2].removeprefix("data: "))["error"]
        assert error["code"] == "engine_dead"
        assert server.ended() == 1
        message = "error: the engine's process has ended (signal SIGKILL)"
        assert server.lines[-1].startswith(message)


def test_a_killed_server_leaves_no_engine_and_no_folder() -> None:
    with started() as server:
        engine = server.engine_pid
        command = Path(f"/proc/{engine}/cmdline").read_bytes().split(b"\0")
        (folder,) = (Path(word.decode()) for word in command if word.endswith(b"/content"))
        server.kill()
        wait_for(lambda: not is_running(engine))
        assert not folder.parent.exists()


def test_health_tells_of_a_stopped_engine_and_of_its_return() -> None:
    with started("--stall-timeout", "1") as server:
        engine = server.engine_pid
        send(engine, signal.SIGSTOP)
        wait_for(lambda: health(server)[0] == 503)
        assert health(server)[1].startswith("stalled: nothing moved for")
        with server.client() as client:
            assert client.get("/live").status_code == 200
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=LONG, timeout=httpx.Timeout(60, read=0.2))
        send(engine, signal.SIGCONT)
        wait_for(lambda: health(server) == (200, "ok"))
        with server.client() as client:
            answer = client.post("/v1/completions", json={"prompt": "1+1=", "temperature": 0})
        assert answer.json()["choices"][0]["text"] == "2"


def test_a_start_answers_before_the_engine_is_there_and_ends_at_a_signal() -> None:
    port = str(free_port())
    server = ServerProcess(port=port)
    server.url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            return health(server) == (503, "starting")
        except httpx.ConnectError:
            return False

    try:
        wait_for(answers)
        # The server answers while the engine's process is forked, which has its own command later.
        wait_for(lambda: server.children(".child"))
        engine = server.engine_pid
        with server.client() as client:
            assert client.get("/live").status_code == 200
            answer = client.post("/v1/completions", json={"prompt": "1"})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert server.stop() == 0
        wait_for(lambda: not is_running(engine))
    finally:
        server.kill()


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--kv-cache-memory-bytes", "1"), "kv_cache_memory_bytes leaves 1 bytes"),
        (("--api-key-file", "/nowhere"), "api_key_file=/nowhere: cannot be read"),
        (("--ssl-certfile", "/nowhere"), "ssl_certfile=/nowhere: no such file"),
    ],
    ids=["engine", "keys", "certificate"],
)
def test_a_mistake_ends_the_start_with_one_line(flags: tuple[str, ...], message: str) -> None:
    server = ServerProcess(*flags)
    assert server.ended() == 2
    assert message in server.lines[-1]
    assert server.lines[-1].startswith("error: ")


def test_a_port_in_use_is_told_before_the_engine_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        server = ServerProcess(port=port)
        assert server.ended() == 2
        (line,) = server.lines
        assert line.startswith(f"error: port={port}: 127.0.0.1 cannot be listened on")
