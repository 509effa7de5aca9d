"""Ties the life of a process to that of the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from ...config import EngineDeadError, MachineError, UserError

LOOK_S = 0.5
"""Time between two looks at the state of a process, in seconds."""
LOST_LINK = 3
"""Exit code of a rank whose connection to rank 0 has broken."""
STOPPED = "it was stopped, and did not go on"
BROKEN = "its connection to rank 0 broke"
_MOST_STOPPED = 8
"""Looks at a stopped process in a row until it counts as lost."""
_PR_SET_PDEATHSIG = 1


def end_with(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends, which it also does
    when its parent is killed by ``kill -9``."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before the call
        os._exit(1)


def leave_signals_to_the_parent() -> None:
    """Ignore what a terminal sends to all processes: the parent decides, and sends a message."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignore)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing.  SIG_IGN would be inherited by the compilers that this process starts."""


def how_ended(code: int) -> str:
    """How a process has ended, from its exit code as ``Popen`` gives it."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def how_rank_ended(code: int) -> str:
    """How a rank's process has ended."""
    return BROKEN if code == LOST_LINK else how_ended(code)


class StoppedWatch:
    """Tells whether somebody has stopped a process for seconds, for which others wait.  Counted in
    looks and not in time, since a terminal may stop and continue all processes together."""

    def __init__(self, pid: int) -> None:
        self._stat, self._looks = Path(f"/proc/{pid}/stat"), 0

    def look(self) -> bool:
        """Look once, every ``LOOK_S``."""
        with suppress(OSError):
            state = self._stat.read_text().rpartition(")")[2].split()[0]
            self._looks = self._looks + 1 if state == "T" else 0
        return self._looks > _MOST_STOPPED


class Failure(NamedTuple):
    """How a process ends with an error: what the command line would say, its exit code, and the
    traceback of an error that is not meant for users."""

    message: str
    exit_code: int
    traceback: str = ""

    @classmethod
    def of(cls, error: Exception) -> Failure:
        if isinstance(error, UserError):
            mistake = not isinstance(error, MachineError | EngineDeadError)
            return cls(str(error), 2 if mistake else 1)
        line = (str(error).splitlines() or ["no message"])[0]
        message = f"the engine failed: {type(error).__name__}: {line}"
        return cls(message, 1, "".join(traceback.format_exception(error)))
