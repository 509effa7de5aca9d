"""Moves token ids and step inputs, and copies rows that ids pick.

Ids and inputs are some hundred bytes, so that launch latency is all there is; each row is read once
and written once, so that memory bounds it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import wait_for_previous

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
