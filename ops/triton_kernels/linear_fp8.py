"""A tiled GEMM of FP8 or int8 matrices with their scales; on Hopper by warp-group MMA.

Tensor cores of Hopper add FP8 products with fewer bits than float32 has; a partial sum of at most
256 products, one step's, is made there, and added in float32.  Sums of int8 products are exact, in
int32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import prefetch, wait_for_previous
from .groups import Rows, Scales


@triton.jit
def _mma(x, w, total, SWAPPED: tl.constexpr, BLOCK_K: tl.constexpr):
    """``total`` plus x @ w.T; both transposed if SWAPPED."""
    if total.dtype == tl.int32:
        if SWAPPED:
            total = tl.dot(w, tl.trans(x), total, out_dtype=tl.int32)
        else:
            total = tl.dot(x, tl.trans(w), total, out_dtype=tl.int32)
    elif SWAPPED:
        total = tl.dot(w, tl.trans(x), total, max_num_imprecise_acc=BLOCK_K)
    else:
        total = tl.dot(x, tl.trans(w), total, max_num_imprecise_acc=BLOCK_K)
    return total


@triton.jit
def first_of_tile(tile, M, N, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """First row and column of a tile.  GROUP_M row tiles come before the next column tile."""
    tiles_in_group = GROUP_M * tl.cdiv(N, BLOCK_N)
    first_tile = tile // tiles_in_group * GROUP_M
    group_rows = tl.minimum(tl.cdiv(M, BLOCK_M) - first_tile, GROUP_M)
    within = tile % tiles_in_group
    return (first_tile + within % group_rows) * BLOCK_M, within // group_rows * BLOCK_N


@triton.jit
def place_of_program(
    partial_ptr, splits, steps, M, N, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr
):  # fmt: skip
    """(tile, split, rows, first column, first step, step behind the last) of this program: with
    ``partial_ptr``, ``splits`` programs share the steps of a tile."""
    tile, split, first, last = tl.program_id(0), 0, 0, steps
    if partial_ptr is not None:
        split = tile % splits
        tile = tile // splits
        first = steps * split // splits
        last = steps * (split + 1) // splits
    first_row, first_col = first_of_tile(tile, M, N, GROUP_M, BLOCK_M, BLOCK_N)
    return tile, split, first_row + tl.arange(0, BLOCK_M), first_col, first, last


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


@triton.jit
def _store_scaled(
    total, rows, cols, M, N, x_scales, x_scale_ptr, weight_scale_ptr, bias_ptr, out_ptr,
    SCHEME: tl.constexpr
):  # fmt: skip
    """Write a tile's sums, scaled unless each step was, and the bias."""
    read_cols = tl.minimum(cols, N - 1)
    total = total.to(tl.float32)
    if SCHEME == "tensor":
        total *= tl.load(x_scale_ptr) * tl.load(weight_scale_ptr)
    elif SCHEME == "token":
        total *= tl.load(x_scales)[:, None]
        total *= tl.load(weight_scale_ptr + read_cols)[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + read_cols).to(tl.float32)[None, :]
    out = out_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _linear_fp8_kernel(
    x: Rows, x_scale: Scales, weight: Rows, weight_scale_ptr, weight_scale_row, bias_ptr, out_ptr,
    partial_ptr, counter_ptr, M, N, K, splits, SCHEME: tl.constexpr, SWAPPED: tl.constexpr,
    WHOLE_STEPS: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, PROGRAMMATIC: tl.constexpr
):  # fmt: skip
    """out = (x * x_scale) @ (weight * weight_scale).T + bias.

    SCHEME "block": a scale for 128 columns of a row of x, and for 128 x 128 of the weight; BLOCK_K
    is 128, which BLOCK_N divides.  With ``partial_ptr``, ``splits`` programs share a tile's depth.
    AHEAD: lines of 128 bytes of each row of a weight tile that are fetched into L2 while the kernel
    ahead still runs.
    """
    steps = tl.cdiv(K, BLOCK_K)
    tile, split, rows, first_col, first, last = place_of_program(
        partial_ptr, splits, steps, M, N, GROUP_M, BLOCK_M, BLOCK_N
    )
    cols = first_col + tl.arange(0, BLOCK_N)
    # Rows and columns outside are read as the last ones, and not written.
    read_rows = tl.minimum(rows, M - 1)
    weight_rows = weight.ptr + tl.minimum(cols, N - 1).to(tl.int64)[:, None] * weight.stride
    if PROGRAMMATIC:
        line = tl.minimum(first * BLOCK_K + tl.arange(0, AHEAD) * 128, K - 1)
        prefetch(weight_rows + line[None, :])
    wait_for_previous(PROGRAMMATIC)
    depth = tl.arange(0, BLOCK_K)
    x_at = x.ptr + read_rows.to(tl.int64)[:, None] * x.stride + depth[None, :]
    weight_at = weight_rows + depth[None, :]
    x_scales = x_scale.ptr + read_rows * x_scale.row_stride
    weight_scales = weight_scale_ptr + first_col // 128 * weight_scale_row
    sums: tl.constexpr = tl.int32 if x.ptr.dtype.element_ty == tl.int8 else tl.float32
    total = tl.zeros((BLOCK_N, BLOCK_M) if SWAPPED else (BLOCK_M, BLOCK_N), dtype=sums)
    scale = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if SCHEME == "block":
        scale = tl.load(x_scales + first * x_scale.group_stride) * tl.load(weight_scales + first)
    for step in range(first, last):
        start = step * BLOCK_K
        inside = None if WHOLE_STEPS else (start + depth < K)[None, :]
        other = None if WHOLE_STEPS else 0.0
        a = tl.load(x_at + start, mask=inside, other=other)
        w = tl.load(weight_at + start, mask=inside, other=other)
        if SCHEME == "block":
            partial = _mma(a, w, tl.zeros_like(total), SWAPPED, BLOCK_K)
            total += partial * (scale[None, :] if SWAPPED else scale[:, None])
            # Load the next step's scales now, so that no step waits for its own.
            ahead = tl.minimum(step + 1, steps - 1)
            scale = tl.load(x_scales + ahead * x_scale.group_stride) * tl.load(
                weight_scales + ahead
            )
        else:
            total = _mma(a, w, total, SWAPPED, BLOCK_K)
    if SWAPPED:
        total = tl.trans(total)
    whole = True
    if partial_ptr is not None:
        total, whole = sum_of_splits(
            total, tile, split, splits, partial_ptr, counter_ptr, BLOCK_M, BLOCK_N
        )
    if whole:
        _store_scaled(
            total, rows, cols, M, N, x_scales, x_scale.ptr, weight_scale_ptr, bias_ptr, out_ptr,
            SCHEME
        )  # fmt: skip
