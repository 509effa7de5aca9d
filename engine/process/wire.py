"""What the two processes send each other beside the rooms' own messages, and how it is framed.

A frame is one byte that names the kind, then the message in msgpack.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Any

import zmq
from msgspec import Struct

from ..messages.codec import encode
from ..messages.requests import CoreStats, RequestLimits


class Kind(IntEnum):
    """The first byte of a frame."""

    ADD = 1  # to the engine: AddRequest
    ABORT = 2  # to the engine: AbortRequests
    REPORT = 3  # to the engine, without a body; answered by REPORT with a Report
    STOP = 4  # to the engine, without a body: end the process
    READY = 5  # from the engine: Ready
    STEP = 6  # from the engine: StepOutputs
    COUNTERS = 7  # from the engine: Counters
    FAILED = 8  # from the engine: Failed; its process ends


class Ready(Struct, frozen=True):
    """The engine has started: what a frontend must know of it."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    limits: RequestLimits
    max_num_seqs: int


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
        num_steps: calls of ``EngineCore.step``.
        step_s: time spent in them, in seconds.
        rest_s: time in which no request was unfinished, in seconds.
        step_kinds: steps by "kind of step/kind of graph", as the dispatcher counts them.
    """

    core: CoreStats
    num_steps: int = 0
    step_s: float = 0.0
    rest_s: float = 0.0
    step_kinds: dict[str, int] = {}


def frame(kind: Kind, message: Struct | None = None) -> bytes:
    """The bytes of a frame."""
    return bytes((kind,)) + (b"" if message is None else encode(message))


def requests_address(folder: Path) -> str:
    """The socket on which the engine hears."""
    return f"ipc://{folder}/requests"


def outputs_address(folder: Path) -> str:
    """The socket on which the frontend hears."""
    return f"ipc://{folder}/outputs"


def make_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket that drops nothing, and at its end waits for nobody."""
    socket = context.socket(kind)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, 0)
    return socket
