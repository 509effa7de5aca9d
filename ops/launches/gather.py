"""Describes the launch that copies rows of a matrix picked by an index."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.launch import Launch, Launches
from ..core.tiles import cdiv, dense_rows, next_power_of_2


def gather_rows(
    index: Tensor,
    table: Tensor,
    num_items: int,
    *,
    index_offset: int = 0,
    row_offset: int = 0,
    first: Tensor | None = None,
) -> Launches[Tensor]:
    """``out[i] = table[clamp(index[i + index_offset] + row_offset)]``.

    With ``first`` [1] int32 the table's rows count from there, and rows outside of it are zeros
    instead of clamped.
    """
    num_rows, width = table.shape
    out = torch.empty((num_items, width), dtype=table.dtype, device=table.device)
    table = dense_rows(table)
    block = min(next_power_of_2(width), 2048)
    launch = Launch(
        kernel="gather:_gather_rows_kernel",
        grid=(num_items, cdiv(width, block)),
        args={
            "index_ptr": index,
            "first_ptr": index if first is None else first,
            "table_ptr": table,
            "out_ptr": out,
            "num_rows": num_rows,
            "width": width,
            "table_stride": table.stride(0),
        },
        constexprs={
            "INDEX_OFFSET": index_offset,
            "ROW_OFFSET": row_offset,
            "IS_PART": first is not None,
            "BLOCK": block,
        },
        num_warps=min(max(block // 512, 1), 4),
        dynamic=("num_rows",),
    )
    return [launch], out
