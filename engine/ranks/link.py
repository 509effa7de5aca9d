"""What rank 0 and another rank send each other, and how it is framed: the length and the kind, then
the message in msgpack."""

from __future__ import annotations

import hmac
import socket
import struct
from contextlib import suppress
from enum import IntEnum

from msgspec import Struct

from ...config import EngineOptions, Hardware
from ..messages.codec import encode
from ..worker.place import Place, Seat

_HEAD = struct.Struct("=IB")


class Kind(IntEnum):
    """The kind of a frame."""

    START = 1  # to a rank: Start
    KEY = 2  # from a rank: ArtifactKey
    ARTIFACT = 3  # from the first rank of a stage, and to its others: ArtifactFolder
    PROGRAM = 4  # from a rank, without a body: it has loaded the artifact; to one: all have
    WEIGHTS = 5  # from a rank, without a body: it has loaded its weights
    MEET = 6  # to a rank, without a body: join the process group
    READY = 7  # from a rank, without a body: it waits for steps
    STEP = 8  # to a rank: Batch
    CAPTURE = 9  # to a rank, without a body: capture one graph that no step has needed
    STOP = 10  # to a rank, without a body: end the process
    FAILED = 11  # from a rank: RankFailed; its process ends
    HELLO = 12  # from a rank that rank 0 has not started itself: Hello
    ENDED = 13  # from a rank's actor in Ray: Ended


class Start(Struct, frozen=True):
    """Who a rank is, and what it starts with.

    Attributes:
        store: where the process group is made, see ``meeting_store``.
        num_threads: threads of torch's CPU kernels, on which generated code depends.
    """

    options: EngineOptions
    hardware: Hardware
    place: Place
    store: str
    num_threads: int


class Hello(Struct, frozen=True):
    """A rank says who it is.  Ranks of torchrun give their number alone.

    Attributes:
        pid: the rank's process id.
        versions: what must be equal on all hosts.
    """

    rank: int
    pid: int = 0
    seat: Seat = Seat()
    versions: dict[str, str] = {}


class Ended(Struct, frozen=True):
    """How a rank's process has ended."""

    how: str


class ArtifactKey(Struct, frozen=True):
    """The factors of the key that a rank would look for."""

    factors: dict[str, str]


class ArtifactFolder(Struct, frozen=True):
    """Where a stage's artifact lies: the folder of its store."""

    store: str


class RankFailed(Struct, frozen=True):
    """A rank ends with an error, see ``lifetime.Failure``."""

    message: str
    exit_code: int
    traceback: str


class Link:
    """One end of the socket between rank 0 and another rank."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, kind: Kind, message: Struct | bytes = b"") -> None:
        """Send one frame; a message of several ranks is encoded once, by the caller.

        Raises:
            OSError: the other side has ended.
        """
        body = message if isinstance(message, bytes) else encode(message)
        self._end.sendall(_HEAD.pack(len(body), kind) + body)

    def receive(self) -> tuple[Kind, bytes]:
        """Wait for a frame.

        Raises:
            OSError, EOFError: the other side has ended.
        """
        length, kind = _HEAD.unpack(self._read(_HEAD.size))
        return Kind(kind), self._read(length)

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._end.recv(size - len(data))
            if not part:
                raise EOFError("the other rank has ended")
            data += part
        return bytes(data)

    def begins_with(self, secret: bytes) -> bool:
        """Whether the other side has sent the secret, ahead of any frame.

        Raises:
            OSError, EOFError: the other side has ended, or has not sent as much.
        """
        return hmac.compare_digest(self._read(len(secret)), secret)

    def shut(self) -> None:
        """Break the connection, for all processes that have this end."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end.close()
