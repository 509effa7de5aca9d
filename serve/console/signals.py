"""SIGTERM ends a command as an exception does: temporary folders go, compilers end with it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM


@contextmanager
def unwinding_on_sigterm() -> Iterator[None]:
    """Have SIGTERM end the processes that this one started and raise SystemExit; for a block, or a
    function as its decorator.  A program that handles the signal itself keeps its own way."""
    own = threading.current_thread() is not threading.main_thread()
    if own or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _unwind(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # it is being obeyed
    for pid in _descendants(os.getpid()):
        with suppress(OSError):
            os.kill(pid, signal.SIGTERM)
    raise SystemExit(EXIT_CODE)


def _descendants(pid: int) -> list[int]:
    """The processes that a process started, and those that they did; none without /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            # pid (name) state ppid: the name may hold anything, a bracket too.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    pids = list(children.get(pid, ()))
    for below in pids:  # which grows meanwhile
        pids += children.get(below, ())
    return pids
