"""What stands before the routes: API keys, counted answers, and limits of the request's head."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .errors import ApiError
from .state import ServerState

MOST_HEAD_BYTES = 64 * 1024
"""Most bytes of the request line and the headers together."""
HEAD_S = 20.0
"""Longest time that a client may take to send them."""
_OPEN = ("/", "/live", "/health", "/version")
"""Paths that need no key: whoever supervises the process asks them."""


class Guard:
    """Lets in those who bring a key, and counts the answers of each path."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._state = app, state
        self._keys = [key.encode() for key in state.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "other")
                self._state.metrics.tally.answers[f"{message['status']} {route}"] += 1
            await send(message)

        if self._keys and scope["path"] not in _OPEN and not self._has_key(scope):
            denied = ApiError(
                401,
                "the API key is missing or wrong; send 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
            await denied.response()(scope, receive, counted)
            return
        await self._app(scope, receive, counted)

    def _has_key(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        # All keys are compared, so that the time tells nothing of any.
        matches = [hmac.compare_digest(key.strip(), each) for each in self._keys]
        return kind.lower() == b"bearer" and any(matches)


class LimitedProtocol(HttpToolsProtocol):
    """HTTP of uvicorn, with an end to heads that are too long or too slow."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._in_head = True
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self._refuse(431, f"the headers are larger than {MOST_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        if self._deadline is None:
            self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._forget_deadline()
        super().on_headers_complete()

    def _expect_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_S, self._too_slow)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if self._in_head:
            self._refuse(408, f"the headers did not come within {HEAD_S:g} s")

    def _refuse(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        response = ApiError(status, message).response()
        lines = [f"HTTP/1.1 {status} Refused".encode(), b"connection: close"]
        lines += [name + b": " + value for name, value in response.raw_headers]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
        self.transport.close()
