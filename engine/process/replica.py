"""``Replica``: one engine's process, as a frontend sees it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq
from msgspec import Struct

from ...config import EngineOptions, UserError
from ...config.process.logs import LogStyle
from ..ranks.lifetime import how_ended
from .heartbeat import Heartbeat
from .wire import (
    Counters,
    Kind,
    Place,
    Ready,
    Seat,
    frame,
    heartbeat_path,
    make_socket,
    requests_address,
)


class Replica:
    """Sends to an engine's process, and knows what it has told of itself.

    Args:
        number: the replica's number, from 0.
        seat: the frontend's place among all.
        start: what to start the process with, and the style of its log; None if another frontend
            has started it.
        on_exit: called once with this and how the process has ended, which it may do unasked.

    Raises:
        UserError: its socket cannot be made, or there are too few GPUs.
    """

    def __init__(
        self,
        number: int,
        seat: Seat,
        folder: Path,
        context: zmq.Context[zmq.Socket[bytes]],
        start: tuple[EngineOptions, LogStyle] | None,
        on_exit: Callable[[Replica, str], None],
    ) -> None:
        self.number, self._seat, self._on_exit = number, seat, on_exit
        self.counters: Counters | None = None
        self.reports: list[asyncio.Future[dict[str, Any]]] = []
        self._event_loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = self._event_loop.create_future()
        self._requests = make_socket(context, zmq.PUSH)
        self._requests.connect(requests_address(folder, number))
        self.heartbeat = Heartbeat(heartbeat_path(folder, number))
        self._process: subprocess.Popen[bytes] | None = None
        if start is None:
            self.pid = seat.pids[number]
        else:
            self._process = self._spawn(folder, *start)
            self.pid = self._process.pid
        self._exited: int | None = os.pidfd_open(self.pid)
        self._event_loop.add_reader(self._exited, self._take_exit)

    def _spawn(
        self, folder: Path, options: EngineOptions, log: LogStyle
    ) -> subprocess.Popen[bytes]:
        name = f"engine {self.number}" if self._seat.num_replicas > 1 else ""
        place = Place(self.number, self._seat.count, replace(log, process=name))
        divides = options.device != "cpu" and options.distributed_executor == "mp"
        there = visible_gpus() if divides else []
        world, count = options.num_ranks, self._seat.num_replicas
        gpus = gpus_of_replica(self.number, count, world, there)
        return subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", f"{__package__}.child", str(folder)),
                *(str(os.getpid()), *(_json(each) for each in (place, options))),
            ],
            stdin=subprocess.DEVNULL,
            env=None if gpus is None else {**os.environ, "CUDA_VISIBLE_DEVICES": gpus},
        )

    def send(self, kind: Kind, message: Struct | None = None) -> None:
        self._requests.send(frame(kind, self._seat.index, message), zmq.NOBLOCK)

    def fail(self, error: Exception) -> None:
        """Give ``error`` to whoever waits for the process."""
        waiting: list[asyncio.Future[Any]] = [self.ready, *self.reports]
        for answer in waiting:
            if not answer.done():
                answer.set_exception(error)

    def _take_exit(self) -> None:
        self._unwatch()
        process = self._process
        self._on_exit(self, "it was lost" if process is None else how_ended(process.wait()))

    def _unwatch(self) -> None:
        if self._exited is not None:
            self._event_loop.remove_reader(self._exited)
            os.close(self._exited)
            self._exited = None

    async def stop(self, timeout_s: float) -> None:
        """End the process, if this has started it: by force unless it ends in time."""
        self._unwatch()
        process = self._process
        if process is None:
            return
        wait = partial(process.wait, timeout_s)
        try:
            await self._event_loop.run_in_executor(None, wait)
        except subprocess.TimeoutExpired:
            process.kill()
            await self._event_loop.run_in_executor(None, process.wait)


def _json(message: Any) -> str:
    return msgspec.json.encode(message).decode()


def visible_gpus() -> list[str]:
    """The GPUs that CUDA would show to a process started now, by the driver's files: this process
    imports no torch."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    there = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    return [str(number) for number in range(len(there))]


def gpus_of_replica(replica: int, num_replicas: int, world: int, gpus: list[str]) -> str | None:
    """``CUDA_VISIBLE_DEVICES`` of a replica of ``world`` ranks; None where there is one replica
    or no GPU.

    Raises:
        UserError: there are GPUs, and fewer than the replicas need.
    """
    if num_replicas == 1 or not gpus:
        return None
    if len(gpus) < num_replicas * world:
        raise UserError(
            f"data_parallel_size={num_replicas}: with {world} ranks a replica it needs "
            f"{num_replicas * world} GPUs, and there are {len(gpus)}; give "
            f"{max(1, len(gpus) // world)} or less"
        )
    return ",".join(gpus[replica * world : (replica + 1) * world])
