"""``Awake`` keeps an event loop from sleeping for a while.

A process that sleeps takes a tenth of a millisecond to wake up, and then finds its caches cold.  A
lone request would wait for that twice on its way: when it comes, and when its first token does.
"""

from __future__ import annotations

import asyncio
import os
import time

AWAKE_S = 0.05
"""Time after a request in which the loop polls instead of sleeping, in seconds."""
_SPARE_PROCESSORS = 8
"""Fewest processors with which polling does not slow the processes that work."""


class Awake:
    """Has a loop poll for ``AWAKE_S`` after each call of ``stay``, where processors are plenty.

    Other processes come first wherever they want the same processor.

    Args:
        processors: how many this process may use; counted if None.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, processors: int | None = None) -> None:
        self._loop = loop
        usable = len(os.sched_getaffinity(0)) if processors is None else processors
        self._is_worth_it = usable >= _SPARE_PROCESSORS
        self._until, self._polls = 0.0, False

    def stay(self) -> None:
        """Stay awake for ``AWAKE_S`` from now on."""
        self._until = time.monotonic() + AWAKE_S
        if self._is_worth_it and not self._polls:
            self._poll()

    def sleep(self) -> None:
        """Stop polling, because messages keep the loop awake."""
        self._until = 0.0

    def _poll(self) -> None:
        os.sched_yield()
        self._polls = time.monotonic() < self._until
        if self._polls:
            self._loop.call_soon(self._poll)
