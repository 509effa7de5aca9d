"""Moves of token ids and step inputs; some hundred bytes, so launch latency is all there is."""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import wait_for_previous

NOW: tl.constexpr = tl.constexpr(".cv")  # not what a cache has of the host's memory


@triton.jit
def _write_inputs_kernel(
    packed_ptr,
    last_ptr,
    ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    seq_lens_ptr,
    slots_ptr,
    starts_ptr,
    table_ptr,
    num_tokens,
    num_seqs,
    columns,
    table_stride,
    BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """Item i of every part of ``packed``; they lie one behind the other as in ``write_inputs``.
    All loads of it come before all stores: it may be the host's memory, microseconds away."""
    wait_for_previous(PROGRAMMATIC)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token, row, start = i < num_tokens, i < num_seqs, i <= num_seqs
    cell = i < num_seqs * columns
    rows_ptr = packed_ptr + 3 * num_tokens + i
    feed = tl.load(rows_ptr + 2 * num_seqs, mask=row & token, other=-1, cache_modifier=NOW)
    ids = tl.load(packed_ptr + i, mask=token, other=0, cache_modifier=NOW)
    position = tl.load(packed_ptr + num_tokens + i, mask=token, cache_modifier=NOW)
    slot = tl.load(packed_ptr + 2 * num_tokens + i, mask=token, cache_modifier=NOW)
    length = tl.load(rows_ptr, mask=row, cache_modifier=NOW)
    request_slot = tl.load(rows_ptr + num_seqs, mask=row, cache_modifier=NOW)
    query_start = tl.load(rows_ptr + 3 * num_seqs, mask=start, cache_modifier=NOW)
    block = tl.load(rows_ptr + 4 * num_seqs + 1, mask=cell, cache_modifier=NOW)
    fed = tl.load(last_ptr + feed, mask=feed >= 0, other=0)
    tl.store(ids_ptr + i, tl.where(feed >= 0, fed, ids), mask=token)
    tl.store(positions_ptr + i, position, mask=token)
    tl.store(slot_mapping_ptr + i, slot, mask=token)
    tl.store(seq_lens_ptr + i, length, mask=row)
    tl.store(slots_ptr + i, request_slot, mask=row)
    tl.store(starts_ptr + i, query_start, mask=start)
    sequence = i // tl.maximum(columns, 1)
    tl.store(table_ptr + sequence * table_stride + (i - sequence * columns), block, mask=cell)


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
