"""API processes beside the first: how it starts and ends them.  ``helper_process`` is what runs."""

from __future__ import annotations

import asyncio
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from contextlib import suppress

import msgspec
from msgspec import Struct

from ...config import EngineDeadError, EngineOptions
from ...engine.process.wire import Seat
from ...engine.ranks.lifetime import how_ended
from .jobs.settings import Settings

READY, DRAINED = b"ready\n", b"drained\n"
_END_S = 10.0
"""Longest time that a process may take to end once it was told to."""


class Orders(Struct, frozen=True):
    """A helper's orders at its start; ``listening`` is a file descriptor that it inherits."""

    parent_pid: int
    options: EngineOptions
    settings: Settings
    seat: Seat
    listening: int
    certificate: str | None
    private_key: str | None


class Helper:
    """Another API process, as the first sees it.

    Args:
        on_exit: called once with how it has ended.
    """

    def __init__(self, process: Process, on_exit: Callable[[str], None]) -> None:
        self._process = process
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.drained: asyncio.Future[None] = loop.create_future()
        self._watching = asyncio.ensure_future(self._watch(on_exit))

    @classmethod
    async def start(
        cls, orders: Orders, listening: socket.socket, on_exit: Callable[[str], None]
    ) -> Helper:
        """Start a process that takes connections from ``listening``."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", f"{__name__}_process"),
            stdin=PIPE,
            stdout=PIPE,
            pass_fds=[listening.fileno()],
        )
        helper = cls(process, on_exit)
        helper._write(msgspec.json.encode(orders) + b"\n")
        return helper

    def signal(self) -> None:
        """Pass on a signal: the first drains, the second ends what runs."""
        self._write(b"signal\n")

    async def end(self) -> None:
        """End the process, by force after a while."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._watching), _END_S)
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._watching

    def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(data)

    async def _watch(self, on_exit: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        told = {READY: self.ready, DRAINED: self.drained}
        while line := await self._process.stdout.readline():
            told[line].set_result(None)
        how = how_ended(await self._process.wait())
        on_exit(how)
        for waited in told.values():
            if not waited.done():
                waited.set_exception(EngineDeadError(how))
                waited.exception()  # nobody may wait
