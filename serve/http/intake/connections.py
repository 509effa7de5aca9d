"""Bounds how many connections are open, and ends them so that clients read the last answer."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from typing import Any, Protocol

LINGER_S = 30.0
"""Longest time for which what a client still sends is read and dropped."""
QUIET_S = 2.0
"""Time without any more data after which that ends, in seconds."""
_MOST_LINGER = 16
"""Largest bodies that are dropped of one connection."""
_MOST_REFUSED = 256
"""Connections beyond the limit that are answered with a 503; more are closed without a word."""
_OTHER_FILES = 256
"""Files that a process may have open beside its connections."""


def limited_by_files(most: int) -> int:
    """``most`` connections, or as many as the process may have open.  Raises its soft limit of
    open files for that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most + _MOST_REFUSED + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return max(1, min(most, soft - _MOST_REFUSED - _OTHER_FILES))


class Connection(Protocol):
    """A connection, as those that are counted are seen."""

    def make_room(self) -> None:
        """Ends it at once."""


class Connections:
    """Counts the open connections of one API process.

    Beyond the limit, the one that has been without a request for longest makes room: idle ones,
    and those whose request does not arrive, keep nobody out.  If there is none, the newcomer is
    refused.

    Args:
        most: connections that may be open.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_open = 0
        self._without_request: dict[Connection, None] = {}

    def enter(self, connection: Connection) -> bool:
        """Count a new connection; returns whether it may stay."""
        self.num_open += 1
        if self.num_open > self.most:
            if not self._without_request:
                return False
            oldest = next(iter(self._without_request))
            del self._without_request[oldest]
            oldest.make_room()
        self._without_request[connection] = None
        return True

    @property
    def is_flooded(self) -> bool:
        """Whether so many are beyond the limit that nobody is told."""
        return self.num_open > self.most + _MOST_REFUSED

    def leave(self, connection: Connection) -> None:
        self.num_open -= 1
        self._without_request.pop(connection, None)

    def begin_request(self, connection: Connection) -> None:
        """A request has arrived in full."""
        self._without_request.pop(connection, None)

    def end_request(self, connection: Connection) -> None:
        """The last request that has arrived has been answered."""
        self._without_request[connection] = None


class LingeringTransport:
    """A transport whose ``close`` lets the client read the answer while it still sends.

    A socket that is closed with unread data in it resets its connection, and a client that is
    still sending loses the answer.  So the sending half is closed first.  What the client sends is
    dropped until it closes its half, or for a limited time and number of bytes.

    Args:
        is_sending: returns whether the client is in the middle of a message.
        on_linger: called when the rest of it begins to be dropped.
        max_body_bytes: largest body of a request.
    """

    def __init__(
        self,
        transport: Any,
        is_sending: Callable[[], bool],
        on_linger: Callable[[], None],
        max_body_bytes: int,
    ) -> None:
        self._transport = transport
        self._is_sending, self._on_linger = is_sending, on_linger
        self._bytes_left = _MOST_LINGER * max_body_bytes
        self._has_come = False
        self._until_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.lingers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.lingers or bool(self._transport.is_closing())

    def write(self, data: bytes) -> None:
        if not self.lingers:
            self._transport.write(data)

    def close(self) -> None:
        if self.is_closing():
            return
        if not self._is_sending():
            self._transport.close()
            return
        if self._transport.can_write_eof():  # else TLS, whose answers have a length
            self._transport.write_eof()
        self.lingers = True
        self._on_linger()
        self._transport.resume_reading()
        loop = asyncio.get_running_loop()
        self._until_s = loop.time() + LINGER_S
        self._timer = loop.call_later(QUIET_S, self._look)

    def drop(self, num_bytes: int) -> None:
        """Count what has come while it lingers."""
        self._has_come = True
        self._bytes_left -= num_bytes
        if self._bytes_left < 0:
            self._transport.abort()

    def ended(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._has_come or loop.time() > self._until_s:
            self._transport.abort()
            return
        self._has_come = False
        self._timer = loop.call_later(QUIET_S, self._look)
