"""Ties the life of a process to that of the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import traceback
from types import FrameType
from typing import NamedTuple

from ...config import EngineDeadError, MachineError, UserError

_PR_SET_PDEATHSIG = 1


def end_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, even by ``kill -9``: more precisely,
    when the thread ends that started it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before the call
        os._exit(1)


def leave_signals_to_the_parent() -> None:
    """Ignore what a terminal sends to all processes: the parent decides, and sends a message."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignore)


def _ignore(number: int, frame: FrameType | None) -> None:
    """A handler and not SIG_IGN, which compilers that this process starts would inherit."""


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
