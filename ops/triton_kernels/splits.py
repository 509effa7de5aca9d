"""The order in which a tiled GEMM computes its tiles, and the sum where programs share one."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_of_tile(tile, M, N, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """First row and column of a tile.  GROUP_M row tiles come before the next column tile."""
    tiles_in_group = GROUP_M * tl.cdiv(N, BLOCK_N)
    first_tile = tile // tiles_in_group * GROUP_M
    group_rows = tl.minimum(tl.cdiv(M, BLOCK_M) - first_tile, GROUP_M)
    within = tile % tiles_in_group
    return (first_tile + within % group_rows) * BLOCK_M, within // group_rows * BLOCK_N


@triton.jit
def sum_of_splits(
    total,
    tile,
    split,
    splits,
    partial_ptr,
    counter_ptr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The sum of a tile's splits, and whether this program was the last to arrive and has it.

    Each leaves its own in memory; the last adds them in order: the same bits whoever that is.
    """
    place = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    partial = partial_ptr + tile.to(tl.int64) * splits * (BLOCK_M * BLOCK_N) + place
    tl.store(partial + split * (BLOCK_M * BLOCK_N), total)
    # All threads' stores come before the one thread that releases them.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == splits - 1
    if is_last:
        total = tl.load(partial)
        for other in range(1, splits):
            total += tl.load(partial + other * (BLOCK_M * BLOCK_N))
        tl.store(counter_ptr + tile, 0)
    return total, is_last
