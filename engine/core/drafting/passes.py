"""The rows of a draft model's passes behind a step, whose places the device alone knows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ....config import NO_SLOT
from ...messages.step import Batch, Ints
from .parts import Part


def fresh_rows(parts: Sequence[Part], behind: int) -> Batch:
    """``DraftPasses.fresh``: a row for the token of each part, and for each of its drafts."""
    counts = _ints([1 + part.num_drafts for part in parts])
    numbers = np.arange(counts.sum(), dtype=np.int32)
    numbers -= np.repeat(np.cumsum(counts, dtype=np.int32) - counts, counts)
    starts = np.repeat(_ints([part.end - behind for part in parts]), counts) + numbers
    ahead = np.repeat(_ints([part.num_ahead - part.num_drafts for part in parts]), counts)
    slots = np.repeat(_ints([part.request.slot for part in parts]), counts)
    return _rows(slots, starts, ahead, np.full(len(slots), NO_SLOT, np.int32))


def drafting_rows(parts: Sequence[Part], behind: int, depth: int) -> Batch:
    """``DraftPasses.drafting``: a row a part, of the place of the last draft at most."""
    slots = _ints([part.request.slot for part in parts])
    starts = _ints([part.end - behind for part in parts])
    return _rows(slots, starts, _ints([part.num_ahead + depth for part in parts]) - 1, slots)


def _rows(slots: Ints, starts: Ints, ahead: Ints, feed_slots: Ints) -> Batch:
    ones = np.ones(len(slots), np.int32)
    return Batch(
        slots=slots,
        starts=starts,
        query_lens=ones,
        num_sampled=ones,
        input_ids=np.zeros(len(slots), np.int32),
        feed_slots=feed_slots,
        block_tables=[],
        new=[],
        query_len=1,
        ahead=ahead,
    )


def _ints(values: list[int]) -> Ints:
    return np.array(values, np.int32)
