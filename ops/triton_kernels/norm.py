"""RMSNorm and add + RMSNorm: a tile of whole rows a program, held in registers.

Bandwidth-bound: a row is read once and written once; nothing is read twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import start_next_and_wait


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    residual_out_ptr,
    num_rows,
    inner,
    hidden,
    x_outer_stride,
    x_inner_stride,
    residual_outer_stride,
    residual_inner_stride,
    eps,
    weight_offset,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    start_next_and_wait(PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (cols < hidden)[None, :]
    outer = row // inner
    within = row % inner
    x_row = outer * x_outer_stride + within * x_inner_stride
    dense = row[:, None] * hidden + cols[None, :]
    # The weight is loaded before the reduction so that its latency hides behind the row's.
    weight = tl.load(weight_ptr + cols, mask=cols < hidden, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + x_row[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if ADD:
        r_row = outer * residual_outer_stride + within * residual_inner_stride
        residual = tl.load(residual_ptr + r_row[:, None] + cols[None, :], mask=mask, other=0.0)
        total = (x + residual.to(tl.float32)).to(out_ptr.dtype.element_ty)
        tl.store(residual_out_ptr + dense, total, mask=mask)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / hidden + eps)
    normed = x * scale[:, None]
    if weight_offset is None:
        # Rounded before the weight, as the reference; the product in float32 then rounds only once.
        normed = normed.to(out_ptr.dtype.element_ty).to(tl.float32)
    else:
        weight += weight_offset
    out = normed * weight[None, :]
    tl.store(out_ptr + dense, out.to(out_ptr.dtype.element_ty), mask=mask)
