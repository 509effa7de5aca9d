"""``run_server``: starts engine and HTTP, serves, drains at a signal, and ends with the engine."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import uvicorn
import uvloop

from ...config import EngineDeadError, EngineOptions, MachineError, UserError
from ...engine.process.client import EngineClient
from .app import make_app
from .errors import ApiError
from .limits import LimitedProtocol
from .metrics import matched_sites
from .state import Phase, ServerState, Settings
from .tool_calls import detect

_BACKLOG = 2048
_FLUSH_S = 2
"""Seconds for the last answers to reach their clients."""
_LOOK_S = 0.05


@dataclass(frozen=True)
class Endpoint:
    """Where the server listens, and its certificate if it has one."""

    host: str
    port: int
    certificate: str | None = None
    private_key: str | None = None

    def bind(self) -> socket.socket:
        """A socket that listens.

        Raises:
            UserError: the address is in use, or not ours.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((self.host, self.port))
            bound.listen(_BACKLOG)
        except OSError as error:
            bound.close()
            raise UserError(
                f"port={self.port}: {self.host} cannot be listened on: {error.strerror}; choose "
                "another --port or --host"
            ) from error
        return bound


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers: ``Life`` has its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Life:
    """One server from start to end."""

    def __init__(
        self,
        options: EngineOptions,
        settings: Settings,
        listening: socket.socket,
        say: Callable[[str], None],
    ) -> None:
        self._client = EngineClient(options, on_death=self._on_death)
        self._state = ServerState(self._client, settings)
        self._listening, self._say = listening, say
        self._num_signals = 0
        self._changed = asyncio.Event()

    async def run(self, endpoint: Endpoint) -> None:
        """Serve until a signal comes or the engine ends.

        Raises:
            UserError: the engine cannot start; an option is bad.
            MachineError: the engine has ended.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        http = _Http(
            uvicorn.Config(
                make_app(self._state),
                http=LimitedProtocol,
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=_FLUSH_S,
                ssl_certfile=endpoint.certificate,
                ssl_keyfile=endpoint.private_key,
            )
        )
        self._client.start()
        serving = asyncio.ensure_future(http.serve(sockets=[self._listening]))
        try:
            await self._start(endpoint)
            await self._changed.wait()
            await self._drain()
        finally:
            http.should_exit = True
            await serving
            await self._client.stop()
        if self._client.dead is not None:
            raise self._death()

    async def _start(self, endpoint: Endpoint) -> None:
        ready = asyncio.ensure_future(self._client.ready())
        changed = asyncio.ensure_future(self._changed.wait())
        await asyncio.wait({ready, changed}, return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()
        if not ready.done():
            ready.cancel()
            return
        try:
            ready.result()
        except EngineDeadError:
            raise self._death() from None
        self._state.metrics.matched_sites = matched_sites(await self._client.report())
        tokenizer = self._client.inputs.tokenizer
        if tokenizer is not None and self._state.tool_format is None:
            self._state.tool_format = detect(tokenizer.chat_template)
        # What has been made by now lives as long as the process: no collection looks at it again.
        gc.collect()
        gc.freeze()
        self._state.phase = Phase.SERVING
        scheme = "https" if endpoint.certificate else "http"
        address, port = self._listening.getsockname()[:2]
        names = ", ".join(self._state.settings.model_names)
        self._say(f"serving {names} at {scheme}://{address}:{port}")

    async def _drain(self) -> None:
        """Wait for what runs, until time is up or another signal comes; then end it."""
        state = self._state
        if state.phase is Phase.SERVING:
            state.phase = Phase.DRAINING
            self._say(f"draining: {len(state.jobs)} requests")
        end = asyncio.get_running_loop().time() + state.settings.shutdown_timeout_s
        while state.jobs and self._num_signals < 2 and self._client.dead is None:
            if asyncio.get_running_loop().time() > end:
                break
            await asyncio.sleep(_LOOK_S)
        for job in list(state.jobs.values()) if self._client.dead is None else ():
            state.abort(job, ApiError(503, "the server is shutting down", code="shutting_down"))

    def _on_signal(self) -> None:
        self._num_signals += 1
        self._changed.set()

    def _on_death(self, error: Exception) -> None:
        self._state.phase = Phase.DEAD
        self._changed.set()

    def _death(self) -> UserError:
        kind = UserError if self._client.exit_code == 2 else MachineError
        return kind(str(self._client.dead))


def run_server(
    options: EngineOptions, settings: Settings, endpoint: Endpoint, say: Callable[[str], None]
) -> None:
    """Serve until a signal comes.

    Args:
        say: tells the operator a line.

    Raises:
        UserError: the address is in use, or the engine cannot start.
        MachineError: the engine has ended.
    """
    with endpoint.bind() as listening:

        async def live() -> None:
            await Life(options, settings, listening, say).run(endpoint)

        with suppress(asyncio.CancelledError):
            uvloop.run(live())
