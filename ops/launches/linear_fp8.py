"""Describes the launch of the tiled GEMM of FP8 or int8.

Tiles follow from rows and columns as measured, splits from a rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..core.counters import counters
from ..core.device_table import num_sms
from ..core.float8 import E4M3
from ..core.launch import Launch, Launches
from ..core.tiles import cdiv, dense_rows, next_power_of_2

# Row tiles walked before the next column tile, so that weight tiles stay in L2.
_GROUP_M = 8
_LINES_AHEAD = 4


@dataclass(frozen=True)
class Tile:
    """The tile that a program computes, and how it computes it.

    Args:
        rows, columns, depth: of a step; ``depth`` in elements, that is bytes.
        stages: steps whose copies are under way.
        least_steps: the fewest of a split: below, its start and its sum are most of its time.
        an_sm: programs for a multiprocessor that a tile's depth is split for.
        swapped: the weight is the tensor core's first operand: less of it idles for few rows.
    """

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 4
    swapped: bool = False
    least_steps: int = 14
    an_sm: int = 2


# By most rows, then by fewest columns: the fastest measured on an H200 (docs/lab/linear.md).
_Tiles: TypeAlias = dict[int, tuple[tuple[int, Tile], ...]]
_TILES: _Tiles = {
    16: ((0, Tile(16, 64, 256, swapped=True)),),
    32: ((0, Tile(32, 64, 256, swapped=True)),),
    64: ((16384, Tile(64, 128, 128)), (0, Tile(64, 32, 256))),
    128: ((16384, Tile(64, 128, 128)), (0, Tile(128, 64, 128, warps=8, an_sm=1))),
    256: ((0, Tile(128, 64, 128, warps=8, an_sm=1)),),
    1 << 62: ((0, Tile(128, 128, 128, warps=8, stages=3)),),
}
# With a scale for each 128 in depth, which is then a step's.
_TILES_OF_BLOCKS: _Tiles = {
    16: (
        (16384, Tile(16, 128, 128, stages=5, swapped=True)),
        (0, Tile(16, 64, 128, stages=6, swapped=True, least_steps=6, an_sm=3)),
    ),
    32: (
        (16384, Tile(32, 128, 128, swapped=True)),
        (0, Tile(32, 64, 128, stages=6, swapped=True, least_steps=6, an_sm=3)),
    ),
    64: ((16384, Tile(64, 128, 128)), (0, Tile(64, 64, 128, stages=5, least_steps=8))),
    128: ((16384, Tile(64, 128, 128)), (0, Tile(128, 64, 128, warps=8, an_sm=1))),
    1 << 62: ((0, Tile(128, 128, 128, warps=8, stages=3)),),
}


# Few rows of FP8 go to csrc, of int8 they come here; measured on an H200.
_TILES_OF_INT8: _Tiles = {8: ((0, Tile(8, 64, 256, swapped=True)),), **_TILES}


def tile_of(scheme: str, m: int, n: int, dtype: torch.dtype = E4M3) -> Tile:
    """The tile for ``m`` rows and ``n`` columns of ``dtype``."""
    tiles = _TILES_OF_INT8 if dtype == torch.int8 else _TILES
    tiles = _TILES_OF_BLOCKS if scheme == "block" else tiles
    by_columns = next(found for most, found in tiles.items() if m <= most)
    return next(tile for fewest, tile in by_columns if n >= fewest)


def _invariant_tile(m: int) -> Tile:
    """Choose between tiles that add the same sums in the same order, unsplit: both use matrix
    instructions of 64 rows and partial sums of 128 products."""
    return Tile(64, 64, 128, stages=5) if m <= 256 else Tile(128, 128, 128, warps=8, stages=3)


def splits_of(tile: Tile, m: int, n: int, k: int) -> int:
    """Parts of the depth that different programs sum, where tiles alone leave processors idle.

    By the next power of two of the rows, and by the processors of the table's GPU rather than of
    that at hand: whether there are any parts is fixed in the code.
    """
    tiles = cdiv(next_power_of_2(m), tile.rows) * cdiv(n, tile.columns)
    most = cdiv(k, tile.depth) // tile.least_steps
    return max(min(num_sms(torch.device("meta")) * tile.an_sm // tiles, most), 1)


@dataclass(frozen=True)
class Tiling:
    """What the launch of a tiled GEMM has beside its operands: the grid, the kernel's last
    arguments, and constants."""

    grid: tuple[int]
    args: dict[str, Any]
    constexprs: dict[str, Any]


def tiling(
    tile: Tile,
    sizes: tuple[int, int, int],
    device: torch.device,
    *,
    splits: int,
    lines_ahead: int,
    sums: torch.dtype = torch.float32,
) -> Tiling:
    """The tiles of a GEMM of ``sizes`` (rows, columns, depth), of which each is made by ``splits``
    programs, with the memory for their sums of a dtype.  ``lines_ahead``: lines of each row of a
    weight tile that are fetched into L2 while the kernel ahead still runs."""
    m, n, k = sizes
    tiles = cdiv(m, tile.rows) * cdiv(n, tile.columns)
    arrived, partial = counters(device), None  # asked for always: a capture may come next
    if splits > 1:
        numel = tiles * splits * tile.rows * tile.columns
        partial = torch.empty(numel, dtype=sums, device=device)
    return Tiling(
        (tiles * splits,),
        {
            "partial_ptr": partial,
            "counter_ptr": None if partial is None else arrived,
            "M": m,
            "N": n,
            "K": k,
            "splits": splits,
        },
        {
            "SWAPPED": tile.swapped,
            "WHOLE_STEPS": k % tile.depth == 0,
            "GROUP_M": _GROUP_M,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.columns,
            "BLOCK_K": tile.depth,
            "AHEAD": lines_ahead,
        },
    )


def _row_stride(scheme: str, x_scale: Tensor, m: int) -> int:
    """Steps to the next row's scale: none if all rows share one.  That of a single row is
    arbitrary: 1, as if there were more rows."""
    if scheme == "token" and x_scale.shape[0] < m:
        return 0
    return x_scale.stride(0) if m > 1 else 1


def linear_fp8(
    scheme: str,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    *,
    invariant: bool = False,
) -> Launches[Tensor]:
    """``scheme``: "tensor", "token" or "block", which the shapes of the scales are of; x of "token"
    may have one scale for all rows.
    ``invariant``: a row has the same bits whatever the other rows are."""
    n, k = weight.shape
    x, weight = dense_rows(x), dense_rows(weight)
    m = x.shape[0]
    out = torch.empty((m, n), dtype=out_dtype, device=x.device)
    tile = _invariant_tile(m) if invariant else tile_of(scheme, m, n, x.dtype)
    splits = 1 if invariant else splits_of(tile, m, n, k)
    sums = torch.int32 if x.dtype == torch.int8 else torch.float32
    how = tiling(tile, (m, n, k), x.device, splits=splits, lines_ahead=_LINES_AHEAD, sums=sums)
    launch = Launch(
        kernel="linear_fp8:_linear_fp8_kernel",
        grid=how.grid,
        args={
            "x_ptr": x,
            "x_stride": x.stride(0),
            "x_scale_ptr": x_scale,
            "x_scale_row_stride": _row_stride(scheme, x_scale, m),
            "x_scale_group_stride": x_scale.stride(1),
            "weight_ptr": weight,
            "weight_stride": weight.stride(0),
            "weight_scale_ptr": weight_scale.contiguous(),
            "weight_scale_row": weight_scale.shape[1],
            "bias_ptr": bias,
            "out_ptr": out,
            **how.args,
        },
        constexprs={"SCHEME": scheme, **how.constexprs},
        num_warps=tile.warps,
        num_stages=tile.stages,
        dynamic=("M", "splits", "x_scale_group_stride"),
    )
    return [launch], out
