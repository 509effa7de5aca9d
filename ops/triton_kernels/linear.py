"""A plain tiled GEMM: out = x @ weight.T + bias, accumulated in float32.

The portable kernel and the baseline of the tuned ones.  At few rows it is bound by the weight,
N * K elements read once, and its tiles are short in M so that many programs stream it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import wait_for_previous

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, M, N, K, x_stride, weight_stride, HAS_BIAS: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PROGRAMMATIC: tl.constexpr
):  # fmt: skip
    wait_for_previous(PROGRAMMATIC)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_in_group = GROUP_M * tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // tiles_in_group
    group_rows = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    within = tl.program_id(0) % tiles_in_group
    rows = (group * GROUP_M + within % group_rows) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (within // group_rows) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    row_mask = (rows < M)[:, None]
    col_mask = (cols < N)[None, :]
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    weight_rows = weight_ptr + cols.to(tl.int64)[None, :] * weight_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + depth
        x = tl.load(x_rows + k[None, :], mask=row_mask & (k < K)[None, :], other=0.0)
        w = tl.load(weight_rows + k[:, None], mask=(k < K)[:, None] & col_mask, other=0.0)
        if _INTERPRETED:  # it holds bfloat16 as integers and would multiply those
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        total = tl.dot(x, w, total, input_precision="ieee")
    if HAS_BIAS:
        bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0)
        total += bias.to(tl.float32)[None, :]
    out = out_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=row_mask & col_mask)
