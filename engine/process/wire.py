"""What the two processes send each other beside the rooms' own messages, and how it is framed.

A frame is a byte that names the kind, a byte for the number of the frontend or replica that sends
it, then the message in msgpack.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Any

import zmq
from msgspec import Struct

from ...config.process.logs import LogStyle
from ..messages.codec import decode, encode
from ..messages.requests import AddRequest, CoreStats, RequestLimits


class Kind(IntEnum):
    """The first byte of a frame."""

    ADD = 1  # to the engine: Queued
    ABORT = 2  # to the engine: AbortRequests
    REPORT = 3  # to the engine, without a body; answered by REPORT with a Report
    STOP = 4  # to the engine, without a body: end the process
    READY = 5  # from the engine: Ready
    STEP = 6  # from the engine: StepOutputs
    COUNTERS = 7  # from the engine: Counters
    FAILED = 8  # from the engine: Failed; its process ends
    QUESTION = 9  # from a frontend to another: Question
    ANSWER = 10  # its Answer
    SLEEP = 11  # to the engine: Sleep; answered by REPORT
    RESET = 12  # to the engine, without a body: forget all cached prefixes; answered by REPORT


class Seat(Struct, frozen=True):
    """The place of a frontend among those that share engines.

    Attributes:
        index: the frontend's number among ``count``.  The first starts the engines, one a replica;
            the others find them by ``folder``, where all sockets are made, and ``pids``.
    """

    index: int = 0
    count: int = 1
    num_replicas: int = 1
    folder: str = ""
    pids: list[int] = []


class Place(Struct, frozen=True):
    """Where the process of an engine stands: its number among the replicas, and how many frontends
    it serves.  It is sent beside the engine's options, and the style of its log."""

    replica: int
    num_frontends: int
    log: LogStyle = LogStyle()


class Question(Struct, frozen=True):
    """What a frontend asks the others; ``number`` comes back with their answers."""

    number: int
    what: str
    names: list[str] = []


class Answer(Struct, frozen=True):
    number: int
    facts: Any


class Ready(Struct, frozen=True):
    """The engine has started: what a frontend must know of it."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    limits: RequestLimits
    max_num_seqs: int


class Queued(Struct, frozen=True, array_like=True):
    """A request as it is sent: what the engine must know of it while it lies in the backlog, and
    the bytes of the ``AddRequest``, which are read when it is taken up."""

    request_id: str
    num_outputs: int
    call: str
    """It is ``AddRequest.call``, or the id of the request if it was asked for alone."""
    request: bytes

    @classmethod
    def of(cls, request: AddRequest) -> Queued:
        call = request.call or request.request_id
        return cls(request.request_id, len(request.indices), call, encode(request))

    def read(self) -> AddRequest:
        return decode(self.request, AddRequest)


class Sleep(Struct, frozen=True):
    """The message asks an engine to sleep; ``level`` 0 wakes ``tags``, or all if that is None.  The
    report that answers it has an "error", which is "" if all went well."""

    level: int
    tags: list[str] | None = None


class Failed(Struct, frozen=True):
    """The engine's process ends with an error; ``exit_code`` is the command line's for it."""

    message: str
    exit_code: int


class Report(Struct, frozen=True):
    """``Engine.report()``."""

    facts: dict[str, Any]


class Counters(Struct, frozen=True):
    """State of the core, and sums since the start.

    Attributes:
        num_backlog: outputs of requests that have come and that the core has not taken up.
        num_steps: calls of ``EngineCore.step``.
        step_s: time spent in them, in seconds.
        rest_s: time in which no request was unfinished, in seconds.
        step_kinds: steps by "kind of step/kind of graph", as the dispatcher counts them.
        is_sleeping: the engine takes no requests until it is woken.
    """

    core: CoreStats
    num_backlog: int = 0
    num_steps: int = 0
    step_s: float = 0.0
    rest_s: float = 0.0
    step_kinds: dict[str, int] = {}
    is_sleeping: bool = False


def frame(kind: Kind, sender: int, message: Struct | None = None) -> bytes:
    return bytes((kind, sender)) + (b"" if message is None else encode(message))


def unframed(data: bytes) -> tuple[Kind, int, memoryview]:
    """The kind, the sender and the message's bytes of a frame."""
    return Kind(data[0]), data[1], memoryview(data)[2:]


def requests_address(folder: Path, replica: int) -> str:
    return f"ipc://{folder}/requests{replica}"


def outputs_address(folder: Path, frontend: int) -> str:
    return f"ipc://{folder}/outputs{frontend}"


def heartbeat_path(folder: Path, replica: int) -> Path:
    return folder / f"heartbeat{replica}"


def make_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket that drops nothing, and at its end waits for nobody."""
    socket = context.socket(kind)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, 0)
    return socket
