"""``Part`` tells a drafter that drafts behind a step what the step computes of a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from ..batch import Drafted, ScheduledRequest
from ..kv_blocks import BlockPool
from ..request import Request


class Part(Struct, frozen=True):
    """A request's share of a step.

    Attributes:
        end: the position behind its last token, but for drafts.
        samples: a token is sampled behind that.
        num_ahead: as many of its drafts, in this step and those in flight, may be right.
        num_drafts: those of this step.
        is_wanted: it may have drafts of the device.
    """

    request: Request
    end: int
    samples: bool
    num_ahead: int
    num_drafts: int
    is_wanted: bool


class Reach(Protocol):
    """Part of ``Planner``."""

    def reach(self, part: Part, depth: int) -> int:
        """Tokens that a request must have room for, so that it may have ``depth`` drafts behind a
        step if all that are in flight are right; more than it may ever have, if it may not."""


def parts_of(
    entries: Sequence[ScheduledRequest],
    drafted: Sequence[Drafted],
    most_for: Callable[[Request], int],
) -> list[Part]:
    """The parts of a step.

    Args:
        entries: what the step computes, without rows of drafts.
        drafted: who has rows of drafts beside.
        most_for: most drafts that the device may make for a request.
    """
    counts = {id(each.request): each.num_drafts for each in drafted}
    parts: dict[int, Part] = {}
    for entry in entries:  # of several of a request, the last says where it ends
        request, count = entry.request, counts.get(id(entry.request), 0)
        parts[id(request)] = Part(
            request=request,
            end=entry.start + entry.num_tokens,
            samples=bool(entry.num_sampled),
            num_ahead=max(entry.ahead, 0) + count,
            num_drafts=count,
            is_wanted=most_for(request) > 0,
        )
    return [*parts.values()]


def make_room(
    parts: Sequence[Part], planner: Reach, depth: int, pool: BlockPool, margin: int
) -> None:
    """Give requests the blocks for their drafts to come, if ``pool`` has more than ``margin``
    besides; who gets none has no drafts."""
    if not depth:
        return
    for part in parts:
        if not (part.is_wanted and part.samples):
            continue
        blocks, num_tokens = part.request.blocks, planner.reach(part, depth)
        if blocks.num_slots < num_tokens <= pool.num_blocks * pool.block_size:
            missing = pool.num_missing(blocks, num_tokens, num_tokens)
            if sum(missing) + margin <= pool.num_free:
                pool.extend(blocks, missing)
