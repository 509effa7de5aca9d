"""``Heartbeat``: the engine's process proves in shared memory that it moves.

It writes the number of the step and the time of ``time.monotonic()``, which on Linux is the same
clock in all processes.  A reader thus sees a process that hangs, or was stopped, without asking it.
Each of the two is one aligned store, so no reader finds half of it; ``struct`` would clear first
what it packs into.
"""

from __future__ import annotations

import mmap
import time
from pathlib import Path

_STEP, _AT = range(2)  # places in the page, of eight bytes each


class Heartbeat:
    """A page that one process writes and others read.

    Args:
        path: the file behind it; made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            if file.tell() < mmap.PAGESIZE:
                file.truncate(mmap.PAGESIZE)
            page = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE))
        self._steps, self._times = page.cast("Q"), page.cast("d")

    def beat(self, step: int) -> None:
        """Note that step ``step`` is the last that began, now."""
        self._steps[_STEP], self._times[_AT] = step, time.monotonic()

    def read(self) -> tuple[int, float]:
        """(the last step, seconds since the last beat)."""
        return self._steps[_STEP], time.monotonic() - self._times[_AT]
