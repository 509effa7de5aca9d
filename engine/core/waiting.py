"""``WaitingQueue`` holds what waits, in order of (priority, arrival).

A request for several outputs is one entry.  It gives the request of its next output when that comes
up, so that thousands of copies cost as much as one until they begin.  Whatever is taken from the
middle leaves its entry behind; entries of nothing are swept once they are more than the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import TypeAlias

from ..messages.open_outputs import request_and_index
from .request import Request, Siblings

_Entry: TypeAlias = tuple[int, int, Request | Siblings]
_MOST_SWEPT = 64
"""Up to this many stale entries of the heap are never swept, as little would be gained."""


class WaitingQueue:
    """What waits.  Its length counts outputs.

    Args:
        heed_priority: order by priority before arrival.
    """

    def __init__(self, heed_priority: bool) -> None:
        self._heed_priority = heed_priority
        self._heap: list[_Entry] = []
        self._requests: dict[str, Request] = {}  # for one output each
        self._several: dict[str, Siblings] = {}  # until their last output has ended
        self._num_unbegun = 0  # outputs of ``_several`` that have no request yet
        self._num_arrived = 0
        self.num_tokens = 0
        """Prompt tokens of all that waits."""

    def __len__(self) -> int:
        return len(self._requests) + self._num_unbegun

    def __contains__(self, name: object) -> bool:
        """Whether a request of this id waits or has outputs that do, or an output does."""
        return name in self._requests or name in self._several or self._is_unbegun(str(name))

    def __iter__(self) -> Iterator[Request]:
        """The requests that wait in no order; one for several outputs stands for those to come."""
        yield from self._requests.values()
        yield from (each.request for each in self._several.values() if each.num_left)

    def _is_unbegun(self, name: str) -> bool:
        if not self._num_unbegun or (read := request_and_index(name)) is None:
            return False
        siblings = self._several.get(read[0])
        return siblings is not None and siblings.next_index <= read[1] < siblings.end

    def add(self, request: Request) -> None:
        """Put a new request at the end of the queue of its priority."""
        request.arrival = self._num_arrived
        if request.sampling_params.n == 1:
            self._num_arrived += 1
            self.put(request)
            return
        siblings = Siblings.of(request)
        self._num_arrived += siblings.num_left
        self._several[request.request_id] = siblings
        self._num_unbegun += siblings.num_left
        self.num_tokens += siblings.num_left * len(request.prompt_token_ids)
        heapq.heappush(self._heap, (*self.key(request), siblings))

    def put(self, request: Request) -> None:
        """Put a request for one output where its arrival says."""
        self._requests[request.request_id] = request
        self.num_tokens += len(request.prompt_token_ids)
        heapq.heappush(self._heap, (*self.key(request), request))

    def first(self) -> Request | None:
        """Return the request that is to run next, without removing it."""
        heap = self._heap
        while heap:
            entry = heap[0][-1]
            if isinstance(entry, Request):
                if self._requests.get(entry.request_id) is entry:
                    return entry
            elif self._several.get(entry.request.request_id) is entry:
                return self._begin(entry)
            heapq.heappop(heap)
        return None

    def _begin(self, siblings: Siblings) -> Request:
        """Make the request of the next output, and put it first in the queue."""
        request = siblings.begin()
        heapq.heapreplace(self._heap, (*self.key(request), request))
        if siblings.num_left:
            heapq.heappush(self._heap, (*self.key(siblings.request), siblings))
        self._requests[request.request_id] = request
        self._num_unbegun -= 1
        return request

    def take(self, request: Request) -> None:
        """Take out the first request, which is about to run."""
        heapq.heappop(self._heap)
        self._forget(request)

    def remove(self, request: Request) -> None:
        """Take out a request that has ended."""
        self._forget(request)
        self._sweep()

    def _forget(self, request: Request) -> None:
        del self._requests[request.request_id]
        self.num_tokens -= len(request.prompt_token_ids)

    def leave(self, request: Request) -> None:
        """Note that a request has ended, wherever it was: it may be the last of several outputs."""
        siblings = request.siblings
        if siblings is not None:
            del siblings.open[request.request_id]
            if not siblings.open and not siblings.num_left:
                self._several.pop(siblings.request.request_id, None)

    def find(self, name: str) -> list[Request]:
        """The requests that have the id, or are of outputs of the one that has it; outputs of it
        that have not begun will not begin any more."""
        if (request := self._requests.get(name)) is not None:
            return [request]
        siblings = self._several.pop(name, None)
        if siblings is None:
            return []
        self._num_unbegun -= siblings.num_left
        self.num_tokens -= siblings.num_left * len(siblings.request.prompt_token_ids)
        siblings.end = siblings.next_index
        self._sweep()
        return list(siblings.open.values())

    def _sweep(self) -> None:
        """Drop the entries of nothing if they are more than half."""
        if len(self._heap) > 2 * (len(self._requests) + len(self._several)) + _MOST_SWEPT:
            self._heap = [each for each in self._heap if self._is_of_something(each[-1])]
            heapq.heapify(self._heap)

    def _is_of_something(self, entry: Request | Siblings) -> bool:
        if isinstance(entry, Request):
            return self._requests.get(entry.request_id) is entry
        return self._several.get(entry.request.request_id) is entry and entry.num_left > 0

    def key(self, request: Request) -> tuple[int, int]:
        """The key by which requests are ordered."""
        return (request.priority if self._heed_priority else 0, request.arrival)
