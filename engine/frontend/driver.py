"""Decides which thread steps the engine when several call it.

Callers submit requests and wait.  The first who waits drives: between two steps it takes in what
the others submitted, so that all are batched together, and it puts every output where its caller
looks for it.  Once it has its own, the next who waits goes on.  The engine has no thread of its
own: a single caller steps as if it were alone, and no step waits for another thread to wake up.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import Event, Lock, RLock, get_ident
from typing import Protocol, TypeVar

from .loop import CheckedRequest, EngineLoop
from .outputs import RequestOutput

_T = TypeVar("_T")
_TAKEN_AT_ONCE = 32
"""Requests taken in between two steps, which takes about a millisecond."""


class Sink(Protocol):
    """Where a request's outputs go.  Called by the thread that drives, so it must not wait."""

    def put(self, output: RequestOutput) -> None: ...

    def fail(self, error: Exception) -> None:
        """No output will come any more."""


class Inbox:
    """The sink of a thread that waits for its requests."""

    def __init__(self) -> None:
        self.mail: deque[RequestOutput | Exception] = deque()
        # A thread that always drives needs none.
        self._bell: Event | None = None

    def put(self, output: RequestOutput) -> None:
        self.mail.append(output)
        self.ring()

    def fail(self, error: Exception) -> None:
        self.mail.append(error)
        self.ring()

    def add_bell(self) -> None:
        """Add the bell by which a change wakes the thread; it looks once more before it sleeps."""
        self._bell = self._bell or Event()

    def ring(self) -> None:
        """Wake the thread: something has changed."""
        if self._bell is not None:
            self._bell.set()

    def is_rung(self) -> bool:
        """Whether the thread is about to look again."""
        return self._bell is not None and self._bell.is_set()

    def sleep(self) -> None:
        """Wait for a change; there may be none."""
        assert self._bell is not None
        self._bell.wait()
        self._bell.clear()


class Driver:
    """Calls an engine for all its callers; any thread may call any method.

    Use ``driver_of`` to get it: callers with drivers of their own would step one engine at once.
    """

    def __init__(self, engine: EngineLoop) -> None:
        self.engine = engine
        # Reentrant: the garbage collector may close a stream anywhere, which aborts its request.
        self._mutex = RLock()
        self._leader: Inbox | None = None
        self._leading_thread = 0
        self._waiting: dict[Inbox, None] = {}
        # What the leader is to do between two steps; each returns how many requests it has added.
        self._intake: deque[Callable[[], int]] = deque()
        # Those overtake the others, also the requests that they end: of these the ids, with their
        # sinks', are in ``_pending`` until they are queued.
        self._aborts: deque[Callable[[], int]] = deque()
        self._pending: set[tuple[str, int]] = set()
        self._sinks: dict[str, Sink] = {}

    def submit(self, requests: Sequence[CheckedRequest], sink: Sink) -> None:
        """Queue requests; they start when someone drives."""
        self._pending.update((request.request_id, id(sink)) for request in requests)
        self._intake.append(partial(self._queue, requests, sink))

    def wait(self, inbox: Inbox) -> RequestOutput:
        """Return the next output that comes to ``inbox``; drives while nobody else does.

        Raises:
            EngineDeadError: the device is lost.
            UserError: the engine was closed, or a request's id is in use.
        """
        if not inbox.mail:
            self.drive(inbox, inbox.mail.__len__)
        item = inbox.mail.popleft()
        if isinstance(item, Exception):
            raise item
        return item

    def drive(self, inbox: Inbox, is_done: Callable[[], object]) -> None:
        """Step, or wait while another thread does, until ``is_done``.  It is asked after every step
        and whenever ``inbox`` rings."""
        try:
            while not is_done():
                if self._lead(inbox):
                    with self.engine.on_device():
                        while not is_done():
                            self._step()
                elif not is_done():
                    inbox.sleep()
        except BaseException:
            self._fail_lost(inbox)
            raise
        finally:
            self._hand_on(inbox)

    def keep_running(self, inbox: Inbox) -> None:
        """Run one step unless someone else drives, so that queued requests need not wait for those
        that are still being added.  An engine at rest starts once all its seats are taken."""
        if self._leader is not None or not (self._has_intake or self.engine.core.is_busy):
            return
        try:
            if self._lead(inbox, waits=False):
                self._take_in()
                if self.engine.core.is_busy:
                    with self.engine.on_device():
                        self._step()
        except BaseException:
            self._fail_lost(inbox)
            raise
        finally:
            self._hand_on(inbox)

    def drop(self, request_ids: Iterable[str], sink: Sink) -> None:
        """Abort those of a caller's requests that are unfinished."""
        self._soon(partial(self._drop, list(request_ids), sink))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests, whoever waits for them; their output so far is their last one."""
        self._soon(partial(self._abort, list(request_ids), at_once=True))

    def call(self, work: Callable[[], _T]) -> _T:
        """Run ``work`` between two steps and return what it returns."""
        if self._leading_thread == get_ident():
            return work()  # called during a step, by a signal handler for example
        inbox = Inbox()
        done: list[_T] = []

        def run() -> int:
            try:
                with self.engine.on_device():
                    done.append(work())
            except Exception as error:
                inbox.fail(error)
            inbox.ring()
            return 0

        self._intake.append(run)
        try:
            while not done and not inbox.mail:
                if self._lead(inbox):
                    self._take_in()
                elif not done and not inbox.mail:
                    inbox.sleep()
        finally:
            self._hand_on(inbox)
        for error in inbox.mail:
            assert isinstance(error, Exception)
            raise error
        return done[0]

    def close(self) -> None:
        self.call(self._close)

    def take_in(self) -> None:
        """Let what was submitted or aborted take effect now, or before the next step of the thread
        that drives."""
        inbox = Inbox()
        try:
            self._lead(inbox, waits=False)
        finally:
            self._hand_on(inbox)

    def _lead(self, inbox: Inbox, *, waits: bool = True) -> bool:
        """Whether ``inbox`` may drive now; if it ``waits``, its bell rings when it may."""
        with self._mutex:
            if self._leader is None:
                self._leader = inbox
            if self._leader is inbox:
                self._leading_thread = get_ident()
                self._waiting.pop(inbox, None)
                return True
            if waits:
                if self._leading_thread == get_ident():
                    raise RuntimeError("called from within a step, which would wait for itself")
                inbox.add_bell()
                self._waiting[inbox] = None
            return False

    def _hand_on(self, inbox: Inbox) -> None:
        """Let another thread drive, if ``inbox`` does.  Nobody sleeps while nobody drives: whoever
        waits either takes over here, or was rung and is about to look."""
        with self._mutex:
            self._waiting.pop(inbox, None)
            if self._leader is not inbox:
                return
            if not self._waiting and not self._has_intake:
                self._leader, self._leading_thread = None, 0
                return
        while True:
            with self._mutex:
                heir = next((other for other in self._waiting if not other.is_rung()), None)
                if heir is not None or not self._has_intake:
                    self._leader, self._leading_thread = heir, 0
                    break
            self._take_in()
        if heir is not None:
            heir.ring()

    @property
    def _has_intake(self) -> bool:
        return bool(self._intake or self._aborts)

    def _step(self) -> None:
        if self._has_intake:
            self._take_in()
        outputs = self.engine.step()
        for output in outputs:
            sink = self._sinks.get(output.request_id)
            if sink is not None:
                sink.put(output)
                if output.finished:
                    self._sinks.pop(output.request_id, None)
        if not outputs and self._sinks and not self.engine.has_unfinished():
            self._fail(list(self._sinks))

    def _take_in(self) -> None:
        while self._aborts:
            self._take(self._aborts)
        taken = 0
        while self._intake and taken < _TAKEN_AT_ONCE:
            taken += self._take(self._intake)

    def _take(self, intake: deque[Callable[[], int]]) -> int:
        try:
            taken = intake[0]()
        except Exception:
            intake.popleft()
            raise
        intake.popleft()  # at the end: nothing that an interrupt cuts short is lost
        return taken

    def _queue(self, requests: Sequence[CheckedRequest], sink: Sink) -> int:
        queued = 0
        for request in requests:
            request_id, key = request.request_id, (request.request_id, id(sink))
            if key not in self._pending:
                continue  # it was dropped, or this was interrupted and runs again
            if self._sinks.get(request_id) is not sink:
                queued += 1
                try:
                    self.engine.queue(request)
                except Exception as error:
                    sink.fail(error)
                else:
                    self._sinks[request_id] = sink
            self._pending.discard(key)
        return queued

    def _drop(self, request_ids: Sequence[str], sink: Sink) -> int:
        dropped = []
        for request_id in request_ids:
            self._pending.discard((request_id, id(sink)))
            if self._sinks.get(request_id, sink) is sink:  # else it was refused: another has its id
                dropped.append(request_id)
        self.engine.drop(dropped)
        for request_id in dropped:
            self._sinks.pop(request_id, None)
        return 0

    def _abort(self, request_ids: Sequence[str], *, at_once: bool) -> int:
        later = []
        for request_id in request_ids:
            sink = self._sinks.pop(request_id, None)
            output = self.engine.abort(request_id)
            if output is not None and sink is not None:
                sink.put(output)
            elif output is None and at_once:
                later.append(request_id)
        if later and self._intake:  # as soon as they are queued, so that they have an output
            self._intake.append(partial(self._abort, later, at_once=False))
        return 0

    def _soon(self, work: Callable[[], int]) -> None:
        self._aborts.append(work)
        self.take_in()

    def _close(self) -> None:
        sinks = list(self._sinks.values())
        self._sinks.clear()
        error = self.engine.close()
        for sink in sinks:
            sink.fail(error)

    def _fail_lost(self, inbox: Inbox) -> None:
        """Fail the requests whose last outputs were lost when an exception, such as an interrupt,
        cut the leader short, so that nobody waits for them."""
        if self._leader is inbox:
            self._fail([name for name in self._sinks if name not in self.engine])

    def _fail(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            sink = self._sinks.pop(request_id)
            self.engine.drop([request_id])
            sink.fail(RuntimeError(f"request {request_id!r} is lost: a step was cut short"))


_making = Lock()


def driver_of(engine: EngineLoop) -> Driver:
    with _making:
        driver = engine.driver()
        if not isinstance(driver, Driver):
            driver = Driver(engine)
            engine.driver = weakref.ref(driver)
        return driver
