"""Moves token ids and step inputs, accepts and makes drafts, and copies rows that ids pick.

Ids and inputs are some hundred bytes, so that launch latency is all there is; each row is read once
and written once, so that memory bounds it.  A ring of earlier outputs is read once for several
sequences, so that a search costs its bytes in L2 and some comparisons a place: nearly all places
differ in their last token or the one before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...config import step_fields as _step
from .dependent import wait_for_previous
from .sampling import mix

_NO_SLOT = tl.constexpr(_step.NO_SLOT)
_NO_SAMPLE = tl.constexpr(_step.NO_SAMPLE)
_NO_DRAFT = tl.constexpr(_step.NO_DRAFT)
_ON_DEVICE = tl.constexpr(_step.ON_DEVICE)
_REJECTED = tl.constexpr(_step.REJECTED)
_NOT_DRAFTED = tl.constexpr(_step.NOT_DRAFTED)
_MOST_LOOKS = tl.constexpr(_step.MOST_LOOKS)
NOW: tl.constexpr = tl.constexpr(".cv")  # not what a cache has of the host's memory


@triton.jit
def _write_inputs_kernel(
    packed_ptr, last_ptr, tokens_ptr, rows_ptr, tables_ptr, num_tokens, num_seqs, columns,
    tokens_stride, rows_stride, sequence_stride, table_stride, TOKEN_FIELDS: tl.constexpr,
    ROW_FIELDS: tl.constexpr, TABLES: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr
):  # fmt: skip
    """Item i of every field in ``packed``; they lie one behind the other as in ``write_inputs``.
    FIELDS is a power of two that holds the fields of tokens and of rows.  All loads of ``packed``
    come before all stores: it may be the host's memory, microseconds away."""
    wait_for_previous(PROGRAMMATIC)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    field, item = tl.arange(0, FIELDS)[:, None], i[None, :]
    cell = i < num_seqs * TABLES * columns
    token = (field < TOKEN_FIELDS) & (item < num_tokens)
    row = (field < ROW_FIELDS) & (item <= num_seqs)
    feed_ptr = packed_ptr + TOKEN_FIELDS * num_tokens
    packed_rows_ptr = feed_ptr + num_tokens
    cells_ptr = packed_rows_ptr + ROW_FIELDS * (num_seqs + 1)
    feed = tl.load(feed_ptr + i, mask=i < num_tokens, other=-1, cache_modifier=NOW)
    given = tl.load(packed_ptr + field * num_tokens + item, mask=token, cache_modifier=NOW)
    ends_ptr = packed_rows_ptr + field * (num_seqs + 1) + item
    ends = tl.load(ends_ptr, mask=row, cache_modifier=NOW)
    block = tl.load(cells_ptr + i, mask=cell, cache_modifier=NOW)
    fed = tl.load(last_ptr + feed, mask=feed >= 0, other=0)
    given = tl.where((field == 0) & (feed >= 0)[None, :], fed[None, :], given)
    tl.store(tokens_ptr + field * tokens_stride + item, given, mask=token)
    tl.store(rows_ptr + field * rows_stride + item, ends, mask=row)
    of_sequence = tl.maximum(TABLES * columns, 1)
    sequence = i // of_sequence
    table = (i - sequence * of_sequence) // tl.maximum(columns, 1)
    column = i - sequence * of_sequence - table * columns
    to_ptr = tables_ptr + sequence * sequence_stride + table * table_stride + column
    tl.store(to_ptr, block, mask=cell)


@triton.jit
def _keep_tokens_kernel(
    last_ptr,
    ids_ptr,
    slots_ptr,
    read_ptr,
    num_seqs,
    BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    wait_for_previous(PROGRAMMATIC)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_seqs
    slots = tl.load(slots_ptr + rows, mask=mask, other=0)
    ids = tl.load(ids_ptr + rows, mask=mask, other=0)
    tl.store(last_ptr + slots, tl.maximum(ids, 0), mask=mask)  # an input id, whatever it is
    tl.store(read_ptr + rows, ids, mask=mask)


@triton.jit
def _is_right(
    row, number, mask, ids_ptr, inputs_ptr, lens_ptr, slots_ptr, chances_ptr, judged_ptr,
    IS_JUDGED: tl.constexpr
):  # fmt: skip
    """Whether the draft of a row, which is the input of the row and number ``number`` of its
    request, is right if all before are.  True outside of ``mask``."""
    draft = tl.load(inputs_ptr + row, mask=mask, other=0)
    right = draft == tl.load(ids_ptr + row - 1, mask=mask, other=0)
    if IS_JUDGED:
        slot = tl.load(slots_ptr + row, mask=mask, other=0)
        seed = tl.load(judged_ptr + slot, mask=mask, other=-1)
        position = tl.load(lens_ptr + row, mask=mask, other=1) - 1
        word = mix(seed.to(tl.uint32) ^ tl.full((), 0x9E3779B9, tl.uint32))
        word = mix(word ^ position.to(tl.uint32)) >> 8
        chance = tl.load(chances_ptr + number - 1, mask=mask, other=0.0)
        right = tl.where(seed < 0, right, word.to(tl.float32) * 5.960464477539063e-08 < chance)
    return right | (mask == 0)


@triton.jit
def _accept_tokens_kernel(
    last_ptr, lengths_ptr, history_ptr, chances_ptr, judged_ptr, ids_ptr, inputs_ptr, slots_ptr,
    order_ptr, lens_ptr, kept_ptr, read_ptr, num_seqs, width, history_stride,
    IS_JUDGED: tl.constexpr, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr
):  # fmt: skip
    """Each row looks at its own draft and at those before it, and at the next:
    the last row whose draft is right has the newest token of its slot."""
    wait_for_previous(PROGRAMMATIC)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_seqs
    order = tl.load(order_ptr + rows, mask=mask, other=_NO_SAMPLE)
    slots = tl.load(slots_ptr + rows, mask=mask, other=0)
    ids = tl.load(ids_ptr + rows, mask=mask, other=0)
    lens = tl.load(lens_ptr + rows, mask=mask, other=0)
    kept = order >= 0
    for back in range(tl.max(order, 0)):
        kept &= _is_right(
            rows - back, order - back, (back < order) & mask, ids_ptr, inputs_ptr, lens_ptr,
            slots_ptr, chances_ptr, judged_ptr, IS_JUDGED,
        )  # fmt: skip
    after = tl.load(order_ptr + rows + 1, mask=rows + 1 < num_seqs, other=0)
    goes_on = after > 0
    goes_on &= _is_right(
        rows + 1, after, goes_on, ids_ptr, inputs_ptr, lens_ptr, slots_ptr, chances_ptr,
        judged_ptr, IS_JUDGED,
    )  # fmt: skip
    last = kept & (goes_on == 0)
    token = tl.maximum(ids, 0)  # an input id, whatever it is
    tl.store(last_ptr + slots, token, mask=last)
    tl.store(lengths_ptr + slots, lens + 1, mask=last)
    place_ptr = history_ptr + slots.to(tl.int64) * history_stride + lens
    tl.store(place_ptr, token, mask=kept & (lens < width))
    result = tl.where(kept | (order == _NO_SAMPLE), ids, _REJECTED)
    result = tl.where(order == _NO_DRAFT, _NOT_DRAFTED, result)
    tl.store(kept_ptr + rows, result, mask=mask)
    tl.store(read_ptr + rows, result, mask=mask)


@triton.jit
def _place_rows_kernel(
    lengths_ptr, drafts_ptr, slots_ptr, tables_ptr, order_ptr, ids_ptr, positions_ptr, lens_ptr,
    mappings_ptr, num_seqs, block_size, max_blocks, drafts_stride, sequence_stride, table_stride,
    mapping_stride, GROUPS: tl.constexpr, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr
):  # fmt: skip
    wait_for_previous(PROGRAMMATIC)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(order_ptr + rows, mask=rows < num_seqs, other=0) - _ON_DEVICE
    mask = number >= 0
    slots = tl.load(slots_ptr + rows, mask=mask, other=0)
    place = tl.load(lengths_ptr + slots, mask=mask, other=1) - 1 + number
    is_draft = number > 0
    draft_ptr = drafts_ptr + (number - 1) * drafts_stride + slots
    draft = tl.load(draft_ptr, mask=is_draft, other=0)
    block = tl.minimum(tl.maximum(place // block_size, 0), max_blocks - 1)
    for group in tl.static_range(GROUPS):
        mapping_ptr = mappings_ptr + group * mapping_stride + rows
        is_stored = mask & (tl.load(mapping_ptr, mask=mask, other=_NO_SLOT) != _NO_SLOT)
        table_ptr = tables_ptr + rows * sequence_stride + group * table_stride
        stored = tl.load(table_ptr + block, mask=is_stored, other=0)
        tl.store(mapping_ptr, stored * block_size + place % block_size, mask=is_stored)
    tl.store(ids_ptr + rows, tl.maximum(draft, 0), mask=is_draft)
    tl.store(positions_ptr + rows, place, mask=mask)
    tl.store(lens_ptr + rows, place + 1, mask=mask)
    tl.store(order_ptr + rows, tl.where(draft < 0, _NO_DRAFT, number), mask=mask)


@triton.jit
def _own_place(known_ptr, length, shortest, longest, BLOCK: tl.constexpr):
    """The earlier place of a sequence's last tokens, and above 32 bits the number of tokens that
    are the same there; 0 if there is none.  It goes from the end to the beginning, BLOCK places at
    once, until it has seen enough of them or a place that no other can exceed.  A place is the
    position behind it."""
    newest, looks = length - 1, 0
    best = tl.full((), 0, tl.int64)
    while (newest >= shortest) & (looks < _MOST_LOOKS) & ((best >> 32) < longest):
        at = newest - tl.arange(0, BLOCK)
        alike = at >= shortest
        count = tl.zeros((BLOCK,), tl.int32)
        for back in range(1, longest + 1):
            alike &= at >= back
            token = tl.load(known_ptr + at - back, mask=alike, other=-1)
            end = tl.load(known_ptr + length - back, mask=back <= length, other=-2)
            alike &= token == end
            count += alike.to(tl.int32)
        hit = (count >= shortest).to(tl.int32)
        in_turn = looks + tl.cumsum(hit, 0)
        is_seen = (hit > 0) & (in_turn <= _MOST_LOOKS)
        key = (count.to(tl.int64) << 32) | at.to(tl.int64)
        best = tl.maximum(best, tl.max(tl.where(is_seen, key, 0), 0))
        looks += tl.sum(hit, 0)
        newest -= BLOCK
    return best


@triton.jit
def _propose_ngrams_kernel(
    history_ptr, lengths_ptr, slots_ptr, order_ptr, drafts_ptr, has_ptr, width, history_stride,
    drafts_stride, shortest, longest, most, MOST: tl.constexpr, BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr
):  # fmt: skip
    """A program a row."""
    wait_for_previous(PROGRAMMATIC)
    row = tl.program_id(0)
    if tl.load(order_ptr + row) == 0:
        slot = tl.load(slots_ptr + row)
        length = tl.minimum(tl.load(lengths_ptr + slot), width)
        known_ptr = history_ptr + slot.to(tl.int64) * history_stride
        best = _own_place(known_ptr, length, shortest, longest, BLOCK)
        first = (best & 0xFFFFFFFF).to(tl.int32)
        number = tl.arange(0, MOST)
        behind = first + number % tl.maximum(length - first, 1)
        draft = tl.load(known_ptr + behind, mask=(number < most) & (best > 0), other=-1)
        tl.store(drafts_ptr + number * drafts_stride + slot, draft, mask=number < most)
        tl.store(has_ptr + row, (best > 0).to(tl.int32))
    else:
        tl.store(has_ptr + row, 0)


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
        best = _own_place(known_ptr, length, shortest, longest, BLOCK)
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


@triton.jit
def _gather_rows_kernel(
    index_ptr,
    first_ptr,
    table_ptr,
    out_ptr,
    num_rows,
    width,
    table_stride,
    INDEX_OFFSET: tl.constexpr,
    ROW_OFFSET: tl.constexpr,
    IS_PART: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    wait_for_previous(PROGRAMMATIC)
    item = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(index_ptr + item + INDEX_OFFSET).to(tl.int64)
    mask = cols < width
    if IS_PART:
        row -= tl.load(first_ptr).to(tl.int64)
        is_here = (row >= 0) & (row < num_rows)
        value = tl.load(table_ptr + row * table_stride + cols, mask=mask & is_here, other=0.0)
    else:
        row = tl.minimum(tl.maximum(row + ROW_OFFSET, 0), num_rows - 1)
        value = tl.load(table_ptr + row * table_stride + cols, mask=mask)
    tl.store(out_ptr + item * width + cols, value, mask=mask)
