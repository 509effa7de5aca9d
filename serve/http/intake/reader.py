"""``BodyReader``: parses large bodies in a process of its own.

A body of some megabytes may take seconds to parse, and Python runs nothing else in the process that
does it: streams of other clients would stop.  The process is started by the first large body, reads
one at a time, and may die of one: that body is refused, and the next one starts it anew.

Run by ``python -m``, this module takes frames on stdin: a line of JSON with the name of the body's
model and its size, then the body.  It answers each on stdout with eight bytes of size and a pickle
of the model, or of what is wrong with it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import pickle
import re
import resource
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ....engine.ranks.lifetime import end_with, leave_signals_to_the_parent
from . import protocol
from .errors import ApiError, invalid

MOST_VALUES = 2**20
MOST_CONTAINERS = 2**16
"""Most lists and objects of a body, and most fields of all its objects together."""
_PARSE_S = 30.0
"""Longest time to parse a body."""
_MEMORY_BYTES = 4 * 2**30
_NICE = 10
"""The process leaves the processors to the engine and to those who send small bodies."""
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)

_Model = TypeVar("_Model", bound=BaseModel)


_Refused = tuple[int, str, str | None]
"""Status, message and parameter of the ``ApiError`` that answers a body."""


class BodyReader:
    """The process that parses large bodies, as the server sees it."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._process: Process | None = None

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until no other body is parsed; ``parse`` is called inside."""
        async with self._lock:
            yield

    async def parse(self, data: bytearray, kind: type[_Model]) -> _Model:
        """A body as a ``kind``.

        Raises:
            ApiError: it is no JSON, has a field that is wrong, or has too much form.
        """
        try:
            async with asyncio.timeout(_PARSE_S):
                answer = await self._ask(data, kind.__name__)
        except (asyncio.IncompleteReadError, OSError, RuntimeError):  # the last one is uvloop's
            await self.close()
            message = "the body takes too much time or memory to be read; send less"
            raise ApiError(400, message) from None
        except BaseException:
            await self.close()  # what is left in its pipes belongs to nobody
            raise
        parsed = pickle.loads(answer)
        if not isinstance(parsed, kind):
            status, message, param = parsed
            raise ApiError(status, message, param=param)
        return parsed

    async def _ask(self, data: bytearray, name: str) -> bytes:
        if self._process is not None and self._process.returncode is not None:
            await self.close()  # it has died since the last body
        if self._process is None:
            command = (sys.executable, "-P", "-m", __name__, str(os.getpid()))
            self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps([name, len(data)]).encode() + b"\n")
        stdin.write(data)
        await stdin.drain()
        return await stdout.readexactly(int.from_bytes(await stdout.readexactly(8), "big"))

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def parsed(data: bytes, kind: type[BaseModel]) -> BaseModel | _Refused:
    """A body as a ``kind``, or what is wrong with it."""
    message = too_much_form(data)
    if message:
        return 400, message, None
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        answer = invalid(error)
    except MemoryError:
        answer = ApiError(400, "the body takes too much memory to be read; send less")
    return answer.status, answer.message, answer.param


def too_much_form(data: bytes) -> str:
    """What a body has too much of; "" if nothing.  Texts may hold any number of commas and
    brackets: they are left out, but only where it matters, as that takes time."""
    if not _excess(data):
        return ""
    return _excess(_TEXT.sub(b"", data))


def _excess(data: bytes) -> str:
    containers = data.count(b"[") + data.count(b"{")
    for name, count, most in (
        ("lists and objects", containers, MOST_CONTAINERS),
        ("fields", data.count(b":"), MOST_CONTAINERS),
        ("values", data.count(b",") + containers, MOST_VALUES),
    ):
        if count > most:
            return f"the body has {count} {name}: expected {most} at most; send less"
    return ""


def main(parent_pid: int) -> None:
    """Parse what comes on stdin until it ends."""
    end_with(parent_pid)
    leave_signals_to_the_parent()
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    gc.disable()  # parsed bodies have no cycles
    source, sink = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    while line := source.readline():
        name, size = json.loads(line)
        kind: Any = getattr(protocol, name)
        answer = pickle.dumps(parsed(source.read(size), kind), pickle.HIGHEST_PROTOCOL)
        sink.write(len(answer).to_bytes(8, "big") + answer)
        sink.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
