"""Copy rows of a matrix picked by an index: embedding and last-token gather.

Bandwidth-bound: every picked row is read once and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._op import Launch


@triton.jit
def _gather_rows_kernel(
    index_ptr,
    table_ptr,
    out_ptr,
    num_rows,
    width,
    table_stride,
    INDEX_OFFSET: tl.constexpr,
    ROW_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    item = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(index_ptr + item + INDEX_OFFSET).to(tl.int64)
    row = tl.minimum(tl.maximum(row + ROW_OFFSET, 0), num_rows - 1)
    mask = cols < width
    value = tl.load(table_ptr + row * table_stride + cols, mask=mask)
    tl.store(out_ptr + item * width + cols, value, mask=mask)


def gather_rows(
    index: Tensor, table: Tensor, num_items: int, *, index_offset: int = 0, row_offset: int = 0
) -> tuple[list[Launch], Tensor]:
    """``out[i] = table[clamp(index[i + index_offset] + row_offset)]``."""
    num_rows, width = table.shape
    out = torch.empty((num_items, width), dtype=table.dtype, device=table.device)
    table = table if table.stride(1) == 1 else table.contiguous()
    block = min(triton.next_power_of_2(width), 2048)
    launch = Launch(
        kernel=_gather_rows_kernel,
        grid=(num_items, triton.cdiv(width, block)),
        args={
            "index_ptr": index,
            "table_ptr": table,
            "out_ptr": out,
            "num_rows": num_rows,
            "width": width,
            "table_stride": table.stride(0),
        },
        constexprs={"INDEX_OFFSET": index_offset, "ROW_OFFSET": row_offset, "BLOCK": block},
        num_warps=min(max(block // 512, 1), 4),
    )
    return [launch], out
