"""``run_server``: starts engines and HTTP, serves, drains at a signal, and ends with an engine."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import uvicorn
import uvloop

from ... import __version__
from ...config import EngineDeadError, EngineOptions, MachineError, UserError
from ...config.process.logs import facts, write_log
from ...engine.frontend.engine_log import log_start
from ...engine.frontend.generation_config import describe_default_sampling
from ...engine.frontend.tokenizer import Tokenizer
from ...engine.process.client import EngineClient
from ...engine.process.wire import Seat
from .app import make_app
from .helper import DRAINED, READY, Helper, Orders
from .intake.answer_log import AnswerLog, LogSettings
from .intake.connections import Connections, limited_by_files
from .intake.errors import ApiError
from .intake.hosts import is_loopback
from .intake.limits import HEAD_S, LimitedProtocol, Uploads
from .jobs.settings import Settings
from .jobs.state import Phase, ServerState
from .jobs.stats import log_loads
from .reasoning import PARSERS, detect as detect_thinking
from .tool_calls.call_reader import FORMATS, detect

_log = logging.getLogger(__name__)
_BACKLOG = 2048
_FLUSH_S = 2
"""Seconds for the last answers to reach their clients."""
_LOOK_S = 0.05
_GC_THRESHOLD = 20_000
"""New objects until a collection.  By Python's 700, a burst of requests is a tenth collections."""


@dataclass(frozen=True)
class Endpoint:
    """Where the server listens, and its certificate if it has one."""

    host: str
    port: int
    certificate: str | None = None
    private_key: str | None = None

    def bind(self, count: int = 1) -> list[socket.socket]:
        """``count`` sockets that listen at one port; the kernel spreads connections over them.

        Raises:
            UserError: the address is in use, or not ours.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        sockets = [socket.socket(family, socket.SOCK_STREAM) for _ in range(count)]
        port = self.port
        try:
            for number, each in enumerate(sockets):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if number > 0:
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                each.bind((self.host, port))
                port = each.getsockname()[1]
                if number == 0 and count > 1:  # only now: a port that is in use must be refused
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            for each in sockets:
                each.listen(_BACKLOG)
        except OSError as error:
            for each in sockets:
                each.close()
            raise UserError(
                f"port={self.port}: {self.host} cannot be listened on: {error.strerror}; choose "
                "another --port or --host"
            ) from error
        return sockets


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers, as ``Life`` has its own, and with our limits of what a
    connection may send."""

    def __init__(
        self,
        config: uvicorn.Config,
        uploads: Uploads,
        connections: Connections,
        answer_log: AnswerLog | None = None,
    ) -> None:
        super().__init__(config)
        self._uploads, self._connections = uploads, connections
        self._answer_log = answer_log or AnswerLog(LogSettings())

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        ssl = self.config.ssl
        more: dict[str, Any] = {} if ssl is None else {"ssl_handshake_timeout": HEAD_S}
        make = partial(
            LimitedProtocol,
            self._uploads,
            self._connections,
            self._answer_log,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(make, sock=each, ssl=ssl, backlog=_BACKLOG, **more)
            for each in sockets or ()
        ]
        self.started = True


class Life:
    """One API process from start to end.  The first of several starts the engines and the others.

    Args:
        seat: the place of this process among those that share the engines.
        listening: its socket; the first process has those of the others behind its own.
    """

    def __init__(
        self,
        options: EngineOptions,
        settings: Settings,
        seat: Seat,
        listening: list[socket.socket],
        endpoint: Endpoint,
    ) -> None:
        name = f"api {seat.index}" if seat.count > 1 else ""
        style = replace(settings.log.style, process=name)
        write_log(style)
        write_log(replace(style, level="error"), "uvicorn.error")
        self._client = EngineClient(options, seat, log=settings.log.style, on_death=self._on_death)
        self._state = ServerState(self._client, settings)
        self._listening, self._endpoint = listening, endpoint
        self._num_signals = 0
        self._changed, self._released = asyncio.Event(), asyncio.Event()
        self._helpers: list[Helper] = []
        self._ending = False
        self._loads: asyncio.Task[None] | None = None
        self.tell: Callable[[bytes], object] = lambda line: None
        """Tells the first process how far this one is."""

    async def run(self) -> None:
        """Serve until a signal comes or an engine ends.

        Raises:
            UserError: the engine cannot start; an option is bad.
            MachineError: a process has ended.
        """
        endpoint, settings = self._endpoint, self._state.settings
        http = _Http(
            uvicorn.Config(
                make_app(self._state),
                ws="none",
                lifespan="off",
                log_config=None,  # its loggers are the style's too
                log_level="error",  # a warning for each malformed request would fill a log
                access_log=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=_FLUSH_S,
                ssl_certfile=endpoint.certificate,
                ssl_keyfile=endpoint.private_key,
            ),
            self._state.uploads,
            Connections(limited_by_files(settings.max_connections)),
            self._state.answer_log,
        )
        if self._client.seat.index == 0:
            _log.info("fusewright %s starts %s", __version__, self._client.options.model)
        self._client.start()
        self._client.peers.answer = self._state.answer_peer
        self._state.watch_others()
        serving = asyncio.ensure_future(http.serve(sockets=self._listening[:1]))
        try:
            await self._start_helpers()
            await self._start()
            await self._changed.wait()
            await self._drain()
        finally:
            self._ending = True
            if self._loads is not None:
                self._loads.cancel()
            await asyncio.gather(*(helper.end() for helper in self._helpers))
            http.should_exit = True
            await serving
            await self._state.reader.close()
            await self._client.stop()
            if (tracing := self._state.tracing) is not None:
                await asyncio.to_thread(tracing.close)
        if self._client.dead is not None:
            raise self._death()

    async def _start_helpers(self) -> None:
        """Start the other API processes; each has its socket alone."""
        client, endpoint = self._client, self._endpoint
        pids = [replica.pid for replica in client.replicas]
        for index, listening in enumerate(self._listening[1:], start=1):
            seat = Seat(index, client.seat.count, len(pids), str(client.folder), pids)
            orders = Orders(
                os.getpid(),
                client.options,
                self._state.settings,
                seat,
                listening.fileno(),
                endpoint.certificate,
                endpoint.private_key,
            )
            on_exit = partial(self._on_exit, index)
            self._helpers.append(await Helper.start(orders, listening, on_exit))
            listening.close()

    async def _start(self) -> None:
        ready = asyncio.ensure_future(self._connect())
        changed = asyncio.ensure_future(self._changed.wait())
        await asyncio.wait({ready, changed}, return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()
        if not ready.done():
            ready.cancel()
            return
        try:
            reports = ready.result()
        except EngineDeadError:
            raise self._death() from None
        self._state.metrics.reports = reports
        tokenizer = self._client.inputs.tokenizer
        if self._client.seat.index == 0:
            self._tell_start(reports)
        if tokenizer is not None:
            self._read_template(tokenizer)
        # What has been made by now lives as long as the process: no collection looks at it again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD)
        self._state.phase = Phase.SERVING
        self.tell(READY)
        if self._client.seat.index == 0:
            self._tell_address()
            if (every_s := self._state.settings.log.stats_s) is not None:
                self._loads = asyncio.create_task(log_loads(self._state, every_s))

    def _read_template(self, tokenizer: Tokenizer) -> None:
        """Take from the chat template how the model writes, where no option says it.

        Raises:
            UserError: the parser of an option cannot read what this tokenizer makes.
        """
        state, template = self._state, tokenizer.chat_template
        if state.tool_format is None:
            state.tool_format = detect(template)
        name: str | None = state.settings.thinking
        if name == "auto":
            name = detect_thinking(template)
        if FORMATS[state.tool_format or "hermes"].channels:
            name = "openai_gptoss"  # which finds the calls too
        parser = PARSERS.get(name or "")
        if parser and (why := parser.refuses(partial(tokenizer.encode, add_special_tokens=False))):
            if state.settings.thinking == name or state.settings.tool_format is not None:
                raise UserError(f"reasoning_parser={name}: {why}; give another, or none")
            _log.info("the chat template shows the reasoning parser %s, but %s", name, why)
            parser = None
        state.thinking = parser

    def _tell_start(self, reports: list[dict[str, Any]]) -> None:
        for number, report in enumerate(reports):
            log_start(report, f"engine {number}: " if len(reports) > 1 else "")
        if said := describe_default_sampling(self._client.inputs.default_sampling):
            _log.info("%s", said)

    def _tell_address(self) -> None:
        scheme = "https" if self._endpoint.certificate else "http"
        address, port = self._listening[0].getsockname()[:2]
        names = ", ".join(self._state.settings.model_names)
        url = f"{scheme}://{address}:{port}"
        _log.info("serving %s at %s", names, url, extra=facts(models=names, url=url))

    async def _connect(self) -> list[dict[str, Any]]:
        """Wait until engines and API processes have started; returns the engines' reports."""
        await self._client.ready()
        reports = await self._client.connected()
        await asyncio.gather(*(helper.ready for helper in self._helpers))
        self._client.leave_folder()
        return reports

    async def _drain(self) -> None:
        """Wait for what runs, until time is up or another signal comes; then end it."""
        state = self._state
        if state.phase is Phase.SERVING:
            state.phase = Phase.DRAINING
            if self._client.seat.index == 0:
                _log.info("draining: %d requests", state.num_jobs)
        end = asyncio.get_running_loop().time() + state.settings.shutdown_timeout_s
        while state.jobs and self._num_signals < 2 and self._client.dead is None:
            if asyncio.get_running_loop().time() > end:
                break
            await asyncio.sleep(_LOOK_S)
        for job in list(state.jobs.values()) if self._client.dead is None else ():
            state.abort(job, ApiError(503, "the server is shutting down", code="shutting_down"))
        self.tell(DRAINED)
        if self._client.seat.index > 0:
            await self._released.wait()
        elif self._helpers and self._client.dead is None:
            left = max(0.0, end - asyncio.get_running_loop().time())
            await asyncio.wait([h.drained for h in self._helpers], timeout=left + _FLUSH_S)

    def on_signal(self) -> None:
        """Drain; when it comes again, end what runs."""
        self._num_signals += 1
        self._changed.set()
        for helper in self._helpers:
            helper.signal()

    def release(self) -> None:
        """End an API process that is not the first, at once."""
        self._num_signals += 2
        self._changed.set()
        self._released.set()

    def _on_death(self, error: Exception) -> None:
        self._state.phase = Phase.DEAD
        self._changed.set()

    def _on_exit(self, index: int, how: str) -> None:
        if not self._ending:
            self._client.die(f"API process {index} has ended ({how}); restart the server")

    def _death(self) -> UserError:
        kind = UserError if self._client.exit_code == 2 else MachineError
        return kind(str(self._client.dead))


def run_server(
    options: EngineOptions,
    settings: Settings,
    endpoint: Endpoint,
    num_processes: int = 1,
    num_replicas: int = 1,
) -> None:
    """Serve until a signal comes.

    Args:
        settings: a server that only this machine reaches takes no host names of others, unless
            they are listed.
        num_processes: processes that serve HTTP, over ``num_replicas`` engines.

    Raises:
        UserError: the address is in use, or the engine cannot start.
        MachineError: a process has ended.
    """
    seat = Seat(count=num_processes, num_replicas=num_replicas)
    with ExitStack() as stack:
        listening = endpoint.bind(num_processes)
        for each in listening:
            stack.enter_context(each)
        if settings.allowed_hosts is None and is_loopback(listening[0].getsockname()[0]):
            settings = replace(settings, allowed_hosts=())

        async def live() -> None:
            life = Life(options, settings, seat, listening, endpoint)
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, life.on_signal)
            await life.run()

        with suppress(asyncio.CancelledError):
            uvloop.run(live())
