"""Bounds what a connection may send: the size and the time of heads and bodies, and what all
unfinished messages hold together.

A message that arrives whole, as nearly all do, costs two comparisons here.  One that does not is
counted byte by byte as it arrives, whoever sends it and whether or not anybody reads its body:
request line, headers, body, chunk sizes and trailers.
"""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .answer_log import AnswerLog
from .connections import Connections, LingeringTransport
from .errors import ApiError, body_too_large, overloaded

MOST_HEAD_BYTES = 64 * 1024
"""Most bytes of the request line and the headers together, and of what frames a body: chunk sizes
between two pieces of it, and trailers."""
MOST_HEADERS = 256
MOST_CHUNKS = 4096
"""Most pieces of one body, which take about 2 us each: 8 MiB in pieces of 2 KiB."""
HEAD_S = 20.0
"""Longest time for a head, and for a TLS handshake."""
BODY_S = 30.0
"""Longest time for a body with its trailers."""
_MOST_PIPELINED = 16
"""Most requests of a connection that wait for the answers of those before them."""
_MOST_UPLOADS = 32
"""Largest bodies that may be held at once before they are read."""


class Uploader(Protocol):
    """A connection whose message has begun and not ended."""

    def end(self) -> None: ...


class Uploads:
    """Counts the bytes of messages that have not arrived in full, or not been read yet.

    Beyond the limit the oldest unfinished message ends: one that trickles in cannot keep the room
    that those who send at once would need.

    Args:
        max_body_bytes: largest body of one request.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.most = _MOST_UPLOADS * max_body_bytes
        self.held = 0
        self._unfinished: dict[Uploader, int] = {}

    def add(self, uploader: Uploader, num_bytes: int) -> None:
        """Count what came of a message that goes on."""
        self._unfinished[uploader] = self._unfinished.get(uploader, 0) + num_bytes
        self.held += num_bytes
        while self.held > self.most and self._unfinished:
            oldest = next(iter(self._unfinished))
            self.forget(oldest)
            oldest.end()

    def forget(self, uploader: Uploader) -> None:
        """The message of a connection has ended."""
        self.held -= self._unfinished.pop(uploader, 0)

    def hold(self, num_bytes: int) -> None:
        """Keep a whole body until ``release``.

        Raises:
            ApiError: too much is held already.
        """
        if self.held + num_bytes > self.most:
            raise too_many_uploads()
        self.held += num_bytes

    def release(self, num_bytes: int) -> None:
        self.held -= num_bytes


def too_many_uploads() -> ApiError:
    return overloaded("too many large requests arrive at once; try again later", closes=True)


def _too_many_connections(most: int) -> ApiError:
    return overloaded(f"{most} connections are open; try again later", closes=True)


class _Part(Enum):
    """The part of a message that is expected next."""

    NOTHING = 0
    HEAD = 1
    BODY = 2


class LimitedProtocol(HttpToolsProtocol):
    """HTTP of uvicorn, with an end to messages that are too long or too slow."""

    transport: LingeringTransport  # type: ignore[assignment]

    def __init__(
        self,
        uploads: Uploads,
        connections: Connections,
        answer_log: AnswerLog,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._uploads, self._connections, self._answer_log = uploads, connections, answer_log
        self._part = _Part.HEAD
        self._feed_bytes = 0
        """Bytes of the piece that is being read."""
        self._num_bytes = 0
        """Bytes of the unfinished message, without the piece that is being read."""
        self._num_framing = 0
        """How many of these bytes came after the last piece that had some of the body."""
        self._num_chunks = self._num_headers = 0
        self._has_body = self._has_moved = self._refused = self._is_ending = False
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        most = self._uploads.max_body_bytes
        lingering: Any = LingeringTransport(transport, self._is_sending, self._give_up, most)
        super().connection_made(lingering)
        self._deadline = self.loop.call_later(HEAD_S, self._too_slow)
        if self._connections.enter(self):
            return
        if self._connections.is_flooded:
            transport.abort()
        else:
            self._refuse(_too_many_connections(self._connections.most))

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        self._connections.leave(self)
        self.transport.ended()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.lingers:
            self.transport.drop(len(data))
            return
        if self._refused:
            return
        self._has_body = self._has_moved = False
        self._feed_bytes = len(data)
        super().data_received(data)
        if self.transport.is_closing():
            self._forget()
        elif self._part is not _Part.NOTHING or not self._has_moved:
            self._go_on(len(data))

    def _go_on(self, num_bytes: int) -> None:
        """Count a piece that has not ended its message, or began none: blank lines, which may come
        before a request, do neither."""
        self._num_bytes += num_bytes
        self._num_framing = 0 if self._has_body else self._num_framing + num_bytes
        in_body, most = self._part is _Part.BODY, self._uploads.max_body_bytes
        if not in_body and self._num_bytes > MOST_HEAD_BYTES:
            self._refuse(_head_too_large())
        elif in_body and self._num_framing > MOST_HEAD_BYTES:
            message = f"trailers or chunk sizes are larger than {MOST_HEAD_BYTES} bytes"
            self._refuse(ApiError(431, message))
        elif in_body and self._num_bytes > most + MOST_HEAD_BYTES:
            self._refuse(body_too_large(most))
        else:
            if self._deadline is None:
                limit_s = BODY_S if in_body else HEAD_S
                self._deadline = self.loop.call_later(limit_s, self._too_slow)
            self._uploads.add(self, num_bytes)

    def send_400_response(self, msg: str) -> None:
        if not self._refused:  # else the parser has failed because we told it to
            self._log(ApiError(400, msg))
            super().send_400_response(msg)

    # What the parser calls.  An exception keeps it from the rest of what came, which may be much.

    def on_message_begin(self) -> None:
        self._has_moved = True
        if self._part is _Part.NOTHING:
            self._begin(_Part.HEAD)
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > MOST_HEADERS:
            raise self._refuse(ApiError(431, f"more than {MOST_HEADERS} headers; send fewer"))
        # Trailers are dropped: uvicorn would add them to the headers, which have been checked.
        if self._part is _Part.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._feed_bytes > MOST_HEAD_BYTES:
            lengths = (len(name) + len(value) for name, value in self.headers)
            if len(self.url) + sum(lengths) > MOST_HEAD_BYTES:
                raise self._refuse(_head_too_large())
        if len(self.pipeline) >= _MOST_PIPELINED:
            raise self._refuse(ApiError(400, f"more than {_MOST_PIPELINED} requests at once"))
        self._begin(_Part.BODY)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._has_body = True
        self._num_chunks += 1
        if self._num_chunks > MOST_CHUNKS:
            message = f"the body comes in more than {MOST_CHUNKS} chunks; send larger ones"
            raise self._refuse(ApiError(400, message))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._begin(_Part.NOTHING)
        if not self.cycle.response_complete:
            self._connections.begin_request(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete or self._part is _Part.BODY:
            self._connections.end_request(self)

    def _begin(self, part: _Part) -> None:
        """Expect ``part`` next, and start its own time limit."""
        self._part, self._has_moved = part, True
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._num_framing = self._num_chunks = self._num_headers = 0
        if self._num_bytes and part is not _Part.BODY:
            self._uploads.forget(self)
            self._num_bytes = 0

    # Ends

    def _is_sending(self) -> bool:
        """Whether the client may be sending something that was not read."""
        return not self._is_ending and (self._part is not _Part.NOTHING or self._refused)

    def _give_up(self) -> None:
        """The rest of the message that goes on is dropped: whoever waits for it need not."""
        self._forget()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def shutdown(self) -> None:
        self._is_ending = True
        super().shutdown()

    def make_room(self) -> None:
        """End a connection without a request that has arrived: a new one needs the room."""
        self._is_ending = True
        if self._part is _Part.NOTHING or not self._num_bytes:
            self._forget()
            self.transport.close()
        else:
            self._refuse(_too_many_connections(self._connections.most))

    def end(self) -> None:
        """End the message that goes on: others need the room."""
        self._refuse(too_many_uploads())

    def _too_slow(self) -> None:
        self._deadline = None
        in_body = self._part is _Part.BODY
        answers = self.cycle is not None and not self.cycle.response_complete
        if self.flow.read_paused or (answers and not in_body):  # it is this server that goes on
            self._deadline = self.loop.call_later(BODY_S, self._too_slow)
            return
        part, limit_s = ("body", BODY_S) if in_body else ("headers", HEAD_S)
        self._refuse(ApiError(408, f"the {part} did not come within {limit_s:g} s"))

    def _refuse(self, error: ApiError) -> ApiError:
        """Close the connection, with an answer unless another one is on its way; returns the
        error."""
        self._refused = True
        self._forget()
        if self.transport.is_closing():
            return error
        if self._may_answer():
            self._log(error)
            response = error.response()
            lines = [f"HTTP/1.1 {error.status} Refused".encode()]
            lines += [name + b": " + value for name, value in response.raw_headers]
            if "connection" not in error.headers:
                lines.append(b"connection: close")
            self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
        self.transport.close()
        return error

    def _log(self, error: ApiError) -> None:
        client = "{}:{}".format(*self.client) if self.client else ""
        what = "a message that is not whole"
        self._answer_log.write(what, "", error.status, client=client, reason=error.message)

    def _may_answer(self) -> bool:
        """Whether the next answer of the connection is that to the message that goes on."""
        if self._part is _Part.BODY:
            return not self.cycle.response_started and not self.pipeline
        return self.cycle is None or self.cycle.response_complete

    def _forget(self) -> None:
        self._uploads.forget(self)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _head_too_large() -> ApiError:
    return ApiError(431, f"the headers are larger than {MOST_HEAD_BYTES} bytes")
