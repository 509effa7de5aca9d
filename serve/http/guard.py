"""Decides who is let in: by the host that is asked for, the origin of a web page, and the API key.

A web page can send a request to any address that its browser reaches.  Two checks keep pages of
others out.  A request that names its origin must come from this server's own page or from one of
``--allowed-origins``.  Against DNS rebinding, where a page's own host name is made to mean this
machine, a server on a loopback address answers only to host names that no public DNS can hold, and
to those of ``--allowed-host``.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Iterable
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .intake.answer_log import REASON, request_id_of
from .intake.errors import ApiError
from .intake.hosts import host_name, is_named, is_private
from .jobs.settings import Settings
from .jobs.state import ADMIN, ServerState

_OPEN = ("/", "/live", "/health", "/ping", "/version", "/docs", "/openapi.json")
"""Paths that need no key: whoever supervises the process asks them, or a browser shows them."""
_MOST_KNOWN = 256
"""Values of ``Host`` that are remembered."""
_ID = b"x-request-id"


class Visitor(NamedTuple):
    """The headers of a request that say who asks.  ``key`` is b"" if there is none."""

    hosts: list[bytes]
    origins: list[bytes]
    key: bytes
    request_id: bytes


class Guard:
    """Lets in those who may ask; counts and logs the answers of each path."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._state = app, state
        settings = state.settings
        self._keys = [key.encode() for key in settings.api_keys]
        self._admin_keys = [key.encode() for key in settings.admin_keys]
        self._doors = Doors(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        visitor, began_s = visitor_of(scope), time.monotonic()
        status, request_id = 499, ""

        async def counted(message: Message) -> None:
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                status = message["status"]
                route = getattr(scope.get("route"), "path", "other")
                self._state.metrics.tally.answers[f"{status} {route}"] += 1
                headers = message["headers"]
                request_id = _header(headers, _ID).decode("latin-1")
                if status >= 400 and not request_id:
                    request_id = request_id_of(visitor.request_id)
                    message = {**message, "headers": [*headers, (_ID, request_id.encode())]}
            await send(message)

        try:
            refused = self._doors.refuse(visitor, scope["http_version"])
            if refused is None:
                refused = self._check_key(scope, visitor.key)
            if refused is not None:
                scope[REASON] = refused.message
                await refused.response(scope["path"])(scope, receive, counted)
            else:
                await self._app(scope, receive, counted)
        finally:
            path = scope["path"]
            self._state.answer_log.write(
                f"{scope['method']} {path}",
                path,
                status,
                client="{}:{}".format(*scope["client"]) if scope.get("client") else "",
                reason=scope.get(REASON, ""),
                request_id=request_id,
                seconds=round(time.monotonic() - began_s, 4),
            )

    def _check_key(self, scope: Scope, key: bytes) -> ApiError | None:
        """Note whose key a request brings as the ``owner`` in its scope; returns the answer to one
        without a key."""
        scope["owner"] = ""
        if not self._keys and not self._admin_keys:
            return None
        # All keys are compared, so that the time tells nothing of any.
        own = [hmac.compare_digest(key, each) for each in self._keys]
        admin = [hmac.compare_digest(key, each) for each in self._admin_keys]
        if any(admin):
            scope["owner"] = ADMIN
        elif any(own):
            scope["owner"] = str(own.index(True))
        elif self._keys and scope["path"] not in _OPEN:
            return ApiError(
                401,
                "the API key is missing or wrong; send 'Authorization: Bearer KEY' or "
                "'x-api-key: KEY'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return None


def visitor_of(scope: Scope) -> Visitor:
    hosts, origins, authorization, key, request_id = [], [], b"", b"", b""
    for name, value in scope["headers"]:
        if name == b"host":
            hosts.append(value)
        elif name == b"origin":
            origins.append(value)
        elif name == b"authorization":
            authorization = authorization or value
        elif name == b"x-api-key":  # Anthropic's clients
            key = key or value
        elif name == _ID:
            request_id = value
    kind, _, bearer = authorization.partition(b" ")
    if kind.lower() == b"bearer":
        key = bearer
    return Visitor(hosts, origins, key.strip(), request_id)


def _header(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> bytes:
    return next((value for name, value in headers if name.lower() == wanted), b"")


class Doors:
    """Checks the host and the origin of requests; remembers the hosts that it has let in."""

    def __init__(self, settings: Settings) -> None:
        self._names = settings.allowed_hosts
        self._origins = [each.lower().encode() for each in settings.allowed_origins]
        self._known: set[bytes] = set()

    def refuse(self, visitor: Visitor, http_version: str) -> ApiError | None:
        """The answer to a visitor who may not come in; None for all others."""
        if len(visitor.hosts) != 1 and (visitor.hosts or http_version == "1.1"):
            return ApiError(400, f"{len(visitor.hosts)} Host headers: expected one")
        host = visitor.hosts[0] if visitor.hosts else b"localhost"
        if host not in self._known:
            if self._names is not None and not self._is_ours(host):
                shown = host_name(host)[:200]
                return ApiError(
                    403,
                    f"Host {shown!r} is not served here; start the server with --allowed-host and "
                    "the name if it is one of its names",
                    code="host_not_allowed",
                )
            if len(self._known) < _MOST_KNOWN:
                self._known.add(host)
        for origin in visitor.origins:
            if not self._may_ask(origin.lower(), host):
                shown = origin.decode("latin-1")[:200]
                return ApiError(
                    403,
                    f"Origin {shown!r} may not ask; start the server with --allowed-origins and "
                    "the origin if its pages may",
                    code="origin_not_allowed",
                )
        return None

    def _may_ask(self, origin: bytes, host: bytes) -> bool:
        """Whether pages of an origin may ask: they are allowed to, or are this server's own.

        A page of a public name may be a stranger's whose name was rebound, even where any host is
        taken: it counts as this server's only if ``--allowed-host`` has its name.
        """
        if origin in self._origins or b"*" in self._origins:
            return True
        scheme, separator, authority = origin.partition(b"://")
        is_same = separator and _without_usual_port(authority) == _without_usual_port(host.lower())
        return bool(is_same) and scheme in (b"http", b"https") and self._is_ours(host)

    def _is_ours(self, host: bytes) -> bool:
        name = host_name(host)
        return is_private(name) or is_named(name, self._names or ())


def _without_usual_port(authority: bytes) -> bytes:
    return authority.removesuffix(b":80").removesuffix(b":443")
