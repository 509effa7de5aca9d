"""Garbage collection while a process starts and ends."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

_THRESHOLDS = (50_000, 20, 20)


def collect_rarely() -> None:
    """Have Python look for garbage after 50,000 new objects instead of 700, unless it is told to do
    so even more rarely.

    Imports and compilers make millions of objects that stay.  With Python's thresholds a cold start
    on a CPU spends an eighth of its time on garbage collection, a warm start a tenth.
    """
    if 0 < gc.get_threshold()[0] < _THRESHOLDS[0]:
        gc.set_threshold(*_THRESHOLDS)


def leave(code: int) -> NoReturn:
    """End this process with an exit code, as Python ends it, but without its last collections: the
    memory goes back as a whole.

    Threads are waited for, exit handlers run and the standard streams are flushed.  Python would
    then collect twice, which takes 0.7 s where Inductor has been imported, and take its modules
    apart, of which nanobind, with which Triton 3.9 and others are bound, complains in 30 lines.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # A stream that fails is the business of whoever wrote to it; a missing one is None.
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


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
