"""Reads the body of a request, within limits of size and form.  ``limits`` bounds its time."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from ..intake.errors import ApiError, body_too_large, invalid
from ..intake.protocol import Fields
from ..jobs.state import ServerState

_Model = TypeVar("_Model", bound=BaseModel)
_FEW_BYTES, _SMALL_BYTES = 4096, 65536
"""Up to the first size any body is parsed at once, up to the second one that has little form."""
_LITTLE_FORM = 2000
"""Lists, objects and fields; to parse one takes about 1 us."""


async def read(request: Request, kind: type[_Model]) -> _Model:
    """The body as a ``kind``.

    Raises:
        ApiError: it is no JSON by its content type or its form, is too large, or has a field that
            is wrong.
    """
    state: ServerState = request.app.state.server
    body = await _parsed(request, state, kind)
    if isinstance(body, Fields):
        state.fields.check(body)
    return body


async def _parsed(request: Request, state: ServerState, kind: type[_Model]) -> _Model:
    most = state.settings.max_body_bytes
    _check_head(request, most)
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > most:
            raise body_too_large(most)
    if is_small(data):
        try:
            return kind.model_validate_json(bytes(data))
        except ValidationError as error:
            raise invalid(error) from None
    state.uploads.hold(len(data))
    try:
        async with state.reader.turn():
            if await request.is_disconnected():
                raise ClientDisconnect
            return await state.reader.parse(data, kind)
    finally:
        state.uploads.release(len(data))


def is_small(data: bytearray) -> bool:
    """Whether parsing a body takes 2 ms at most, so that it may hold up the event loop."""
    if len(data) <= _FEW_BYTES:
        return True
    return len(data) <= _SMALL_BYTES and sum(map(data.count, (b"[", b"{", b":"))) <= _LITTLE_FORM


def _check_head(request: Request, most: int) -> None:
    """Raise the answer to a body whose headers tell that it is not read.

    A web page may send other content types to any server without asking it first.
    """
    is_json = False
    for name, value in request.scope["headers"]:
        if name == b"content-type":
            media_type = value.partition(b";")[0].strip().lower()
            is_json = media_type == b"application/json" or media_type.endswith(b"+json")
        elif name == b"content-length" and value.isdigit() and int(value) > most:
            raise body_too_large(most)
    if not is_json:
        raise ApiError(415, "expected a body of JSON with 'Content-Type: application/json'")
