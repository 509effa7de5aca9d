"""Keeps Python's garbage collector from walking over the whole process while requests run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

_decides = Lock()


@contextmanager
def gc_paused() -> Iterator[Callable[[], None]]:
    """A full collection walks over every object of the process: 80 ms on an H200's host, twenty
    decode steps, and more beside thousands of requests.  There is none until the caller has
    ``added`` its requests, and none that walks over what was there by then until the block ends.
    A collector that is off stays off, and what the caller's program has frozen stays frozen.  Of
    blocks in several threads the first decides: the collector is the process's.
    """
    if not gc.isenabled() or not _decides.acquire(blocking=False):
        yield lambda: None
        return
    was_frozen = gc.get_freeze_count() > 0

    def added() -> None:
        if not was_frozen:
            gc.freeze()
        gc.enable()

    try:
        gc.disable()
        yield added
    finally:
        gc.enable()
        if not was_frozen:
            gc.unfreeze()
        _decides.release()
