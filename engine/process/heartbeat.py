"""``Heartbeat``: the engine's process proves in shared memory that it moves.

It writes the number of the step and the time of ``time.monotonic()``, which on Linux is the same
clock in all processes.  A reader thus sees a process that hangs, or was stopped, without asking it.
"""

from __future__ import annotations

import mmap
import struct
import time
from pathlib import Path

_LAYOUT = struct.Struct("=Qd")


class Heartbeat:
    """A page that one process writes and others read.

    Args:
        path: the file behind it; made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            if file.tell() < _LAYOUT.size:
                file.truncate(mmap.PAGESIZE)
            self._page = mmap.mmap(file.fileno(), mmap.PAGESIZE)

    def beat(self, step: int) -> None:
        """Note that step ``step`` is the last that began, now."""
        _LAYOUT.pack_into(self._page, 0, step, time.monotonic())

    def read(self) -> tuple[int, float]:
        """(the last step, seconds since the last beat)."""
        step, at_s = _LAYOUT.unpack_from(self._page, 0)
        return step, time.monotonic() - at_s
