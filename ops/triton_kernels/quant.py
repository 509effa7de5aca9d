"""Quantization to FP8 or int8, by itself or after a norm or a gated activation.

A program has a tile of rows.  The kernels are bandwidth-bound: rows are read once and stay in
registers while their largest magnitude is found.  The values before quantization are never written
to memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import gated
from .dependent import start_next_and_wait
from .float8 import stored_as, to_float32
from .groups import Rows
from .norm import row_sums

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _scale_for(largest, dtype: tl.constexpr):
    """The scale by which a magnitude becomes the largest of ``dtype``; never zero."""
    floor: tl.constexpr = 2.0**-64
    inverse: tl.constexpr = 1.0 / (127.0 if dtype == tl.int8 else 448.0)
    return tl.where(largest < floor, floor, largest) * inverse


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _scale_of(values, axis: tl.constexpr, dtype: tl.constexpr):
    """The scale of the largest magnitude along ``axis``."""
    if _INTERPRETED:  # the interpreter would call _larger in Python for each element
        is_nan = values != values
        largest = tl.max(tl.where(is_nan, 0.0, tl.abs(values)), axis)
        largest = tl.where(tl.max(is_nan.to(tl.int32), axis) > 0, float("nan"), largest)
    else:
        largest = tl.reduce(tl.abs(values), axis, _larger)
    return _scale_for(largest, dtype)


@triton.jit
def _inverse(scale):
    return tl.div_rn(1.0, scale)


@triton.jit
def _store_quantized(
    values,
    q_ptr,
    scale_ptr,
    known_scale,
    row,
    cols,
    num_rows,
    width,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    part=0,
):
    """Store ``values`` [ROWS, BLOCK] (float32, 0 outside of the matrix) as FP8 or int8, and their
    scales.

    GROUP columns share a scale, which is stored at [group][row].  GROUP is BLOCK if the rows are
    whole, and 0 if all use ``known_scale``.  ``part`` is the index of this BLOCK of columns.
    """
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    in_rows = row < num_rows if ROWS > 1 else tl.full((1,), True, tl.int1)
    if GROUP == 0:
        scaled = values * _inverse(known_scale)
    elif GROUP == BLOCK:
        scale = _scale_of(values, 1, dtype)
        tl.store(scale_ptr + row, scale, mask=in_rows)
        scaled = values * _inverse(scale)[:, None]
    else:
        grouped = tl.reshape(values, (ROWS, BLOCK // GROUP, GROUP))
        scale = _scale_of(grouped, 2, dtype)
        group = part * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        mask = in_rows[:, None] & (group < width // GROUP)[None, :]
        at = group.to(tl.int64)[None, :] * num_rows + row[:, None]
        tl.store(scale_ptr + at, scale, mask=mask)
        scaled = tl.reshape(grouped * _inverse(scale)[:, :, None], (ROWS, BLOCK))
    mask = in_rows[:, None] & (cols < width)[None, :]
    q = stored_as(scaled, dtype)
    tl.store(q_ptr + row[:, None] * width + cols[None, :], q, mask=mask)


@triton.jit
def _activated(at, mask, width, ACTIVATION: tl.constexpr):
    """The values at ``at`` in float32; or with an activation, that of gates at ``at`` and of ups
    ``width`` elements after them.  Masked values are 0."""
    values = to_float32(tl.load(at, mask=mask, other=0.0))
    if ACTIVATION != "none":
        up = to_float32(tl.load(at + width, mask=mask, other=0.0))
        # Rounded as the unfused kernel does.
        values = to_float32(gated(values, up, ACTIVATION).to(at.dtype.element_ty))
    return values


@triton.jit
def _quant_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    num_rows,
    width,
    row_stride,
    ACTIVATION: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """x, or ``act(gate) * up`` of x = gate | up, each ``width`` columns, quantized."""
    start_next_and_wait(PROGRAMMATIC)
    # Neighbours in the grid are neighbours in memory.
    row = (tl.program_id(0) // PARTS).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(0) % PARTS
    cols = part * BLOCK + tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (cols < width)[None, :]
    scale = 1.0
    if GROUP == 0:
        scale = tl.load(scale_ptr)
    at = x_ptr + row[:, None] * row_stride + cols[None, :]
    values = _activated(at, mask, width, ACTIVATION)
    _store_quantized(
        values, q_ptr, scale_ptr, scale, row, cols, num_rows, width, GROUP, ROWS, BLOCK, part
    )


@triton.jit
def _largest_of_parts(largest, part, row, state_ptr, PARTS: tl.constexpr, MAX_PARTS: tl.constexpr):
    """The largest value of a row among its ``PARTS`` programs, which run at once.

    Each program publishes its value and the number of the row's turn in one word, then reads the
    words of all programs until they are of this turn.  So no word needs to be reset.  The first
    program increments the number of the turn.
    """
    words = state_ptr + row * (MAX_PARTS + 1)
    turn = tl.load(words + MAX_PARTS, volatile=True).to(tl.int32) + 1
    tl.atomic_xchg(words + part, (turn.to(tl.int64) << 32) | largest.to(tl.int64), sem="relaxed")
    index = tl.arange(0, MAX_PARTS)
    read = tl.zeros((MAX_PARTS,), dtype=tl.int64)
    late = 1
    while late > 0:
        # The word of a part that does not exist is this program's own.
        at = tl.where(index < PARTS, index, part)
        read = tl.load(words + at, volatile=True)
        late = tl.max(((read >> 32).to(tl.int32) != turn).to(tl.int32), axis=0)
    if part == 0:
        tl.store(words + MAX_PARTS, turn.to(tl.int64))
    return tl.max(read.to(tl.int32), axis=0)


@triton.jit
def _quant_split_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    state_ptr,
    width,
    row_stride,
    ACTIVATION: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """``_quant_kernel`` with a scale for each row, for few rows, each shared by PARTS programs.

    With one program a row, the arithmetic of one multiprocessor would take most of the time.
    """
    start_next_and_wait(PROGRAMMATIC)
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    cols = part * BLOCK + tl.arange(0, BLOCK)
    values = _activated(x_ptr + row * row_stride + cols, cols < width, width, ACTIVATION)
    mine = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    largest = _largest_of_parts(mine, part, row, state_ptr, PARTS, MAX_PARTS)
    scale = _scale_for(largest.to(tl.float32, bitcast=True), q_ptr.dtype.element_ty)
    if part == 0:
        tl.store(scale_ptr + row, scale)
    q = stored_as(values * _inverse(scale), q_ptr.dtype.element_ty)
    tl.store(q_ptr + row * width + cols, q, mask=cols < width)


@triton.jit
def _normed(x, weight, hidden, eps, AS_WARPS: tl.constexpr, dtype: tl.constexpr):
    """The norm of float32 rows, with the roundings of the unfused kernels."""
    inverse_rms = tl.rsqrt(row_sums(x * x, AS_WARPS) / hidden + eps)
    normed = (x * inverse_rms[:, None]).to(dtype).to(tl.float32)
    return to_float32((normed * weight[None, :]).to(dtype))


@triton.jit
def _norm_quant_kernel(
    x: Rows, residual: Rows, weight_ptr, q_ptr, scale_ptr, residual_out_ptr, num_rows, hidden, eps,
    ADD: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    WHOLE: tl.constexpr, AS_WARPS: tl.constexpr, PROGRAMMATIC: tl.constexpr
):  # fmt: skip
    """Quantize ``rms_norm(x [+ residual])``."""
    start_next_and_wait(PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dtype: tl.constexpr = x.ptr.dtype.element_ty
    # A thread holds 16 bytes of x, as in the unfused kernel, although it could store bytes by 16
    # elements.  In another layout, the sum of squares would be rounded to other bits.
    cols = tl.max_contiguous(tl.arange(0, BLOCK), 128 // dtype.primitive_bitwidth)
    width = BLOCK if WHOLE else hidden
    mask = (cols < width)[None, :]
    if ROWS > 1:
        mask = mask & (row < num_rows)[:, None]
    # Loaded before the reduction, so that their latency hides behind the row's.
    weight = tl.load(weight_ptr + cols, mask=cols < width, other=0.0).to(tl.float32)
    scale = 1.0
    if GROUP == 0:
        scale = tl.load(scale_ptr)
    x_at = x.ptr + row[:, None] * x.stride + cols[None, :]
    total = to_float32(tl.load(x_at, mask=mask, other=0.0))
    if ADD:
        r_at = residual.ptr + row[:, None] * residual.stride + cols[None, :]
        rounded = (total + to_float32(tl.load(r_at, mask=mask, other=0.0))).to(dtype)
        tl.store(residual_out_ptr + row[:, None] * width + cols[None, :], rounded, mask=mask)
        total = to_float32(rounded)
    values = _normed(total, weight, width, eps, AS_WARPS, dtype)
    _store_quantized(
        values, q_ptr, scale_ptr, scale, row, cols, num_rows, width, GROUP, ROWS, BLOCK
    )


@triton.jit
def _pairs(at, pair, mask):
    """The two-byte elements of an aligned row as they lie in memory, two in a word.  Words can be
    kept for the next iteration of a loop without an instruction."""
    words = tl.multiple_of(at.to(tl.pointer_type(tl.int32)), 16)
    return tl.load(words + pair[None, :], mask=mask, other=0)


@triton.jit
def _apart(words, dtype: tl.constexpr):
    if dtype == tl.bfloat16:
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -65536).to(tl.float32, bitcast=True)
    else:
        low = words.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return tl.interleave(low, high)


@triton.jit
def _norm_quant_rows_kernel(
    x: Rows, residual: Rows, weight_ptr, q_ptr, scale_ptr, residual_out_ptr, num_rows, hidden, eps,
    ADD: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
    PROGRAMMATIC: tl.constexpr
):  # fmt: skip
    """``_norm_quant_kernel`` for many rows: each program takes several in turn, reads the next
    while it works on one, and the weight once.  Elements have two bytes; rows are aligned to 16."""
    start_next_and_wait(PROGRAMMATIC, AT_ONCE=True)
    dtype: tl.constexpr = x.ptr.dtype.element_ty
    cols = tl.max_contiguous(tl.arange(0, BLOCK), 128 // dtype.primitive_bitwidth)
    width = BLOCK if WHOLE else hidden
    mask = (cols < width)[None, :]
    pair = tl.arange(0, BLOCK // 2)
    pairs = (pair < width // 2)[None, :]
    weight = tl.load(weight_ptr + cols, mask=cols < width, other=0.0)
    scale = 1.0
    if GROUP == 0:
        scale = tl.load(scale_ptr)
    row = tl.program_id(0).to(tl.int64)
    x_ahead = _pairs(x.ptr + row * x.stride, pair, pairs)
    if ADD:
        residual_ahead = _pairs(residual.ptr + row * residual.stride, pair, pairs)
    for _ in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        total = _apart(x_ahead, dtype)
        next_row = row + tl.num_programs(0)
        ahead = tl.minimum(next_row, num_rows - 1)
        x_ahead = _pairs(x.ptr + ahead * x.stride, pair, pairs)
        if ADD:
            rounded = (total + _apart(residual_ahead, dtype)).to(dtype)
            residual_ahead = _pairs(residual.ptr + ahead * residual.stride, pair, pairs)
            tl.store(residual_out_ptr + row * width + cols[None, :], rounded, mask=mask)
            total = to_float32(rounded)
        values = _normed(total, weight.to(tl.float32), width, eps, 0, dtype)
        here = row + tl.arange(0, 1)
        _store_quantized(
            values, q_ptr, scale_ptr, scale, here, cols, num_rows, width, GROUP, 1, BLOCK
        )
        row = next_row
