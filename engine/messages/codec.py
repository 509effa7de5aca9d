"""Messages as bytes (msgpack), for rooms in different processes; in one process they pass as they
are.  Arrays are their dtype, shape and memory; they come back read-only."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from msgspec import Struct, msgpack

_Message = TypeVar("_Message", bound=Struct)


def encode(message: Struct) -> bytes:
    return msgpack.encode(message, enc_hook=_from_array)


def decode(data: bytes | memoryview, kind: type[_Message]) -> _Message:
    """The message of type ``kind`` in ``data``.

    Raises:
        msgspec.ValidationError: these are not the bytes of one.
    """
    return msgpack.decode(data, type=kind, dec_hook=_to_array)


def _from_array(value: Any) -> tuple[str, tuple[int, ...], memoryview]:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"a message cannot hold a {type(value).__name__}")
    return value.dtype.str, value.shape, np.ascontiguousarray(value).data


def _to_array(kind: type, value: Any) -> Any:
    dtype, shape, memory = value
    return np.frombuffer(memory, dtype).reshape(shape)
