"""A plain tiled GEMM of FP8 matrices with their scales: the portable kernel.

Tensor cores of Hopper add FP8 products with fewer bits than float32 has; a partial sum of at most
128 products is made there, and added in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import wait_for_previous


@triton.jit
def _linear_fp8_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    x_stride,
    x_scale_row,
    x_scale_group,
    weight_stride,
    weight_scale_row,
    SCHEME: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """out = (x * x_scale) @ (weight * weight_scale).T + bias.

    SCHEME "block": a scale for 128 columns of a row of x, and for 128 x 128 of the weight; BLOCK_K
    is 128, which BLOCK_N divides.
    """
    wait_for_previous(PROGRAMMATIC)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_in_group = GROUP_M * tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // tiles_in_group
    group_rows = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    within = tl.program_id(0) % tiles_in_group
    rows = (group * GROUP_M + within % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    first_col = (within // group_rows) * BLOCK_N
    cols = first_col + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    in_rows = rows < M
    in_cols = cols < N
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    weight_rows = weight_ptr + cols.to(tl.int64)[None, :] * weight_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    x_scales = x_scale_ptr + rows * x_scale_row
    weight_scales = weight_scale_ptr + first_col // 128 * weight_scale_row
    for start in range(0, K, BLOCK_K):
        k = start + depth
        x = tl.load(x_rows + k[None, :], mask=in_rows[:, None] & (k < K)[None, :], other=0.0)
        w = tl.load(weight_rows + k[:, None], mask=(k < K)[:, None] & in_cols[None, :], other=0.0)
        if SCHEME == "block":
            at = x_scales + start // 128 * x_scale_group
            scale = tl.load(at, mask=in_rows, other=0.0) * tl.load(weight_scales + start // 128)
            total += tl.dot(x, w, max_num_imprecise_acc=BLOCK_K) * scale[:, None]
        else:
            total = tl.dot(x, w, total, max_num_imprecise_acc=BLOCK_K)
    if SCHEME == "tensor":
        total *= tl.load(x_scale_ptr) * tl.load(weight_scale_ptr)
    elif SCHEME == "token":
        total *= tl.load(x_scales, mask=in_rows, other=0.0)[:, None]
        total *= tl.load(weight_scale_ptr + cols, mask=in_cols, other=0.0)[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + cols, mask=in_cols, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_cols[None, :])
