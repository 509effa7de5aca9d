"""A helper process as the process that started it sees it: jobs go there, answers come back.

Nothing here waits for the helper but ``read`` with a timeout.  If the helper ends, it is started
anew and asked again.  A job with which it may have ended is asked once more alone, for a short
time, and is refused if it ends the helper then too.
"""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from typing import Protocol

import msgspec

from .wire import RECYCLED, UP, Answer, Drop, Message, Setup, bodies, framed

_STUCK_S = 60.0
"""Time without an answer after which a helper that owes some is ended, in seconds."""


_ALONE_S = 0.5
"""Time in which a job that may have ended a helper has the next one for itself, in seconds."""
_MOST_DEATHS = 4
"""Helpers that may end while they owe the answer of a job; then it is refused."""


class Job(Protocol):
    """What a helper is asked."""

    def message(self, number: int) -> Message:
        """The message to send.  It is asked for again when the job has to be sent again."""

    def done(self, answer: Answer) -> None:
        """Take the answer, on the thread that reads."""


class _Sent:
    def __init__(self, job: Job) -> None:
        self.job, self.is_suspect, self.num_deaths = job, False, 0


class HelperProcess:
    """Starts the helper when it is first needed, or by ``start``.  Any thread may submit; one at a
    time reads.

    Args:
        memory: file descriptor of the masks' memory; None without.
    """

    def __init__(self, setup: Setup, memory: int | None = None) -> None:
        self.setup, self._memory = setup, memory
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._numbers = 0
        self._queue: deque[_Sent] = deque()
        self._suspects: deque[_Sent] = deque()
        self._asked: dict[int, _Sent] = {}
        self._to_send, self._received = bytearray(), bytearray()
        self._heard_s = self._alone_s = 0.0
        self._started = threading.Event()
        self._is_up = False
        self.is_closed = False
        self.generation = 0
        """Number of the helper; another one knows nothing of what this one was told."""

    @property
    def is_owed(self) -> bool:
        """Whether answers are to come."""
        return bool(self._asked or self._queue or self._suspects)

    def start(self) -> None:
        """Start the helper, without waiting for it; ``read`` tries again where it cannot be."""
        with self._lock, suppress(OSError):
            if self._process is not None or self.is_closed:
                return
            ours, its = socket.socketpair()
            ours.setblocking(False)
            fds = [its.fileno()] + ([] if self._memory is None else [self._memory])
            args = [str(fds[0]), str(fds[-1]), msgspec.json.encode(self.setup).decode()]
            command = [sys.executable, "-m", f"{__package__}.program", *args]
            # A session of its own: what a terminal sends to all is not meant for it.
            self._process = subprocess.Popen(
                command,
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            its.close()
            self._socket = ours
            self.generation += 1
            self._heard_s, self._is_up = time.monotonic(), False
            self._started.set()

    def submit(self, job: Job, *, flush: bool = True) -> None:
        """Have a job done; its ``done`` is called by ``read``.  Without ``flush`` it is sent by the
        next call of ``flush`` or ``read``, in one piece with others."""
        with self._lock:
            if not self.is_owed:
                self._heard_s = time.monotonic()
            self._queue.append(_Sent(job))
            self._pump()
            if flush:
                self._flush()

    def flush(self) -> None:
        """Send what was submitted."""
        with self._lock:
            self._flush()

    def drop(self, outputs: list[int]) -> None:
        """Tell of outputs that have ended."""
        with self._lock:
            if self._process is not None:
                self._to_send += framed(Drop(outputs))
                self._flush()

    def read(self, timeout_s: float) -> bool:
        """Take the answers that have come, or the first ones that come in time; returns whether
        there were any."""
        with self._lock:
            self._flush()
            connection, events = self._socket, select.POLLIN
            if self._to_send:
                events |= select.POLLOUT
        if connection is None:
            if timeout_s > 0:
                self._started.wait(timeout_s)
            return self._start_late()
        poll = select.poll()
        with suppress(OSError, ValueError):  # another thread may have closed it
            poll.register(connection, events)
            poll.poll(max(0.0, timeout_s * 1e3))
        with self._lock:
            if connection is not self._socket:
                return False
            answered = self._take()
            self._flush()
        for job, answer in answered:
            job.done(answer)
        return bool(answered)

    def _start_late(self) -> bool:
        """Start what could not be started, or refuse what has waited for it for too long."""
        with self._lock:
            if not self.is_owed or self._process is not None:
                return False
            self._pump()
            if self._process is not None or time.monotonic() - self._heard_s < _STUCK_S:
                return False
            owed = [*self._queue, *self._suspects]
            self._queue.clear()
            self._suspects.clear()
        for sent in owed:
            sent.job.done(Answer(0, "the process that compiles it cannot be started"))
        return True

    def close(self) -> None:
        """End the helper."""
        with self._lock:
            self.is_closed = True
            self._stop()
            self._started.set()

    def _pump(self) -> None:
        """Send what may be sent; suspects one by one, and nothing beside them."""
        if self.is_closed:
            return
        self.start()
        if self._process is None:
            return
        if self._is_up and time.monotonic() - self._alone_s > _ALONE_S:
            for each in self._asked.values():
                each.is_suspect = False  # and take whatever comes beside it
        if not any(each.is_suspect for each in self._asked.values()):
            if self._suspects:
                self._alone_s = time.monotonic()
                self._send(self._suspects.popleft())
            else:
                while self._queue:
                    self._send(self._queue.popleft())

    def _send(self, sent: _Sent) -> None:
        self._numbers += 1
        self._asked[self._numbers] = sent
        self._to_send += framed(sent.job.message(self._numbers))

    def _flush(self) -> None:
        while self._to_send and self._socket is not None:
            try:
                num_sent = self._socket.send(self._to_send[: 1 << 18])
            except OSError:  # full, or the helper has ended, which reading will tell
                return
            del self._to_send[:num_sent]

    def _take(self) -> list[tuple[Job, Answer]]:
        assert self._socket is not None
        if self._asked and time.monotonic() - self._heard_s > _STUCK_S and self._process:
            self._process.kill()
        has_ended = False
        while True:
            try:
                received = self._socket.recv(1 << 20)
            except BlockingIOError:
                break
            except OSError:
                received = b""
            if not received:
                has_ended = True
                break
            self._received += received
        answered = []
        for body in bodies(self._received):
            answer = msgspec.msgpack.decode(body, type=Answer)
            if answer.job == UP:
                self._is_up, self._alone_s = True, time.monotonic()
            sent = self._asked.pop(answer.job, None)
            if sent is not None:
                answered.append((sent.job, answer))
        if answered:
            self._heard_s = time.monotonic()
        if has_ended:
            answered += self._replace()
        elif self._queue or self._suspects:
            self._pump()
        return answered

    def _replace(self) -> list[tuple[Job, Answer]]:
        """Start a helper anew behind one that has ended, and ask it what that one was asked."""
        code = self._stop()
        refused, suspects = [], []
        for sent in self._asked.values():
            sent.num_deaths += code != RECYCLED
            if code == RECYCLED:
                self._queue.append(sent)
            elif sent.is_suspect or sent.num_deaths == _MOST_DEATHS:
                why = f"the process that compiles it ended ({_how(code)}); simplify it"
                refused.append((sent.job, Answer(0, why)))
            else:
                sent.is_suspect = True
                suspects.append(sent)
        # The newest are the likeliest to end soon.
        self._suspects.extendleft(suspects)
        self._asked.clear()
        if self.is_owed:
            self._pump()
        return refused

    def _stop(self) -> int:
        """End the helper; returns its exit code."""
        if self._process is None or self._socket is None:
            return 0
        self._socket.close()
        with suppress(subprocess.TimeoutExpired):
            # It has ended already, or is about to, since its socket is closed.
            self._process.wait(0.2)
        self._process.kill()
        code = self._process.wait()
        self._process = self._socket = None
        self._started.clear()
        self._to_send.clear()
        self._received.clear()
        return code


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def read_for_ever(process: weakref.ref[HelperProcess]) -> None:
    """Take answers until the process object is closed or gone."""
    while (helper := process()) is not None and not helper.is_closed:
        helper.read(0.2)
        del helper
