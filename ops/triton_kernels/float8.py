"""Conversion in registers, from what is stored and to it, saturating where that is e4m3 or int8."""

from __future__ import annotations

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def to_float32(x):
    """``x`` in float32; of bfloat16 two instructions a pair, where the compiler takes four."""
    if _INTERPRETED or x.dtype != tl.bfloat16 or x.numel < 2 * tl.extra.cuda.num_threads():
        return x.to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )


@triton.jit
def _to_e4m3_by_bits(x):
    """For the interpreter, which carries no rounded mantissa into the exponent and knows no NaN.

    Rounds float32 to what e4m3 holds: 3 bits of mantissa, multiples of 2^-9 below 2^-6.
    """
    bounded = tl.minimum(tl.maximum(x, -448.0), 448.0)
    bits = bounded.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    coarse = (bounded + 24576.0) - 24576.0
    rounded = tl.where(tl.abs(bounded) < 0.015625, coarse, bits.to(tl.float32, bitcast=True))
    stored = rounded.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(x == x, stored, 0x7F).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def stored_as(x, dtype: tl.constexpr):
    """``x`` float32 in ``dtype``, to nearest even; in e4m3 saturated at +-448, NaN kept; in int8
    saturated at -128 and 127, NaN as 0."""
    if dtype == tl.int8:
        bounded = tl.where(x == x, tl.minimum(tl.maximum(x, -128.0), 127.0), 0.0)
        # Adding 1.5 * 2^23 leaves no bit for a fraction: rounds to the nearest even integer.
        return ((bounded + 12582912.0) - 12582912.0).to(tl.int8)
    if dtype == tl.float8e4nv and _INTERPRETED:
        return _to_e4m3_by_bits(x)
    return x.to(dtype)  # on a GPU to e4m3: cvt.rn.satfinite


@triton.jit
def scaled_as(x, scale_ptr, row, mask, dtype: tl.constexpr):
    """``x`` in ``dtype``; for e4m3 first divided by ``scale_ptr[row]`` as IEEE does, unless
    ``scale_ptr`` is None.  ``row`` and ``mask`` broadcast against ``x``."""
    if dtype == tl.float8e4nv:
        x = x.to(tl.float32)
        if scale_ptr is not None:
            scale = tl.load(scale_ptr + row, mask=mask, other=1.0)
            x = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
        return stored_as(x, dtype)
    else:
        return x.to(dtype)
