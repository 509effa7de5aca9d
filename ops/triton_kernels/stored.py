"""Reads tiles of weights in stored formats: packed numbers times the scales of their groups."""

from __future__ import annotations

import triton
import triton.language as tl

from .lowbit import numbers_of, scales_in_float32


@triton.jit
def load_stored(
    rows_at, scales_at, zeros_at, start, K, dtype: tl.constexpr, STORED: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr, WHOLE_STEPS: tl.constexpr,
    BLOCK_K: tl.constexpr
):  # fmt: skip
    """Columns from ``start`` on of some rows, [rows, BLOCK_K] in ``dtype``; 0 behind K.

    ``rows_at``, ``scales_at`` and ``zeros_at``, which may be None, point to the rows' first words,
    scales and zero points.  A word's numbers are of one group.
    """
    each: tl.constexpr = 32 // BITS
    places = start // each + tl.arange(0, BLOCK_K // each)
    groups = places * each // GROUP
    inside = None if WHOLE_STEPS else (places * each < K)[None, :]
    other = None if WHOLE_STEPS else 0
    words = tl.load(rows_at[:, None] + places[None, :], mask=inside, other=other)
    scales = tl.load(scales_at[:, None] + groups[None, :], mask=inside, other=other)
    if WHOLE_STEPS:
        factors = scales_in_float32(scales)
    else:  # an exponent of 0 is no 0
        factors = tl.where(inside, scales_in_float32(scales), 0.0)
    zeros = OFFSET * 1.0
    if zeros_at is not None:
        zeros = tl.load(zeros_at[:, None] + groups[None, :], mask=inside, other=other)
        zeros = zeros.to(tl.float32)
    return numbers_of(words, zeros, factors, 0x76543210, BITS, STORED, dtype)
