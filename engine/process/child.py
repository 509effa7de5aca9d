"""The engine's process: takes requests from a socket, steps, and sends one message a step back.

Run as ``python -m fusewright.engine.process.child FOLDER PARENT_PID OPTIONS``, where OPTIONS are
``EngineOptions`` as JSON.  It ends with its parent, whatever ends that.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

import msgspec
import zmq

from ...config import EngineDeadError, EngineOptions, UserError
from ..frontend.gc_pause import gc_paused
from ..messages.codec import decode
from ..messages.requests import AbortRequests, AddRequest, Core, Finished, StepOutputs
from ..ranks.lifetime import Failure, end_with, leave_signals_to_the_parent
from .heartbeat import Heartbeat
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

_TAKEN_AT_ONCE = 32
"""Requests taken in between two steps, which takes about a millisecond."""
_BEAT_S = 0.5
"""Longest time between two beats at rest, in seconds."""
_COUNTERS_S = 0.1
"""Least time between two messages of counters, in seconds."""


class CoreServer:
    """Steps a core for the frontend behind two sockets.

    Args:
        core: what runs the requests.
        inbox, outbox: requests and aborts come in, outputs go out.
        heartbeat: is written at every step, and at rest twice a second.
        at_rest: does a piece of work that can wait; returns False if there is none.
        report: what ``REPORT`` is answered with.
        step_kinds: as in ``Counters``.
    """

    def __init__(
        self,
        core: Core,
        inbox: zmq.Socket[bytes],
        outbox: zmq.Socket[bytes],
        heartbeat: Heartbeat,
        *,
        at_rest: Callable[[], bool] = lambda: False,
        report: Callable[[], dict[str, object]] = dict,
        step_kinds: Callable[[], dict[str, int]] = dict,
    ) -> None:
        self._core, self._inbox, self._outbox = core, inbox, outbox
        self._heartbeat, self._at_rest = heartbeat, at_rest
        self._report, self._step_kinds = report, step_kinds
        self._stopping = False
        self._num_steps, self._step_s, self._rest_s = 0, 0.0, 0.0
        self._counted_at = 0.0

    def run(self) -> None:
        """Serve until ``STOP`` comes.

        Raises:
            EngineDeadError: the device is lost.
        """
        while not self._stopping:
            self._take_in()
            if self._core.num_unfinished:
                self._step()
            elif not self._stopping:
                self._rest()

    def _step(self) -> None:
        self._num_steps += 1
        self._heartbeat.beat(self._num_steps)
        start = time.monotonic()
        outputs = self._core.step()
        now = time.monotonic()
        self._step_s += now - start
        if not outputs.is_empty:
            self._outbox.send(frame(Kind.STEP, outputs), zmq.NOBLOCK)
        if now - self._counted_at > _COUNTERS_S or not self._core.num_unfinished:
            self._send_counters(now)

    def _send_counters(self, now: float) -> None:
        self._counted_at = now
        counters = Counters(
            core=self._core.stats(),
            num_steps=self._num_steps,
            step_s=self._step_s,
            rest_s=self._rest_s,
            step_kinds=self._step_kinds(),
        )
        self._outbox.send(frame(Kind.COUNTERS, counters), zmq.NOBLOCK)

    def _rest(self) -> None:
        """Do what can wait until a message comes, or sleep."""
        start = time.monotonic()
        self._heartbeat.beat(self._num_steps)
        timeout_ms = 0 if self._at_rest() else int(_BEAT_S * 1e3)
        self._inbox.poll(timeout_ms)
        self._rest_s += time.monotonic() - start

    def _take_in(self) -> None:
        for _ in range(_TAKEN_AT_ONCE):
            try:
                data = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(Kind(data[0]), memoryview(data)[1:])

    def _handle(self, kind: Kind, body: memoryview) -> None:
        if kind is Kind.ADD:
            self._add(decode(body, AddRequest))
        elif kind is Kind.ABORT:
            self._core.abort(decode(body, AbortRequests))
            if not self._core.num_unfinished:
                self._send_counters(time.monotonic())
        elif kind is Kind.REPORT:
            self._outbox.send(frame(Kind.REPORT, Report(self._report())), zmq.NOBLOCK)
        elif kind is Kind.STOP:
            self._stopping = True

    def _add(self, request: AddRequest) -> None:
        try:
            self._core.add(request)
        except EngineDeadError:
            raise
        except UserError as error:
            refused = Finished(request.request_id, "error", 0, error=str(error))
            self._outbox.send(frame(Kind.STEP, StepOutputs(None, [refused], [])), zmq.NOBLOCK)


def main(argv: list[str]) -> int:
    """Run the engine's process; returns its exit code."""
    folder, parent_pid, options = Path(argv[0]), int(argv[1]), argv[2]
    end_with(parent_pid)
    leave_signals_to_the_parent()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox, outbox = make_socket(context, zmq.PULL), make_socket(context, zmq.PUSH)
    inbox.bind(requests_address(folder))
    outbox.connect(outputs_address(folder))
    heartbeat = Heartbeat(folder / "heartbeat")
    heartbeat.beat(0)
    try:
        _serve(msgspec.json.decode(options, type=EngineOptions), inbox, outbox, heartbeat)
        return 0
    except Exception as error:
        failure = Failure.of(error)
        sys.stderr.write(failure.traceback)
        failed = Failed(failure.message, failure.exit_code)
        outbox.send(frame(Kind.FAILED, failed))
        outbox.close(linger=2000)
        context.term()
        # Not sys.exit: torch would free its graphs, find a lost device, and abort.
        os._exit(failed.exit_code)


def _serve(
    options: EngineOptions,
    inbox: zmq.Socket[bytes],
    outbox: zmq.Socket[bytes],
    heartbeat: Heartbeat,
) -> None:
    # Only now, when this process ends with its parent: the import of torch takes seconds.
    from ..engine import Engine

    engine = Engine(options)
    core = engine.core
    ready = Ready(
        vocab_size=engine.inputs.vocab_size,
        max_model_len=engine.inputs.max_model_len,
        eos_token_ids=engine.eos_token_ids,
        limits=core.scheduler.limits,
        max_num_seqs=core.scheduler.max_num_seqs,
    )

    def step_kinds() -> dict[str, int]:
        counts = engine.dispatcher.counters.items()
        return {f"{step}/{graph}": count for (step, graph), count in counts}

    server = CoreServer(
        core,
        inbox,
        outbox,
        heartbeat,
        at_rest=engine.capture_next,
        report=engine.report,
        step_kinds=step_kinds,
    )
    if find_spec("llguidance") is not None and engine.inputs.tokenizer is not None:
        # Else the first request with a grammar would hold up the steps of the others.
        Thread(target=engine.grammars.load, daemon=True).start()
    with gc_paused() as added, engine.on_device():
        added()
        outbox.send(frame(Kind.READY, ready))
        server.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
