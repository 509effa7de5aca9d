"""``EngineClient``: an engine in a process of its own, for the coroutines of one event loop.

``EngineLoop`` turns each message of a step into outputs, as it does with a core in its own process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from ...compiler.artifacts.scratch import scratch_folder
from ...config import EngineDeadError, EngineOptions, UserError
from ...model_executor.hf_config import model_folder
from ..frontend.inputs import InputProcessor, Prompt
from ..frontend.loop import CheckedRequest, EngineLoop
from ..frontend.outputs import RequestOutput
from ..frontend.tokenizer import Tokenizer, load_tokenizer
from ..messages.codec import decode
from ..messages.requests import CoreStats, StepOutputs
from ..messages.sampling_params import SamplingParams
from .heartbeat import Heartbeat
from .remote_core import RemoteCore
from .wire import (
    Counters,
    Failed,
    Kind,
    Ready,
    Report,
    frame,
    make_socket,
    outputs_address,
    requests_address,
)

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_FRAMES_AT_ONCE = 8
"""Frames that are read before other coroutines run."""
_SHORT_TEXT = 1000
"""Characters of a prompt that are encoded at once: a thread would take longer to wake up."""
_TOKENIZER_THREADS = 4


class OutputStream:
    """The outputs of a caller's requests, for one coroutine.  It takes the newest of each: what
    came while it was busy is one item."""

    def __init__(self, request_ids: Sequence[str]) -> None:
        self.open = set(request_ids)
        """The requests that have not finished."""
        self._newest: dict[str, RequestOutput] = {}
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def show(self, output: RequestOutput) -> None:
        """Replace the output of its request that waits to be taken."""
        self._newest[output.request_id] = output
        if output.finished:
            self.open.discard(output.request_id)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Have ``next`` raise ``error``, now and for good."""
        self._error = error
        self.open.clear()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def is_done(self) -> bool:
        """Whether the last output of every request was taken."""
        return not self.open and not self._newest and self._error is None

    async def next(self) -> list[RequestOutput]:
        """Wait for outputs that are newer than those taken; not to be called when ``is_done``.

        Raises:
            EngineDeadError: none will come.
        """
        while not self._newest:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        taken, self._newest = self._newest, {}
        return list(taken.values())


class EngineClient:
    """Starts the engine's process and generates with it.

    ``start`` returns at once and ``ready`` when the engine has started; ``stop`` ends the process.
    All methods are called on one event loop.

    Args:
        options: of the engine, checked by ``check_start``.
        on_step: called with each step's message, after its outputs were shown.
        on_death: called once if the process ends unasked.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        on_step: Callable[[StepOutputs], None] = lambda outputs: None,
        on_death: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.options = options
        self.on_step, self.on_death = on_step, on_death
        self.counters: Counters | None = None
        self.dead: EngineDeadError | None = None
        """Why the process has ended; None while it has not."""
        self.exit_code = 1
        """What this program's exit code should be when ``dead``."""
        self.is_ready = False
        self.max_num_seqs = 0
        self._stack, self._folder = ExitStack(), ExitStack()
        self._streams: dict[str, OutputStream] = {}
        self._reports: list[asyncio.Future[dict[str, Any]]] = []
        self._stopping = False

    def start(self) -> None:
        """Start the process.

        Raises:
            UserError: no temporary folder can be made.
        """
        self._event_loop = asyncio.get_running_loop()
        folder = self._folder.enter_context(scratch_folder())
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stack.callback(context.destroy, linger=0)
        self._outputs = make_socket(context, zmq.PULL)
        self._requests = make_socket(context, zmq.PUSH)
        try:
            self._outputs.bind(outputs_address(folder))
            self._requests.connect(requests_address(folder))
        except zmq.ZMQError as error:
            raise UserError(
                f"{folder}: no socket can be made there: {error}; set TMPDIR to a shorter path"
            ) from error
        self.heartbeat = Heartbeat(folder / "heartbeat")
        self._process = self._spawn(folder)
        self._exited = os.pidfd_open(self._process.pid)
        self._pool = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="tokenizer")
        self._started = self._event_loop.create_future()
        self._tokenizer = self._event_loop.run_in_executor(self._pool, self._load_tokenizer)
        self._event_loop.add_reader(self._outputs.fileno(), self._read)
        self._event_loop.add_reader(self._exited, self._on_exit)
        self._event_loop.call_soon(self._read)

    def _spawn(self, folder: Path) -> subprocess.Popen[bytes]:
        options = msgspec.json.encode(self.options).decode()
        return subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", f"{__package__}.child"),
                *(str(folder), str(os.getpid()), options),
            ],
            stdin=subprocess.DEVNULL,
        )

    def _load_tokenizer(self) -> tuple[Tokenizer | None, Path]:
        folder = model_folder(self.options.tokenizer or self.options.model)
        return load_tokenizer(folder), folder

    async def ready(self) -> None:
        """Wait until the engine has started.

        Raises:
            EngineDeadError: it could not; the message says why.
        """
        ready: Ready = await self._started
        self._folder.close()  # both are connected; nothing is left for a killed process to leave
        tokenizer, folder = await self._tokenizer
        inputs = InputProcessor(tokenizer, folder, ready.vocab_size, ready.max_model_len)
        self.core = RemoteCore(self._send, ready.limits, self._stats)
        self.loop = EngineLoop(core=self.core, inputs=inputs, eos_token_ids=ready.eos_token_ids)
        self.loop.stats = None
        self.max_num_seqs = ready.max_num_seqs
        self.is_ready = True

    @property
    def inputs(self) -> InputProcessor:
        return self.loop.inputs

    @property
    def pid(self) -> int:
        """The engine's process."""
        return self._process.pid

    @property
    def num_open(self) -> int:
        """Number of outputs that are still generated."""
        return self.core.num_unfinished if self.is_ready else 0

    async def in_thread(self, work: Callable[[], _T]) -> _T:
        """Run what would hold up the event loop."""
        return await self._event_loop.run_in_executor(self._pool, work)

    async def check(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        final_only: bool = False,
        priority: int = 0,
    ) -> CheckedRequest:
        """Encode and check a prompt, in a thread if it is long text.

        Raises:
            UserError: the prompt or a parameter is bad.
            EngineDeadError: the engine has ended.
        """
        self._check_alive()
        check = partial(
            self.loop.check_request, prompt, params, final_only=final_only, priority=priority
        )
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        if params.grammar is not None or (isinstance(text, str) and len(text) > _SHORT_TEXT):
            return await self.in_thread(check)
        return check()

    def submit(self, requests: Sequence[CheckedRequest]) -> OutputStream:
        """Queue requests.

        Raises:
            EngineDeadError: the engine has ended.
        """
        self._check_alive()
        stream = OutputStream([request.request_id for request in requests])
        for request in requests:
            self.loop.queue(request)
            self._streams[request.request_id] = stream
        return stream

    def abort(self, stream: OutputStream) -> None:
        """End the requests of a stream at once; nothing more is shown of them."""
        for request_id in stream.open:
            self._streams.pop(request_id, None)
            self.loop.abort(request_id)
        stream.open.clear()

    def abort_all(self, error: Exception) -> None:
        """End all requests; whoever waits for one gets ``error``."""
        for stream in set(self._streams.values()):
            self.abort(stream)
            stream.fail(error)

    async def report(self) -> dict[str, Any]:
        """``Engine.report()`` of the other process.

        Raises:
            EngineDeadError: the engine has ended.
        """
        self._check_alive()
        answer: asyncio.Future[dict[str, Any]] = self._event_loop.create_future()
        self._reports.append(answer)
        self._send(frame(Kind.REPORT))
        return await answer

    async def stop(self, timeout_s: float = 5.0) -> None:
        """End the process, by force after ``timeout_s`` or if it has not started yet."""
        if self._stopping or not hasattr(self, "_process"):
            self._close_files()
            return
        self._stopping = True
        if self.is_ready and self.dead is None:
            with suppress(zmq.ZMQError):
                self._send(frame(Kind.STOP))
            with suppress(subprocess.TimeoutExpired):
                await self.in_thread(partial(self._process.wait, timeout_s))
        if self._process.poll() is None:
            self._process.kill()
            await self.in_thread(self._process.wait)
        self._event_loop.remove_reader(self._outputs.fileno())
        self._event_loop.remove_reader(self._exited)
        os.close(self._exited)
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._close_files()

    def _close_files(self) -> None:
        self._stack.close()
        self._folder.close()

    def _send(self, data: bytes) -> None:
        self._requests.send(data, zmq.NOBLOCK)

    def _stats(self) -> CoreStats:
        assert self.counters is not None, "a step has been counted before anybody asks"
        return self.counters.core

    def _check_alive(self) -> None:
        if self.dead is not None:
            raise self.dead

    def _read(self) -> None:
        """Take the frames that have come.  The socket's file descriptor tells of new ones only
        once all are taken."""
        if self._outputs.closed:
            return
        for _ in range(_FRAMES_AT_ONCE):
            try:
                data = self._outputs.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(Kind(data[0]), memoryview(data)[1:])
        self._event_loop.call_soon(self._read)

    def _handle(self, kind: Kind, body: memoryview) -> None:
        if kind is Kind.STEP:
            outputs = decode(body, StepOutputs)
            self.core.arrived.append(outputs)
            try:
                self._show(self.loop.step())
            except Exception as error:  # a bug: nobody may wait for ever for its consequence
                _log.exception("a step's outputs could not be read")
                self.abort_all(error)
            self.on_step(outputs)
        elif kind is Kind.COUNTERS:
            self.counters = decode(body, Counters)
        elif kind is Kind.READY:
            self._started.set_result(decode(body, Ready))
        elif kind is Kind.REPORT:
            self._reports.pop(0).set_result(decode(body, Report).facts)
        elif kind is Kind.FAILED:
            failed = decode(body, Failed)
            self.exit_code = failed.exit_code
            self._die(failed.message)

    def _show(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.show(output)
                if output.finished:
                    del self._streams[output.request_id]

    def _on_exit(self) -> None:
        """The process has ended; its last frames may still lie in the socket."""
        self._event_loop.remove_reader(self._exited)
        while not self._outputs.closed and self._outputs.poll(0):
            self._read()
        code = self._process.wait()
        if self._stopping or self.dead is not None:
            return
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._die(f"the engine's process has ended ({how}); restart the server")

    def _die(self, message: str) -> None:
        if self.dead is not None:
            return
        error = self.dead = EngineDeadError(message)
        if self.is_ready:
            self.core.fail(error)
            self.abort_all(error)
        for answer in self._reports:
            if not answer.done():
                answer.set_exception(error)
        if not self._started.done():
            self._started.set_exception(error)
        self.on_death(error)
