"""``WaitingQueue`` holds what waits, in order of (priority, arrival)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from .request import Request


class WaitingQueue:
    """What waits.

    Args:
        heed_priority: order by priority before arrival.
    """

    def __init__(self, heed_priority: bool) -> None:
        self._heed_priority = heed_priority
        self._requests: dict[str, Request] = {}
        # In order.  Requests that were taken from the middle are dropped when they come up.
        self._heap: list[tuple[int, int, Request]] = []
        self._num_arrived = 0
        self.num_tokens = 0
        """Prompt tokens of all that waits."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, name: object) -> bool:
        return name in self._requests

    def __iter__(self) -> Iterator[Request]:
        """The requests that wait, in no order."""
        yield from self._requests.values()

    def get(self, name: str) -> Request | None:
        return self._requests.get(name)

    def add(self, request: Request) -> None:
        """Put a new request at the end of the queue of its priority."""
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self.put(request)

    def put(self, request: Request) -> None:
        """Put a request where its arrival says."""
        self._requests[request.request_id] = request
        self.num_tokens += len(request.prompt_token_ids)
        heapq.heappush(self._heap, (*self.key(request), request))

    def first(self) -> Request | None:
        """The request that is to run next; it goes on waiting."""
        while self._heap:
            request = self._heap[0][-1]
            if self._requests.get(request.request_id) is request:
                return request
            heapq.heappop(self._heap)
        return None

    def take(self, request: Request) -> None:
        """Take out the first request."""
        heapq.heappop(self._heap)
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Take out a request, wherever it is."""
        del self._requests[request.request_id]
        self.num_tokens -= len(request.prompt_token_ids)

    def key(self, request: Request) -> tuple[int, int]:
        """What requests are ordered by."""
        return (request.priority if self._heed_priority else 0, request.arrival)
