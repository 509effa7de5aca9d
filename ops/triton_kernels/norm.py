"""Stages over rows, such as RMSNorm and add + layer norm.  A program holds a tile of whole rows in
registers.

The kernel is bandwidth-bound: each row is read once and written once.  Between 2^20 and 2^22
elements, rows that are added to others have half the warps, so that more bytes are in flight.  The
bits of a row's sum do not depend on the number of warps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import start_next_and_wait
from .float8 import to_float32
from .groups import InnerRows, NormOf


@triton.jit
def row_sums(x, AS_WARPS: tl.constexpr):
    """The sum of each row of ``x``, which is float32 [ROWS, BLOCK].

    If AS_WARPS is not 0, one row is added in the order of that many warps, even if fewer hold it.
    A lane loads 16 bytes of two-byte elements at a time.  The sum is taken within lanes, then
    within warps, then over halves of the warps.
    """
    if AS_WARPS == 0:
        return tl.sum(x, axis=1)
    else:
        BLOCK: tl.constexpr = x.shape[1]
        chunks = tl.reshape(x, (BLOCK // (256 * AS_WARPS), AS_WARPS, 256))
        by_warp = tl.reshape(tl.permute(chunks, (1, 0, 2)), (1, AS_WARPS, BLOCK // AS_WARPS))
        sums = tl.sum(by_warp, axis=2)
        for level in tl.static_range(4):
            if AS_WARPS >> level > 1:
                sums = tl.sum(tl.reshape(sums, (1, 2, AS_WARPS >> (level + 1))), axis=1)
        return tl.reshape(sums, (1,))


@triton.jit
def _load_row(ptr, cols, width):
    return tl.load(ptr + cols, mask=cols < width, other=0.0).to(tl.float32)


@triton.jit
def _normed(x, weight, norm: NormOf, width, AS_WARPS: tl.constexpr, dtype: tl.constexpr):
    scale = tl.rsqrt(row_sums(x * x, AS_WARPS) / width + norm.eps)
    normed = x * scale[:, None]
    if norm.offset is None:
        # Rounded before the weight, as the reference; the product in float32 then rounds only once.
        normed = normed.to(dtype).to(tl.float32)
    else:
        weight += norm.offset
    return normed * weight[None, :]


@triton.jit
def _rms_norm_kernel(
    x: InnerRows, residual: InnerRows, first: NormOf, second: NormOf, factor, out_ptr, total_ptr,
    num_rows, inner, hidden, STAGES: tl.constexpr, COUNT: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr, AS_WARPS: tl.constexpr, PROGRAMMATIC: tl.constexpr
):  # fmt: skip
    """Compute COUNT stages over ROWS rows, of which STAGES has a letter each: "1", the first norm;
    "2", the second; "-", the subtraction of the mean, which makes a layer norm of the next; "+",
    the add of the residual; "*", the product with the factor; "r", rounding; "=", rounding and a
    store to ``total_ptr``.  WHOLE: rows are BLOCK wide."""
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
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    # All is loaded before the first reduction so that latencies overlap.
    if first.ptr is not None:
        first_weight = _load_row(first.ptr, cols, width)
    if first.bias is not None:
        first_bias = _load_row(first.bias, cols, width)
    if second.ptr is not None:
        second_weight = _load_row(second.ptr, cols, width)
    if second.bias is not None:
        second_bias = _load_row(second.bias, cols, width)
    value = to_float32(tl.load(x.ptr + x_row[:, None] + cols[None, :], mask=mask, other=0.0))
    if residual.ptr is not None:
        r_row = outer * residual.outer_stride + within * residual.inner_stride
        added = tl.load(residual.ptr + r_row[:, None] + cols[None, :], mask=mask, other=0.0)
    for stage in tl.static_range(COUNT):
        if STAGES[stage] == "1":
            value = _normed(value, first_weight, first, width, AS_WARPS, dtype)
            if first.bias is not None:
                value += first_bias[None, :]
        elif STAGES[stage] == "2":
            value = _normed(value, second_weight, second, width, AS_WARPS, dtype)
            if second.bias is not None:
                value += second_bias[None, :]
        elif STAGES[stage] == "-":
            # Rounded to nearest: a row of one value has the mean of that value, and no deviation.
            mean = tl.div_rn(row_sums(value, AS_WARPS), width * 1.0)
            value = tl.where(mask, value - mean[:, None], 0.0)
        elif STAGES[stage] == "+":
            value += to_float32(added)
        elif STAGES[stage] == "*":
            value *= factor
        else:
            rounded = value.to(dtype)
            if STAGES[stage] == "=":
                tl.store(total_ptr + dense, rounded, mask=mask)
            value = to_float32(rounded)
    tl.store(out_ptr + dense, value.to(dtype), mask=mask)
