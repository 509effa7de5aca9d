"""RMSNorm and add + RMSNorm.  A program holds a tile of whole rows in registers.

The kernel is bandwidth-bound: each row is read once and written once.  Between 2^20 and 2^22
elements, rows that are added to others have half the warps, so that more bytes are in flight.  The
bits of a row's sum do not depend on the number of warps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import start_next_and_wait
from .float8 import to_float32
from .groups import InnerRows


@triton.jit
def sum_of_squares(x, AS_WARPS: tl.constexpr):
    """The sum of squares of each row of ``x``, which is float32 [ROWS, BLOCK].

    If AS_WARPS is not 0, one row is added in the order of that many warps, even if fewer hold it.
    A lane loads 16 bytes of two-byte elements at a time.  The sum is taken within lanes, then
    within warps, then over halves of the warps.
    """
    if AS_WARPS == 0:
        return tl.sum(x * x, axis=1)
    else:
        BLOCK: tl.constexpr = x.shape[1]
        chunks = tl.reshape(x * x, (BLOCK // (256 * AS_WARPS), AS_WARPS, 256))
        by_warp = tl.reshape(tl.permute(chunks, (1, 0, 2)), (1, AS_WARPS, BLOCK // AS_WARPS))
        sums = tl.sum(by_warp, axis=2)
        for level in tl.static_range(4):
            if AS_WARPS >> level > 1:
                sums = tl.sum(tl.reshape(sums, (1, 2, AS_WARPS >> (level + 1))), axis=1)
        return tl.reshape(sums, (1,))


@triton.jit
def _rms_norm_kernel(
    x: InnerRows, residual: InnerRows, weight_ptr, out_ptr, residual_out_ptr, num_rows, inner,
    hidden, eps, weight_offset, ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    WHOLE: tl.constexpr, AS_WARPS: tl.constexpr, PROGRAMMATIC: tl.constexpr
):  # fmt: skip
    """Normalize ROWS rows, with ADD the sums with ``residual``.  WHOLE: rows are BLOCK wide."""
    start_next_and_wait(PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    width = BLOCK if WHOLE else hidden
    mask = (cols < width)[None, :]
    if ROWS > 1:
        mask = mask & (row < num_rows)[:, None]
    outer = row // inner
    within = row % inner
    x_row = outer * x.outer_stride + within * x.inner_stride
    dense = row[:, None] * width + cols[None, :]
    # The weight is loaded before the reduction so that its latency hides behind the row's.
    weight = tl.load(weight_ptr + cols, mask=cols < width, other=0.0).to(tl.float32)
    total = to_float32(tl.load(x.ptr + x_row[:, None] + cols[None, :], mask=mask, other=0.0))
    if ADD:
        r_row = outer * residual.outer_stride + within * residual.inner_stride
        added = tl.load(residual.ptr + r_row[:, None] + cols[None, :], mask=mask, other=0.0)
        rounded = (total + to_float32(added)).to(out_ptr.dtype.element_ty)
        tl.store(residual_out_ptr + dense, rounded, mask=mask)
        total = to_float32(rounded)
    scale = tl.rsqrt(sum_of_squares(total, AS_WARPS) / width + eps)
    normed = total * scale[:, None]
    if weight_offset is None:
        # Rounded before the weight, as the reference; the product in float32 then rounds only once.
        normed = normed.to(out_ptr.dtype.element_ty).to(tl.float32)
    else:
        weight += weight_offset
    out = normed * weight[None, :]
    tl.store(out_ptr + dense, out.to(out_ptr.dtype.element_ty), mask=mask)
