"""The rows of drafts behind a decode, and the KV blocks for them."""

from __future__ import annotations

from collections.abc import Sequence

from ..batch import IN_PLACE, ON_DEVICE, ScheduledRequest
from ..kv_blocks import BlockPool
from ..request import Request


def room_of(request: Request) -> int:
    """Most drafts of a step, if all in flight are right: a row behind the last samples one more
    token."""
    return request.max_total_tokens - request.num_tokens - request.num_drafts


def rows_of(entry: ScheduledRequest, drafts: Sequence[int]) -> list[ScheduledRequest]:
    """The rows of drafts behind a decode."""
    ahead = max(entry.ahead, 0) if drafts[0] == ON_DEVICE else IN_PLACE
    return [
        ScheduledRequest(entry.request, entry.start + i, 1, 1, draft=draft, ahead=ahead)
        for i, draft in enumerate(drafts, 1)
    ]


def with_blocks(entry: ScheduledRequest, count: int, pool: BlockPool, margin: int) -> int:
    """How many of ``count`` drafts have room in the KV cache; the request has the blocks then."""
    blocks, first = entry.request.blocks, entry.start + 1 + max(entry.ahead, 0)
    if first + count > blocks.num_slots:
        missing = pool.num_missing(blocks, first + count, first + count)
        if sum(missing) + margin > pool.num_free:
            return max(0, min(count, blocks.num_slots - first))
        pool.extend(blocks, missing)
    return count
