"""``fusewright serve`` in a process of its own, for tests that ask it over HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import httpx

from tests.warm import warm_starts

TIMEOUT_S = 300
"""Longest time for what a test waits for, in seconds: it bounds what hangs, and nothing else."""
KEY, OTHER_KEY, ADMIN_KEY = "a key", "another", "an admin's key"
JSON = {"content-type": "application/json"}
LONG = {"prompt": "1+1=", "temperature": 0, "max_tokens": 400, "ignore_eos": True}
"""A request that takes some seconds, for tests that end it; see ``engine_stopped``."""
WAITED_FOR = {**LONG, "max_tokens": 160}
"""One that some tests wait for."""


class ServerProcess:
    """A server of the bundled model that ``wait_ready`` waits for, by what it says on stderr.

    Attributes:
        drafts: ``--fw-drafts``, the ``speculative_config`` of servers whose flags have none.
    """

    drafts = ""

    def __init__(
        self, *flags: str, model: str = "abacus", port: str = "0", stderr: IO[Any] | None = None
    ) -> None:
        argv = ["serve", model, "--device", "cpu", "-O0", "--port", port, *flags]
        of_this = self.drafts and (model == "abacus" or "model" not in json.loads(self.drafts))
        if of_this and "--speculative-config" not in flags:
            argv += ["--speculative-config", self.drafts]
        with warm_starts(nested=True):
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fusewright.serve.cli", *argv],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE if stderr is None else stderr,
                text=True,
            )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        if stderr is None:
            self._reader.start()
        self.url = ""

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    def wait_ready(self) -> ServerProcess:
        """Wait until it serves; its address is ``url`` then."""

        def is_ready() -> bool:
            assert self.process.poll() is None, self.lines
            found = [m for line in self.lines if (m := re.search(r"at (https?://\S+)$", line))]
            self.url = found[0][1] if found else ""
            return bool(found)

        wait_for(is_ready)
        return self

    def children(self, part: str = "") -> list[int]:
        """The processes that the server has started, by a part of their command."""
        pid = self.process.pid
        found = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return [each for each in found if part in Path(f"/proc/{each}/cmdline").read_text()]

    @property
    def engine_pid(self) -> int:
        """The process of the only engine."""
        (engine,) = self.children(".child")
        return engine

    @contextmanager
    def engine_stopped(self) -> Iterator[None]:
        """Meanwhile no request advances, so that none ends before it is looked at."""
        engines = self.children(".child")
        for pid in engines:
            send(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in engines:
                with suppress(ProcessLookupError):  # the body may have ended it
                    send(pid, signal.SIGCONT)

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=TIMEOUT_S, trust_env=False, **options)

    def metric(self, name: str) -> float:
        """The sum of a series in ``/metrics``."""
        with self.client() as client:
            text = client.get("/metrics").text
        found = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.M)
        return sum(map(float, found))

    def ended(self) -> int:
        """Wait until it has ended, and ``lines`` has all that it said; returns its exit code."""
        code = self.process.wait(TIMEOUT_S)
        if self._reader.ident is not None:
            self._reader.join(TIMEOUT_S)
            assert not self._reader.is_alive(), "a process of it goes on"
        return code

    def stop(self) -> int:
        """Terminate it; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.ended()

    def kill(self) -> None:
        """End it by force."""
        self.process.kill()
        self.process.wait()


def is_idle(http: httpx.Client) -> bool:
    """Whether the engine runs nothing and holds no block."""
    return all(
        float(line.rpartition(" ")[2]) == 0
        for line in http.get("/metrics").text.splitlines()
        if line.startswith(("vllm:num_requests_", "vllm:kv_cache_usage_perc{"))
    )


def is_running(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(what: Callable[[], object]) -> None:
    """Wait until ``what`` holds."""
    end = time.monotonic() + TIMEOUT_S
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def send(pid: int, number: signal.Signals) -> None:
    os.kill(pid, number)


def events(response: httpx.Response) -> Iterator[Any]:
    """The events of a stream, which must end with [DONE]."""
    done = False
    for line in response.iter_lines():
        if not line:
            continue
        assert line.startswith("data: "), line
        assert not done
        if line == "data: [DONE]":
            done = True
            continue
        yield json.loads(line.removeprefix("data: "))
    assert done


def stream(http: httpx.Client, path: str, **body: Any) -> list[Any]:
    with http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(events(response))
