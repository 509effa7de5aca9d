"""Copy rows of a matrix picked by an index: embedding and last-token gather.

Bandwidth-bound: every picked row is read once and written once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import wait_for_previous


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
