"""Garbage collection while a process starts and ends."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (50_000, 20, 20)


def collect_rarely() -> None:
    """Have Python look for garbage after 50,000 new objects instead of 700, unless it is told to do
    so even more rarely.

    Imports and compilers make millions of objects that stay.  With Python's thresholds a cold start
    on a CPU spends an eighth of its time on garbage collection, a warm start a tenth.
    """
    if 0 < gc.get_threshold()[0] < _THRESHOLDS[0]:
        gc.set_threshold(*_THRESHOLDS)


def leave_garbage_at_exit() -> None:
    """Have this process end without a collection of garbage: its memory goes back as a whole.

    Python collects twice at an exit.  Where Inductor has been imported, that takes 0.7 s.
    """
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """``collect_rarely`` until the block ends: requests that run later get back the thresholds of
    before, with which a collection between two steps is short."""
    before = gc.get_threshold()
    collect_rarely()
    try:
        yield
    finally:
        gc.set_threshold(*before)
