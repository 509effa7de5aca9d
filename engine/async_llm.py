"""``AsyncLLM`` is the engine for asyncio programs, under vLLM's names.

A thread drives the engine while requests are open and sleeps when there are none.  The outputs of a
step go to each event loop in one call, which wakes the coroutines that wait for them.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import suppress
from threading import Thread, current_thread
from typing import TYPE_CHECKING, Any, cast

from ..config.ports import check_call
from .frontend.driver import Driver, Inbox
from .frontend.gc_pause import gc_paused
from .frontend.inputs import Prompt
from .frontend.loop import CheckedRequest, EngineLoop
from .frontend.outputs import Deltas, RequestOutput
from .llm import EngineWrapper
from .messages.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from .engine import Engine


class AsyncLLM(EngineWrapper):
    """A loaded model that generates for coroutines, of any number of event loops.

    ``async for output in AsyncLLM("abacus").generate("12+34=", params)``.  Its arguments are those
    of ``LLM``.  ``close``, or leaving a ``with`` block, ends its thread and frees its memory.

    Raises:
        UserError: an option is unknown or bad, or the model cannot be loaded.
    """

    def _attach(self, engine: EngineLoop) -> None:
        super()._attach(engine)
        self._stepper = _Stepper(self._driver)
        self._channels: dict[asyncio.AbstractEventLoop, _Channel] = {}
        # Also when the program ends, while the thread can still end well.
        self._stop = weakref.finalize(self, self._stepper.stop)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        final_only: bool = False,
        **ported: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the output so far, whenever it has grown since the last was asked for, or what
        ``output_kind`` of the parameters says.

        Leaving the loop, or cancelling its task, aborts the request.

        Args:
            request_id: unique among those that run; made up when None.
            priority: lower first; under ``scheduling_policy="priority"``.
            final_only: yield the finished output alone; cheaper.

        Raises:
            UserError: the prompt or its parameters are bad, the id is in use, or the engine is
                closed, before or while the request runs.
            EngineDeadError: the device is lost.
        """
        self.engine.check_open("AsyncLLM.generate")
        check_call("AsyncLLM.generate", ported)
        kind, deltas = self.engine.output_kind(sampling_params), Deltas()
        final_only = final_only or kind is RequestOutputKind.FINAL_ONLY
        request = self.engine.check_request(
            prompt, sampling_params, request_id, final_only=final_only, priority=priority
        )
        stream = _Stream(self._channel(), self._stepper)
        finished = False
        try:
            self._stepper.submit(request, stream)
            while not finished:
                output = await stream.next()
                finished = output.finished
                yield deltas.of(output) if kind is RequestOutputKind.DELTA else output
        finally:
            if not finished:
                self._stepper.open.discard(stream)
                self._driver.drop([request.request_id], stream)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; what they have is their last output.  Ids that do not run are ignored."""
        self._driver.abort([request_id] if isinstance(request_id, str) else request_id)

    async def get_tokenizer(self) -> Any:
        """The model's tokenizer, as ``LLM.get_tokenizer`` gives it.

        Raises:
            UserError: the model's folder has none.
        """
        return self._tokenizer()

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; requests that run go on.  Returns True."""
        return self._reset_prefix_cache()

    async def sleep(self, level: int = 1) -> None:
        """Free the device's memory, as ``LLM.sleep`` does.

        Raises:
            UserError: as there.
        """
        await asyncio.to_thread(self._sleep, level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """End the sleep, as ``LLM.wake_up`` does.

        Raises:
            UserError: as there.
        """
        await asyncio.to_thread(self._wake_up, tags)

    async def is_sleeping(self) -> bool:
        """Whether a part of the engine sleeps."""
        self.engine.check_open("AsyncLLM.is_sleeping")
        return cast("Engine", self.engine).is_sleeping

    def close(self) -> None:
        """Free what the model holds on the device and end the thread.  Requests that run end with
        a ``UserError``, and so does every later call."""
        self._stepper.closing = True
        super().close()
        self._stop()

    shutdown = close
    """The name under which vLLM has ``close``."""

    def _channel(self) -> _Channel:
        loop = asyncio.get_running_loop()
        channel = self._channels.get(loop)
        if channel is None:
            for other in [other for other in self._channels if other.is_closed()]:
                del self._channels[other]
            channel = self._channels.setdefault(loop, _Channel(loop))
        return channel


class _Stepper:
    """The thread that drives while requests are open."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.open: set[_Stream] = set()
        self.closing = False
        self._inbox = Inbox()
        self._inbox.add_bell()
        self._thread = Thread(target=self._run, name="fusewright-engine", daemon=True)
        self._thread.start()

    def submit(self, request: CheckedRequest, stream: _Stream) -> None:
        self.open.add(stream)
        self.driver.submit([request], stream)
        self._inbox.ring()
        if self.closing:
            self.driver.take_in()  # nobody else would: the engine refuses it

    def stop(self) -> None:
        self.closing = True
        self._inbox.ring()
        if self._thread is not current_thread():
            self._thread.join()

    def _run(self) -> None:
        with gc_paused() as added:
            added()
            while not self.closing:
                if not self.open:
                    self._inbox.sleep()
                    continue
                try:
                    self.driver.drive(self._inbox, self._is_idle)
                except Exception as error:
                    self._fail(error)

    def _is_idle(self) -> bool:
        return self.closing or not self.open

    def _fail(self, error: Exception) -> None:
        """A step that fails as a whole leaves nothing to wait for."""
        for stream in list(self.open):
            stream.fail(error)


class NobodyWaits(Exception):
    """The event loop was closed."""


class _Channel:
    """The way to an event loop from the thread that steps."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[tuple[_Stream, RequestOutput | Exception]] = deque()
        self._is_called = False

    def send(self, stream: _Stream, item: RequestOutput | Exception) -> None:
        """Show ``item`` to the coroutine of ``stream``; one call of the loop takes all that has
        come by then.

        Raises:
            NobodyWaits: the loop was closed.
        """
        self._items.append((stream, item))
        if not self._is_called:
            self._is_called = True
            try:
                self._loop.call_soon_threadsafe(self._show)
            except RuntimeError as error:
                self._is_called = False
                self._items.clear()
                raise NobodyWaits from error

    def _show(self) -> None:
        self._is_called = False
        while self._items:
            stream, item = self._items.popleft()
            stream.show(item)


class _Stream:
    """The sink of one request, whose coroutine takes the newest output."""

    def __init__(self, channel: _Channel, stepper: _Stepper) -> None:
        self._channel, self._stepper = channel, stepper
        self._newest: RequestOutput | Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        if output.finished:
            self._stepper.open.discard(self)
        try:
            self._channel.send(self, output)
        except NobodyWaits:
            self._stepper.open.discard(self)
            self._stepper.driver.drop([output.request_id], self)

    def fail(self, error: Exception) -> None:
        self._stepper.open.discard(self)
        with suppress(NobodyWaits):
            self._channel.send(self, error)

    def show(self, item: RequestOutput | Exception) -> None:
        self._newest = item
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> RequestOutput:
        while self._newest is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        item, self._newest = self._newest, None
        if isinstance(item, Exception):
            raise item
        return item
