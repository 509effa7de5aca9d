"""The engine's process: takes requests from a socket, steps, and sends one message a step back to
each frontend that waits for a part of it.

Run as ``python -m fusewright.engine.process.child FOLDER PARENT_PID PLACE OPTIONS``, where PLACE is
a ``Place`` and OPTIONS are ``EngineOptions``, both as JSON.  It ends when its parent does, for
whatever reason.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import msgspec
import zmq
from msgspec import Struct

from ...config import EngineDeadError, EngineOptions, UserError, collecting_rarely
from ...config.process.logs import write_log
from ..frontend.gc_pause import gc_paused
from ..grammar.checks import is_installed
from ..importing import importing
from ..messages.codec import decode
from ..messages.open_outputs import output_id
from ..messages.requests import AbortRequests, Core, Finished, StepOutputs
from ..ranks.executor import started_ranks
from ..ranks.lifetime import Failure, end_with, leave_signals_to_the_parent
from .awake import AWAKE_S
from .backlog import Backlog
from .heartbeat import Heartbeat
from .owners import Owners
from .wire import (
    Counters,
    Failed,
    Kind,
    Place,
    Queued,
    Ready,
    Report,
    Sleep,
    frame,
    heartbeat_path,
    make_socket,
    outputs_address,
    requests_address,
    unframed,
)

_log = logging.getLogger(__name__)
_BEAT_S = 0.5
"""Longest time between two beats at rest, in seconds."""
_COUNTERS_S = 0.1
"""Least time between two messages of counters, in seconds."""


@dataclass(frozen=True)
class Served:
    """An engine, as its process needs it.

    Attributes:
        core: runs the requests.
        at_rest: does a piece of work that can wait; returns False if there is none.
        report: returns the answer to ``REPORT``.
        reset: forgets all cached prefixes.
        step_kinds, is_sleeping: as in ``Counters``.
        sleep: does what a ``Sleep`` asks for.
    """

    core: Core
    at_rest: Callable[[], bool] = lambda: False
    report: Callable[[], dict[str, object]] = dict
    reset: Callable[[], object] = bool
    step_kinds: Callable[[], dict[str, int]] = dict
    is_sleeping: Callable[[], bool] = lambda: False
    sleep: Callable[[Sleep], None] = lambda asked: None


class CoreServer:
    """Steps a core for the frontends behind their sockets.

    Args:
        inbox: brings requests and aborts.
        outboxes: take outputs, one socket for each frontend.
        heartbeat: is written at every step, and at rest twice a second.
        replica: the number of this engine.
        quiet_s: seconds after a step in which ``at_rest`` is not called and this process does not
            sleep: whoever has an answer may send a next request.  Before the first request,
            ``at_rest`` is called at once.
    """

    def __init__(
        self,
        served: Served,
        inbox: zmq.Socket[bytes],
        outboxes: Sequence[zmq.Socket[bytes]],
        heartbeat: Heartbeat,
        *,
        replica: int = 0,
        quiet_s: float = AWAKE_S,
    ) -> None:
        self._served, self._core = served, served.core
        self._inbox, self._outboxes = inbox, outboxes
        self._replica, self._owners = replica, Owners(len(outboxes))
        self._backlog, self._heartbeat = Backlog(), heartbeat
        self._quiet_s, self._quiet_from = quiet_s, 0.0
        self._stopping = False
        self._num_steps, self._step_s, self._rest_s = 0, 0.0, 0.0
        self._counted_at = 0.0

    def run(self) -> None:
        """Serve until ``STOP`` comes.

        Raises:
            EngineDeadError: the device is lost.
        """
        self._send_counters(time.monotonic())
        while not self._stopping:
            self._take_in()
            if self._core.num_unfinished:
                self._step()
            elif not self._stopping and not self._backlog:
                self._rest()

    def _step(self) -> None:
        self._num_steps += 1
        self._heartbeat.beat(self._num_steps)
        start = time.monotonic()
        outputs = self._core.step()
        now = time.monotonic()
        self._step_s += now - start
        self._quiet_from = now + self._quiet_s
        if not outputs.is_empty:
            for frontend, part in self._owners.split(outputs):
                self._send(frontend, Kind.STEP, part)
        if now - self._counted_at > _COUNTERS_S or not self._core.num_unfinished:
            self._send_counters(now)

    def _send_counters(self, now: float) -> None:
        self._counted_at = now
        counters = Counters(
            core=self._core.stats(),
            num_backlog=self._backlog.num_outputs,
            num_steps=self._num_steps,
            step_s=self._step_s,
            rest_s=self._rest_s,
            step_kinds=self._served.step_kinds(),
            is_sleeping=self._served.is_sleeping(),
        )
        for frontend in range(len(self._outboxes)):
            self._send(frontend, Kind.COUNTERS, counters)

    def _send(self, frontend: int, kind: Kind, message: Struct) -> None:
        self._outboxes[frontend].send(frame(kind, self._replica, message), zmq.NOBLOCK)

    def _rest(self) -> None:
        """Without unfinished requests: do work that can wait, or sleep until a message comes."""
        start = time.monotonic()
        self._heartbeat.beat(self._num_steps)
        if not self._comes_soon():
            self._inbox.poll(0 if self._served.at_rest() else ceil(_BEAT_S * 1e3))
        self._rest_s += time.monotonic() - start

    def _comes_soon(self) -> bool:
        """Look for a message until ``quiet_s`` after the last step, without sleeping: to wake up
        takes longer than to send a message."""
        while time.monotonic() < self._quiet_from:
            if self._inbox.poll(0):
                return True
            os.sched_yield()  # whoever else wants this processor comes first
        return False

    def _take_in(self) -> None:
        """Read all that has come, and have the core take up what may be at once."""
        had_backlog = bool(self._backlog)
        while not self._stopping:
            try:
                data = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._handle(*unframed(data))
        for queued, frontend in self._backlog.take():
            self._add(queued, frontend)
        if had_backlog and not self._backlog and not self._core.num_unfinished:
            self._send_counters(time.monotonic())

    def _handle(self, kind: Kind, frontend: int, body: memoryview) -> None:
        if kind is Kind.ADD:
            self._backlog.add(decode(body, Queued), frontend)
        elif kind is Kind.ABORT:
            self._abort(decode(body, AbortRequests))
        elif kind is Kind.REPORT:
            self._send(frontend, Kind.REPORT, Report(self._served.report()))
        elif kind is Kind.SLEEP:
            self._sleep(decode(body, Sleep), frontend)
        elif kind is Kind.RESET:
            self._served.reset()
            self._send(frontend, Kind.REPORT, Report({}))
        elif kind is Kind.STOP:
            self._stopping = True

    def _sleep(self, asked: Sleep, frontend: int) -> None:
        error = ""
        try:
            self._served.sleep(asked)
        except EngineDeadError:
            raise
        except UserError as refusal:
            error = str(refusal)
        self._send_counters(time.monotonic())  # all frontends know before the answer comes
        self._send(frontend, Kind.REPORT, Report({"error": error}))

    def _abort(self, asked: AbortRequests) -> None:
        begun = [name for name in asked.request_ids if not self._backlog.drop(name)]
        if not begun:
            return
        self._core.abort(AbortRequests(begun))
        self._owners.forget(begun)
        if not self._core.num_unfinished:
            self._send_counters(time.monotonic())

    def _add(self, queued: Queued, frontend: int) -> None:
        request = queued.read()
        try:
            self._core.add(request)
            self._owners.add(request, frontend)
        except EngineDeadError:
            raise
        except Exception as error:  # of one request, whatever it is
            message = str(error) if isinstance(error, UserError) else repr(error)
            of_caller = isinstance(error, UserError)
            request_id, n = request.request_id, request.sampling_params.n
            refused = [
                Finished(output_id(request_id, i, n), "error", 0, error=message, refused=of_caller)
                for i in request.indices
            ]
            self._send(frontend, Kind.STEP, StepOutputs(None, refused, []))


def main(argv: list[str]) -> int:
    """Run the engine's process; returns its exit code."""
    folder, parent_pid, options = Path(argv[0]), int(argv[1]), argv[3]
    place = msgspec.json.decode(argv[2], type=Place)
    write_log(place.log)
    end_with(parent_pid)
    leave_signals_to_the_parent()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox = make_socket(context, zmq.PULL)
    inbox.bind(requests_address(folder, place.replica))
    outboxes = [make_socket(context, zmq.PUSH) for _ in range(place.num_frontends)]
    for frontend, outbox in enumerate(outboxes):
        outbox.connect(outputs_address(folder, frontend))
    heartbeat = Heartbeat(heartbeat_path(folder, place.replica))
    heartbeat.beat(0)
    try:
        asked = msgspec.json.decode(options, type=EngineOptions)
        _serve(asked, place, inbox, outboxes, heartbeat)
        return 0
    except Exception as error:
        failure = Failure.of(error)
        if failure.traceback:
            _log.error("%s", failure.message, exc_info=error)
        failed = Failed(failure.message, failure.exit_code)
        for outbox in outboxes:
            outbox.send(frame(Kind.FAILED, place.replica, failed))
            outbox.close(linger=2000)
        context.term()
        # Not sys.exit: torch would free its graphs, find a lost device, and abort.
        os._exit(failed.exit_code)


def _serve(
    options: EngineOptions,
    place: Place,
    inbox: zmq.Socket[bytes],
    outboxes: Sequence[zmq.Socket[bytes]],
    heartbeat: Heartbeat,
) -> None:
    with collecting_rarely(), started_ranks(options) as others:
        # Not sooner: this takes seconds, and from here on this process ends with its parent.
        with importing():
            from ..engine import Engine

        engine = Engine(options.for_server(), others=others)
    core = engine.core
    ready = Ready(
        vocab_size=engine.inputs.vocab_size,
        max_model_len=engine.inputs.max_model_len,
        eos_token_ids=engine.eos_token_ids,
        limits=core.limits,
        max_num_seqs=core.scheduler.step_limits.max_num_seqs,
    )

    def step_kinds() -> dict[str, int]:
        counts = engine.dispatcher.counters.items()
        return {f"{step}/{graph}": count for (step, graph), count in counts}

    def sleep(asked: Sleep) -> None:
        if asked.level:
            engine.sleep(asked.level)
        else:
            engine.wake_up(asked.tags)

    served = Served(
        core,
        engine.capture_next,
        engine.report,
        core.reset_prefix_cache,
        step_kinds,
        lambda: engine.is_sleeping,
        sleep,
    )
    server = CoreServer(served, inbox, outboxes, heartbeat, replica=place.replica)
    if is_installed() and engine.inputs.tokenizer is not None:
        engine.grammars.start()
    with gc_paused() as added, engine.on_device():
        added()
        for outbox in outboxes:
            outbox.send(frame(Kind.READY, place.replica, ready))
        server.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
