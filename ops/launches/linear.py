"""Describes the launches of the tiled GEMM."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from ..core.launch import Launch, Launches
from ..core.tiles import cdiv, dense_rows, next_power_of_2

# Row tiles walked before the next column tile, so that weight tiles stay in L2.
_GROUP_M = 8

Tile: TypeAlias = tuple[int, int, int, int, int]
"""(rows, columns, depth, warps, stages)."""


def _tile(m: int, n: int, itemsize: int) -> Tile:
    wide = itemsize > 2  # float32 runs on the plain cores: keep its tiles in registers
    block_m = min(max(next_power_of_2(max(m, 1)), 16), 64 if wide else 128)
    block_n = 32 if wide or block_m == 16 else 128
    block_k = 32 if wide else (128 if block_m == 16 else 64)
    warps = 8 if block_m * block_n >= 128 * 128 else 4
    return block_m, block_n, block_k, warps, 4 if block_m == 16 else 3


def _invariant_tile(m: int, n: int, itemsize: int) -> Tile:
    """Tiles of which every element's sum runs over K in one chain of the same instructions: of 16
    bits, matrix instructions of 64 rows and a depth of 16, on Hopper.  How many columns they have,
    and what is copied at a time, does not enter a sum; tests compare the bits.  These tiles
    were the fastest on an H200 (docs/decisions/batch-invariance-is-an-option.md)."""
    if itemsize > 2:
        return 64, 32, 32, 4, 3
    if m <= 64:
        if n <= 4096:
            return 64, 32, 128, 4, 6
        return (64, 64, 128, 4, 4) if n < 16384 else (64, 64, 64, 4, 6)
    return (64, 128, 64, 4, 4) if n <= 4096 and m <= 512 else (128, 128, 64, 8, 4)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, invariant: bool = False
) -> Launches[Tensor]:
    """``invariant``: a row has the same bits whatever the other rows are."""
    n, k = weight.shape
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    weight, rows = dense_rows(weight), dense_rows(x).reshape(-1, k)
    m = rows.shape[0]
    tile = (_invariant_tile if invariant else _tile)(m, n, x.dtype.itemsize)
    block_m, block_n, block_k, num_warps, num_stages = tile
    launch = Launch(
        kernel="linear:_linear_kernel",
        grid=(cdiv(m, block_m) * cdiv(n, block_n),),
        args={
            "x_ptr": rows,
            "weight_ptr": weight,
            "bias_ptr": bias,
            "out_ptr": out,
            "M": m,
            "N": n,
            "K": k,
            "x_stride": rows.stride(0),
            "weight_stride": weight.stride(0),
        },
        constexprs={
            "HAS_BIAS": bias is not None,
            "GROUP_M": _GROUP_M,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
        },
        num_warps=num_warps,
        num_stages=num_stages,
        dynamic=("M",),
    )
    return [launch], out
