"""``WaitingQueue`` holds the requests that wait for a place, and decides who is next.

Requests for one output are served by priority, then first come, first served.  All outputs of a
call, which may be thousands, have one place in the line.  A call that has begun as many outputs as
its share of the places goes to the end of the line, and one that holds its share lets all others
go first.  So a call of few outputs is served like a request for one, and nobody waits for all
outputs of a large one.

A request for several outputs is one entry.  It gives the request of its next output when that comes
up, so that thousands of copies cost as much as one until they begin.  Whatever is taken from the
middle leaves its entry behind; such entries are swept once they are more than the others.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from ..messages.open_outputs import request_and_index
from .request import Request, Siblings

_MOST_SWEPT = 64
"""Left-over entries that are never swept: there is little to gain."""


@dataclass(slots=True, eq=False)
class _Call:
    """The outputs of one call, which take turns with those of others."""

    name: str
    priority: int
    place: int
    """In the line; renewed with each turn."""
    heap: list[tuple[int, Request | Siblings]] = field(default_factory=list)
    """Its requests and outputs that wait, in order of arrival."""
    num_waiting: int = 0
    num_running: int = 0
    num_begun: int = 0
    """Outputs that have begun in this turn."""
    entry: _Entry | None = None
    """Its entry in the line; None if nothing waits."""


_Entry: TypeAlias = tuple[int, bool, int, Request | _Call]
"""Priority, whether others go first, place in the line, and whose it is."""


class WaitingQueue:
    """The waiting requests.  Its length is the number of outputs that wait.

    Args:
        heed_priority: order by priority before anything else.
        share: places that a call may hold while others wait, and outputs that begin in one turn.
    """

    def __init__(self, heed_priority: bool, share: int) -> None:
        self._heed_priority, self._share = heed_priority, share
        self._line: list[_Entry] = []
        self._requests: dict[str, Request] = {}  # for one output each
        self._several: dict[str, Siblings] = {}  # until their last output has ended
        self._calls: dict[str, _Call] = {}  # until their last output has ended
        self._over: dict[str, _Call] = {}  # those that hold more than their share
        self._num_unbegun = 0  # outputs of ``_several`` that have no request yet
        self._num_arrived = 0
        self._num_placed = 0
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
        """Put a new request at the end of the line."""
        request.arrival, n = self._num_arrived, request.sampling_params.n
        if n == 1 and not request.call:
            self._num_arrived += 1
            request.place = self._last_place()
            self._put_alone(request)
            return
        request.call = request.call or request.request_id
        call = self._calls.get(request.call)
        if call is None:
            priority = request.priority if self._heed_priority else 0
            call = _Call(request.call, priority, self._last_place())
            self._calls[call.name] = call
        if n == 1:
            self._num_arrived += 1
            self._put_into(call, request)
        else:
            siblings = Siblings.of(request)
            self._num_arrived += siblings.num_left
            self._several[request.request_id] = siblings
            self._num_unbegun += siblings.num_left
            self.num_tokens += siblings.num_left * len(request.prompt_token_ids)
            call.num_waiting += siblings.num_left
            heapq.heappush(call.heap, (request.arrival, siblings))
        self._line_up(call)

    def put(self, request: Request) -> None:
        """Put back a request that has been taken: it is the next of its call, and one alone has
        the place that it had."""
        if not request.call:
            self._put_alone(request)
            return
        call = self._calls[request.call]
        call.num_running -= 1
        self._put_into(call, request)
        self._line_up(call)

    def _put_alone(self, request: Request) -> None:
        self._note(request)
        priority = request.priority if self._heed_priority else 0
        heapq.heappush(self._line, (priority, False, request.place, request))

    def _put_into(self, call: _Call, request: Request) -> None:
        self._note(request)
        call.num_waiting += 1
        heapq.heappush(call.heap, (request.arrival, request))

    def _note(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self.num_tokens += len(request.prompt_token_ids)

    def _last_place(self) -> int:
        self._num_placed += 1
        return self._num_placed

    def _line_up(self, call: _Call) -> None:
        """Put a call where it belongs now, after anything has begun, ended or come of it."""
        if call.num_running > self._share:
            self._over[call.name] = call
        else:
            self._over.pop(call.name, None)
        if not call.num_waiting:
            call.entry = None
            if not call.num_running:
                del self._calls[call.name]
            return
        entry = (call.priority, call.num_running >= self._share, call.place, call)
        if call.entry is None or call.entry[:3] != entry[:3]:
            call.entry = entry
            heapq.heappush(self._line, entry)
            self._sweep()

    def first(self) -> Request | None:
        """The request that is to run next; it goes on waiting."""
        line = self._line
        while line:
            entry = line[0]
            if self._is_live(entry):
                whose = entry[-1]
                return whose if isinstance(whose, Request) else self._first_of(whose)
            heapq.heappop(line)
        return None

    def _first_of(self, call: _Call) -> Request:
        """The first request of a call of which something waits."""
        while True:
            _, item = call.heap[0]
            if isinstance(item, Request):
                if self._requests.get(item.request_id) is item:
                    return item
            elif item.num_left:
                request = item.begin()
                heapq.heapreplace(call.heap, (request.arrival, request))
                if item.num_left:
                    heapq.heappush(call.heap, (item.request.arrival, item))
                self._requests[request.request_id] = request
                self._num_unbegun -= 1
                return request
            heapq.heappop(call.heap)

    def take(self, request: Request) -> None:
        self._forget(request)
        if not request.call:
            heapq.heappop(self._line)
            return
        call = self._calls[request.call]
        heapq.heappop(call.heap)
        call.num_waiting -= 1
        call.num_running += 1
        call.num_begun += 1
        if call.num_begun >= self._share:
            call.num_begun, call.place = 0, self._last_place()
        self._line_up(call)

    def remove(self, request: Request) -> None:
        """Take out a request that has ended."""
        self._forget(request)
        if request.call:
            call = self._calls[request.call]
            call.num_waiting -= 1
            self._line_up(call)
        self._sweep()

    def _forget(self, request: Request) -> None:
        del self._requests[request.request_id]
        self.num_tokens -= len(request.prompt_token_ids)

    def leave(self, request: Request) -> None:
        """Note that a request has ended that ran: its call holds a place less."""
        if request.call:
            call = self._calls[request.call]
            call.num_running -= 1
            self._line_up(call)

    def close(self, request: Request) -> None:
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
        num_left = siblings.num_left
        self._num_unbegun -= num_left
        self.num_tokens -= num_left * len(siblings.request.prompt_token_ids)
        siblings.end = siblings.next_index
        if num_left:
            call = self._calls[siblings.request.call]
            call.num_waiting -= num_left
            self._line_up(call)
        self._sweep()
        return list(siblings.open.values())

    @property
    def has_large(self) -> bool:
        """Whether a call holds more places than its share."""
        return bool(self._over)

    def is_of_large(self, request: Request) -> bool:
        """Whether a running request is of a call that holds more places than its share."""
        return request.call in self._over

    def who_gives_way(self) -> str:
        """The name of the call that is to give a place to the first request that waits: the largest
        beyond its share that is of no higher priority.  "" if there is none, or if the first has
        its share."""
        if not self._over or self.first() is None:
            return ""
        priority, has_share, *_ = self._line[0]
        large = [] if has_share else [c for c in self._over.values() if c.priority >= priority]
        return max(large, key=lambda call: call.num_running).name if large else ""

    def _sweep(self) -> None:
        """Drop the left-over entries if they are more than half."""
        if len(self._line) > 2 * (len(self._requests) + len(self._calls)) + _MOST_SWEPT:
            self._line = [each for each in self._line if self._is_live(each)]
            heapq.heapify(self._line)

    def _is_live(self, entry: _Entry) -> bool:
        whose = entry[-1]
        if isinstance(whose, Request):
            return self._requests.get(whose.request_id) is whose
        return whose.entry is entry
