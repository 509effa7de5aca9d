"""Reads the body of a request, within limits of size and time."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from .errors import ApiError, invalid
from .state import ServerState

_Model = TypeVar("_Model", bound=BaseModel)
_BODY_S = 30.0
"""Longest time that a client may take to send a body."""


async def read(request: Request, kind: type[_Model]) -> _Model:
    """The body as a ``kind``.

    Raises:
        ApiError: it is too large or too slow, is not JSON, or has a field that is wrong.
    """
    state: ServerState = request.app.state.server
    most = state.settings.max_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > most:
        raise _too_large(most)
    data = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for piece in request.stream():
                data += piece
                if len(data) > most:
                    raise _too_large(most)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not come within {_BODY_S:g} s", headers={"connection": "close"}
        ) from None
    try:
        return kind.model_validate_json(bytes(data))
    except ValidationError as error:
        raise invalid(error) from None


def _too_large(most: int) -> ApiError:
    return ApiError(
        413, f"the body is larger than {most} bytes; send less", headers={"connection": "close"}
    )
