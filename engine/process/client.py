"""``EngineClient``: engines in processes of their own, for the coroutines of one event loop.

``EngineLoop`` turns each message of a step into outputs, as it does with a core in its own process.
Several clients, in a process each, may share the engines: the first starts them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import zmq
from msgspec import Struct

from ...compiler.artifacts.scratch import scratch_folder
from ...config import EngineDeadError, EngineOptions, UserError
from ...config.process.logs import LogStyle
from ..frontend.inputs import InputProcessor, Prompt, input_processor, read_tokenizer
from ..frontend.loop import CheckedRequest, EngineLoop
from ..frontend.outputs import RequestOutput
from ..frontend.tokenizer import Tokenizer
from ..grammar.checks import GrammarChecks, grammar_setup, is_installed
from ..messages.codec import decode
from ..messages.requests import CoreStats, StepOutputs
from ..messages.sampling_params import SamplingParams
from .awake import Awake
from .output_stream import OutputStream
from .peers import Peers
from .remote_core import RemoteCore
from .replica import Replica
from .router import Router
from .wire import (
    Counters,
    Failed,
    Kind,
    Ready,
    Report,
    Seat,
    make_socket,
    outputs_address,
    unframed,
)

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_FRAMES_AT_ONCE = 8
"""Frames that are read before other coroutines run."""
_SHORT_TEXT = 1000
"""Characters of a prompt that are encoded at once: a thread would take longer to wake up."""
_TOKENIZER_THREADS = 4
_QUEUED_AT_ONCE = 64
"""Requests of a call that are queued before other coroutines run, which takes about 2 ms."""
_FEW = 4
"""Open outputs up to which the event loop does not sleep behind a request: more keep it busy."""
_ALONE, _LOG = Seat(), LogStyle(level="warning")


class EngineClient:
    """Starts the engines' processes, or finds them, and generates with them.

    ``start`` returns at once and ``ready`` when the engines have started; ``stop`` ends the
    processes.  All methods are called on one event loop.

    Args:
        options: options of each engine, checked by ``check_start``.
        seat: this client's place among those that share the engines.
        log: how the engines log.
        on_death: called once if a process ends unasked.
    """

    def __init__(
        self,
        options: EngineOptions,
        seat: Seat = _ALONE,
        *,
        log: LogStyle = _LOG,
        on_death: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.options, self.seat, self._log = options, seat, log
        self.on_death = on_death
        self.on_step: Callable[[StepOutputs], None] = lambda outputs: None
        """Called with each step's message, after its outputs were shown."""
        self.on_finished: Callable[[RequestOutput], None] = lambda output: None
        """Called with the last output of each request."""
        self.dead: Exception | None = None
        """Why no request is served any more; None while they are."""
        self.exit_code = 1
        """What this program's exit code should be when ``dead``."""
        self.is_ready = False
        self.max_num_seqs = 0
        """Outputs that run at once, of all replicas together."""
        self.replicas: list[Replica] = []
        self._stack, self._folder = ExitStack(), ExitStack()
        self._streams: dict[str, OutputStream] = {}
        self._numbers = itertools.count()
        self._num_unqueued = 0
        self._stopping = False

    def start(self) -> None:
        """Start the processes.

        Raises:
            UserError: no temporary folder can be made, or there are too few GPUs.
        """
        seat = self.seat
        self._event_loop = asyncio.get_running_loop()
        self._awake = Awake(self._event_loop)
        starts = seat.index == 0
        self.folder = self._folder.enter_context(scratch_folder()) if starts else Path(seat.folder)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._stack.callback(context.destroy, linger=0)
        self._outputs = make_socket(context, zmq.PULL)
        try:
            self._outputs.bind(outputs_address(self.folder, seat.index))
        except zmq.ZMQError as error:
            raise UserError(
                f"{self.folder}: no socket can be made there: {error}; set TMPDIR to a shorter path"
            ) from error
        self.peers = Peers(seat, self.folder, context)
        for number in range(seat.num_replicas):
            start = (self.options, self._log) if starts else None
            self.replicas.append(Replica(number, seat, self.folder, context, start, self._on_exit))
        self._pool = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="tokenizer")
        self._tokenizer = self._event_loop.run_in_executor(self._pool, self._load_tokenizer)
        self._event_loop.add_reader(self._outputs.fileno(), self._read)
        self._event_loop.call_soon(self._read)

    def _load_tokenizer(self) -> tuple[Tokenizer | None, Path]:
        return read_tokenizer(self.options)

    async def ready(self) -> None:
        """Wait until the engines have started.

        Raises:
            EngineDeadError: one could not; the message says why.
        """
        told = await asyncio.gather(*(replica.ready for replica in self.replicas))
        least: Ready = min(told, key=lambda ready: ready.limits.num_blocks)
        tokenizer, folder = await self._tokenizer
        setup = grammar_setup(folder / "tokenizer.json", least.vocab_size, least.eos_token_ids)
        grammars = GrammarChecks(setup)
        self._stack.callback(grammars.close)
        if tokenizer is not None and is_installed():
            grammars.start()
        sizes = (least.vocab_size, least.max_model_len)
        inputs = input_processor(self.options, *sizes, (tokenizer, folder), grammars)
        num_blocks = least.limits.num_blocks if self.options.enable_prefix_caching else 0
        router = Router(len(self.replicas), num_blocks, least.limits.block_size)
        self.core = RemoteCore(self._send, router, least.limits, self._stats)
        self.loop = EngineLoop(
            core=self.core, inputs=inputs, eos_token_ids=least.eos_token_ids, shares_lists=True
        )
        self.loop.stats = None
        self.max_num_seqs = sum(ready.max_num_seqs for ready in told)
        self.is_ready = True

    async def connected(self) -> list[dict[str, Any]]:
        """Wait until everybody is heard by everybody; returns each engine's report.

        Raises:
            EngineDeadError: an engine has ended.
        """
        reports = await self.ask()
        await self.peers.ask("", [], None)
        return reports

    def leave_folder(self) -> None:
        """Remove the folder of the sockets when all are connected: nothing is left there for a
        killed process to leave."""
        self._folder.close()

    @property
    def inputs(self) -> InputProcessor:
        return self.loop.inputs

    @property
    def num_open(self) -> int:
        """Number of outputs that are still generated, or about to be queued."""
        return self.core.num_unfinished + self._num_unqueued if self.is_ready else 0

    def num_open_at(self, replica: int) -> int:
        return self.core.num_open_at(replica) if self.is_ready else 0

    async def in_thread(self, work: Callable[[], _T]) -> _T:
        return await self._event_loop.run_in_executor(self._pool, work)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, in a thread if it is long.

        Raises:
            UserError: there is no tokenizer, or the text is too long.
        """
        encode = partial(self.inputs.encode, text, add_special_tokens=add_special_tokens)
        return await self.in_thread(encode) if len(text) > _SHORT_TEXT else encode()

    async def check(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        final_only: bool = False,
        priority: int = 0,
        call: str = "",
    ) -> CheckedRequest:
        """Encode and check a prompt, in a thread if it is long text.  Prompts with the same
        ``call``, which no other client has, wait as one.

        Raises:
            UserError: the prompt or a parameter is bad.
            EngineDeadError: the engine has ended.
        """
        self._check_alive()
        check = partial(
            self.loop.check_request,
            prompt,
            params,
            f"{self.seat.index}-{next(self._numbers)}",  # no other client's
            final_only=final_only,
            priority=priority,
            call=call and f"{self.seat.index}-{call}",
        )
        text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
        is_long = isinstance(text, str) and len(text) > _SHORT_TEXT
        grammars = self.inputs.grammars
        if params.grammar is not None and grammars is not None and self.inputs.tokenizer:
            # No thread waits until it is compiled: those encode what others send.
            tried = await self.in_thread(partial(grammars.soon, params.grammar))
            await asyncio.wrap_future(tried)
        if is_long or params.grammar is not None or params.bad_texts:
            return await self.in_thread(check)
        return check()

    def submit(self, requests: Sequence[CheckedRequest]) -> OutputStream:
        """Queue requests; where they are many, most of them behind what the event loop has to do.

        Raises:
            EngineDeadError: the engine has ended.
        """
        self._check_alive()
        stream = OutputStream([request.request_id for request in requests])
        self._num_unqueued += sum(request.num_outputs for request in requests)
        self._queue(stream, deque(requests))
        if self.num_open <= _FEW:
            self._awake.stay()
        else:
            self._awake.sleep()
        return stream

    def _queue(self, stream: OutputStream, requests: deque[CheckedRequest]) -> None:
        """Queue some requests that have not been aborted, and leave the others for later."""
        try:
            for _ in range(min(len(requests), _QUEUED_AT_ONCE)):
                request = requests.popleft()
                self._num_unqueued -= request.num_outputs
                if request.request_id in stream.open:
                    self.loop.queue(request)
                    self._streams[request.request_id] = stream
        except Exception as error:
            self.abort(stream)
            stream.fail(error)
        if requests:
            self._event_loop.call_soon(self._queue, stream, requests)

    def abort(self, stream: OutputStream) -> None:
        """End the requests of a stream at once; nothing more is shown of them."""
        for request_id in stream.open:
            self._streams.pop(request_id, None)
        self.loop.drop(stream.open)
        stream.open.clear()

    def abort_all(self, error: Exception) -> None:
        """End all requests; whoever waits for one gets ``error``."""
        for stream in set(self._streams.values()):
            self.abort(stream)
            stream.fail(error)

    async def ask(
        self, kind: Kind = Kind.REPORT, message: Struct | None = None
    ) -> list[dict[str, Any]]:
        """Ask each engine; it answers with its ``Engine.report()``, or as another kind has it.

        Raises:
            EngineDeadError: an engine has ended.
        """
        self._check_alive()
        answers: list[asyncio.Future[dict[str, Any]]]
        answers = [self._event_loop.create_future() for _ in self.replicas]
        for replica, answer in zip(self.replicas, answers, strict=True):
            replica.reports.append(answer)
            replica.send(kind, message)
        return await asyncio.gather(*answers)

    async def stop(self, timeout_s: float = 5.0) -> None:
        """End the processes, by force after ``timeout_s`` or if they have not started yet."""
        if self._stopping:
            return
        self._stopping = True
        in_order = self.is_ready and self.dead is None
        for replica in self.replicas if in_order and self.seat.index == 0 else ():
            replica.send(Kind.STOP)
        await asyncio.gather(*(r.stop(timeout_s if in_order else 0) for r in self.replicas))
        if self.replicas:
            self._event_loop.remove_reader(self._outputs.fileno())
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._stack.close()
        self._folder.close()

    def _send(self, replica: int, kind: Kind, message: Struct) -> None:
        self.replicas[replica].send(kind, message)

    @property
    def counters(self) -> list[Counters]:
        """The newest counters of each replica that has sent some, in the order of their numbers."""
        return [replica.counters for replica in self.replicas if replica.counters is not None]

    @property
    def is_sleeping(self) -> bool:
        return any(counters.is_sleeping for counters in self.counters)

    def _stats(self) -> CoreStats:
        return self.counters[0].core

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
            self._handle(*unframed(data))
        self._event_loop.call_soon(self._read)

    def _handle(self, kind: Kind, sender: int, body: memoryview) -> None:
        if kind in (Kind.QUESTION, Kind.ANSWER):
            self.peers.handle(kind, sender, body)
            return
        replica = self.replicas[sender]
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
            replica.counters = decode(body, Counters)
        elif kind is Kind.READY:
            replica.ready.set_result(decode(body, Ready))
        elif kind is Kind.REPORT:
            replica.reports.pop(0).set_result(decode(body, Report).facts)
        elif kind is Kind.FAILED:
            failed = decode(body, Failed)
            self.exit_code = failed.exit_code
            self.die(failed.message)

    def _show(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.show(output)
                if output.finished:
                    del self._streams[output.request_id]
                    self.on_finished(output)

    def _on_exit(self, replica: Replica, how: str) -> None:
        """A process has ended; its last frames may still lie in the socket."""
        while not self._outputs.closed and self._outputs.poll(0):
            self._read()
        name = f" of replica {replica.number}" if len(self.replicas) > 1 else ""
        self.die(f"the engine's process{name} has ended ({how}); restart the server")

    def die(self, message: str) -> None:
        """Fail all requests, now and for good, unless that has happened or ``stop`` was called."""
        if self.dead is not None or self._stopping:
            return
        error = self.dead = EngineDeadError(message)
        if self.is_ready:
            self.core.fail(error)
            self.abort_all(error)
        for replica in self.replicas:
            replica.fail(error)
        self.on_death(error)
