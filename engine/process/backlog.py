"""``Backlog``: the requests that have come to an engine and that its core has not taken up.

All messages that have come are read between two steps, so that an abort overtakes every request
before it.  To take a request up takes longer, so that few are at once.  Calls take turns, so that a
request does not wait for the thousand prompts of another call.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator

from .wire import Queued

_TAKEN_AT_ONCE = 32
"""Most requests that are taken up between two steps, which takes about a millisecond."""
_TAKEN_S = 0.002
"""Longest time for that, in seconds, unless one request takes longer: prompts may be long."""


class Backlog:
    """Requests in the order in which they came, each with the number of its frontend."""

    def __init__(self) -> None:
        self._queued: dict[str, tuple[Queued, int]] = {}
        self._calls: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()
        """The ids of the requests of each call; the first call is next."""
        self.num_outputs = 0
        """Number of outputs that all queued requests ask for."""

    def __len__(self) -> int:
        return len(self._queued)

    def add(self, queued: Queued, frontend: int) -> None:
        """Put a request behind those of its call, and a call behind the others."""
        self._queued[queued.request_id] = queued, frontend
        self._calls.setdefault(queued.call, OrderedDict())[queued.request_id] = None
        self.num_outputs += queued.num_outputs

    def drop(self, request_id: str) -> bool:
        entry = self._queued.pop(request_id, None)
        if entry is None:
            return False
        self.num_outputs -= entry[0].num_outputs
        call = self._calls[entry[0].call]
        del call[request_id]
        if not call:
            del self._calls[entry[0].call]
        return True

    def take(self) -> Iterator[tuple[Queued, int]]:
        """Take out the oldest request of each call in turn, as many as may be taken up at once."""
        start = time.monotonic()
        for _ in range(min(len(self._queued), _TAKEN_AT_ONCE)):
            call = next(iter(self._calls))
            self._calls.move_to_end(call)
            request_id = next(iter(self._calls[call]))
            queued = self._queued[request_id]
            self.drop(request_id)
            yield queued
            if time.monotonic() - start > _TAKEN_S:
                return
