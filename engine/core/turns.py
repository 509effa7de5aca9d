"""Chooses which running request is preempted, for want of memory or so that another call begins."""

from __future__ import annotations

from collections import OrderedDict

from .request import Request, RequestStatus
from .waiting import WaitingQueue

_SHARE = 8


def share_of_a_call(max_num_seqs: int) -> int:
    """Places that a call may hold while others wait."""
    return max(1, max_num_seqs // _SHARE)


def in_order(
    running: OrderedDict[str, Request], waiting: WaitingQueue, heed_priority: bool
) -> list[Request]:
    """Running requests, the one that is preempted last first: by priority, those of calls beyond
    their share behind the others, and then as they started.  A step computes them in this order, so
    that a request that is preempted to make room has no entry in the step yet."""
    ordered = list(running.values())
    if waiting.has_large:
        ordered.sort(key=waiting.is_of_large)
    if heed_priority:
        ordered.sort(key=lambda request: request.priority)
    return ordered


def last_running(order: list[Request]) -> Request:
    """The last of ``in_order`` that still runs; those behind it are dropped from the list."""
    while order[-1].status is not RequestStatus.RUNNING:
        order.pop()
    return order[-1]


def gives_way(running: OrderedDict[str, Request], waiting: WaitingQueue) -> list[Request]:
    """The output whose place goes to the first request that waits, if there is one: that which
    started last of a call beyond its share, unless its last token is on its way.  It is one a step,
    as the next step shows whether that was enough."""
    if name := waiting.who_gives_way():
        for request in reversed(running.values()):
            if request.call == name and request.num_tokens < request.max_total_tokens:
                return [request]
    return []
