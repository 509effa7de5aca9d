"""Finds in a ring of earlier outputs what the end of a sequence went on with.

The ring is read once for several sequences, so that a search costs the bytes of the ring in L2 and
some comparisons a place: nearly all places differ in their last token or the one before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import wait_for_previous
from .tokens import own_place


@triton.jit
def _search_ring_kernel(
    history_ptr, lengths_ptr, slots_ptr, order_ptr, ring_ptr, head_ptr, found_ptr, owners_ptr,
    salts_ptr, num_seqs, width, history_stride, shortest, longest, capacity, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr
):  # fmt: skip
    """A program has BLOCK places of the ring and ROWS rows.  A place is the position behind it, and
    its key the number of tokens that are the same above its age, of which the newest is most."""
    wait_for_previous(PROGRAMMATIC)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < capacity
    newest = tl.load(ring_ptr + tl.where(at > 0, at, capacity) - 1, mask=inside, other=-1)
    head = tl.load(head_ptr)
    age = at - head
    age += tl.where(age < 0, capacity, 0)
    for number in range(ROWS):
        row = tl.program_id(1) * ROWS + number
        order = tl.load(order_ptr + row, mask=row < num_seqs, other=-1)
        if order == 0:
            slot = tl.load(slots_ptr + row)
            length = tl.minimum(tl.load(lengths_ptr + slot), width)
            known_ptr = history_ptr + slot.to(tl.int64) * history_stride
            end = tl.load(known_ptr + length - 1, mask=length > 0, other=-2)
            alike = newest == end
            count = alike.to(tl.int32)
            goes_on, back = tl.max(count, 0), 2
            while (goes_on > 0) & (back <= longest):
                place = at - back
                place += tl.where(place < 0, capacity, 0)
                token = tl.load(ring_ptr + place, mask=alike, other=-1)
                end = tl.load(known_ptr + length - back, mask=back <= length, other=-2)
                alike &= token == end
                count += alike.to(tl.int32)
                goes_on = tl.max(alike.to(tl.int32), 0)
                back += 1
            hit = count >= shortest
            if tl.max(hit.to(tl.int32), 0) > 0:
                owner = tl.load(owners_ptr + at, mask=hit, other=0)
                following = tl.load(ring_ptr + at, mask=hit, other=-1)
                hit &= (owner == tl.load(salts_ptr + slot)) & (following >= 0)
                key = (count.to(tl.int64) << 32) | age.to(tl.int64)
                best = tl.max(tl.where(hit, key, 0), 0)
                if best > 0:
                    tl.atomic_max(found_ptr + slot, best)


@triton.jit
def _propose_suffix_kernel(
    history_ptr, lengths_ptr, slots_ptr, order_ptr, ring_ptr, head_ptr, found_ptr, drafts_ptr,
    has_ptr, width, history_stride, shortest, longest, capacity, drafts_stride, most,
    MOST: tl.constexpr, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr
):  # fmt: skip
    """A program a row, which takes the longer one of the sequence's own place and the ring's."""
    wait_for_previous(PROGRAMMATIC)
    row = tl.program_id(0)
    if tl.load(order_ptr + row) == 0:
        slot = tl.load(slots_ptr + row)
        length = tl.minimum(tl.load(lengths_ptr + slot), width)
        known_ptr = history_ptr + slot.to(tl.int64) * history_stride
        best = own_place(known_ptr, length, shortest, longest, BLOCK)
        in_ring = tl.atomic_xchg(found_ptr + slot, tl.full((), 0, tl.int64))
        number = tl.arange(0, MOST)
        is_own = (best >> 32) >= (in_ring >> 32)
        first = (best & 0xFFFFFFFF).to(tl.int32)
        behind = first + number % tl.maximum(length - first, 1)
        is_kept = (number < most) & (best > 0) & is_own
        own = tl.load(known_ptr + behind, mask=is_kept, other=-1)
        age = (in_ring & 0xFFFFFFFF).to(tl.int32)
        place = (tl.load(head_ptr) + age + number) % capacity
        other = tl.load(ring_ptr + place, mask=(number < most) & (is_own == 0), other=-1)
        is_over = tl.cumsum((other < 0).to(tl.int32), 0) > 0
        draft = tl.where(is_own, own, tl.where(is_over, -1, other))
        tl.store(drafts_ptr + number * drafts_stride + slot, draft, mask=number < most)
        tl.store(has_ptr + row, ((best > 0) | (in_ring > 0)).to(tl.int32))
    else:
        tl.store(has_ptr + row, 0)
