"""Moves of token ids and step inputs; some hundred bytes, so launch latency is all there is."""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import wait_for_previous


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
    """Item i of every part of ``packed``; they lie one behind the other as in ``write_inputs``."""
    wait_for_previous(PROGRAMMATIC)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token, row = i < num_tokens, i < num_seqs
    rows_ptr = packed_ptr + 3 * num_tokens + i
    feed = tl.load(rows_ptr + 2 * num_seqs, mask=row & token, other=-1)
    ids = tl.load(packed_ptr + i, mask=token, other=0)
    ids = tl.where(feed >= 0, tl.load(last_ptr + feed, mask=feed >= 0, other=0), ids)
    tl.store(ids_ptr + i, ids, mask=token)
    tl.store(positions_ptr + i, tl.load(packed_ptr + num_tokens + i, mask=token), mask=token)
    stored = tl.load(packed_ptr + 2 * num_tokens + i, mask=token)
    tl.store(slot_mapping_ptr + i, stored, mask=token)
    tl.store(seq_lens_ptr + i, tl.load(rows_ptr, mask=row), mask=row)
    tl.store(slots_ptr + i, tl.load(rows_ptr + num_seqs, mask=row), mask=row)
    start = i <= num_seqs
    tl.store(starts_ptr + i, tl.load(rows_ptr + 3 * num_seqs, mask=start), mask=start)
    cell = i < num_seqs * columns
    block = tl.load(rows_ptr + 4 * num_seqs + 1, mask=cell)
    sequence = i // tl.maximum(columns, 1)
    tl.store(table_ptr + sequence * table_stride + (i - sequence * columns), block, mask=cell)


@triton.jit
def _keep_tokens_kernel(
    last_ptr, ids_ptr, slots_ptr, num_seqs, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr
):
    wait_for_previous(PROGRAMMATIC)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_seqs
    slots = tl.load(slots_ptr + rows, mask=mask, other=0)
    tl.store(last_ptr + slots, tl.load(ids_ptr + rows, mask=mask, other=0), mask=mask)
