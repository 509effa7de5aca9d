"""Keeps Python's garbage collector from walking over the whole process while requests run."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

_decides = Lock()
_FROZEN_S = 60.0
_frozen_until = 0.0
"""Until when what the caller's program had frozen is taken to be frozen still."""


def _is_frozen() -> bool:
    """Whether the caller's program has frozen objects.  Python counts them one by one, 50 ms for
    half a million, so the answer that there are some holds for a minute."""
    global _frozen_until
    now = time.monotonic()
    if now >= _frozen_until and gc.get_freeze_count() > 0:
        _frozen_until = now + _FROZEN_S
    return now < _frozen_until


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
    was_frozen = _is_frozen()

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
