"""Numbers of low-bit weights in registers: from packed words of 32 bits to float32.

A word holds ``32 / BITS`` neighbours of one row of a weight, so a tile of words [rows, words]
stands for [rows, words * 32 / BITS] numbers.  A field is turned into a float without a conversion
instruction, of which a multiprocessor runs few: its bits become the low part of a mantissa, and
what that added is subtracted, exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def number_of(words, zero, FIELD: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr):
    """``field - zero`` of every word in float32, exact; ``zero`` is float32 and broadcasts.

    KIND: "unsigned", "signed" (two's complement), or "e2m1", which has no zero point: 4 bits are a
    sign, two bits of exponent and one of mantissa (OCP Microscaling Formats, section 5.3.3).
    """
    HALF: tl.constexpr = 16 // BITS
    if FIELD >= HALF:  # a float's mantissa has room for the low half of a word
        words = words >> 16
    if KIND == "e2m1":
        # Exponent and mantissa in their places of a float mean the value times 2^-126.
        PLACE: tl.constexpr = BITS * (FIELD % HALF)
        size = (words << (22 - PLACE)) & 0x01C00000
        sign = (words << (28 - PLACE)) & -0x80000000
        return (size | sign).to(tl.float32, bitcast=True) * 8.507059173023462e37
    else:
        FIRST: tl.constexpr = BITS * (FIELD % HALF)
        UNIT: tl.constexpr = 127 + 23 - FIRST  # the exponent with which that bit counts 1
        MASK: tl.constexpr = (2**BITS - 1) << FIRST
        MIDDLE: tl.constexpr = 2 ** (BITS - 1) if KIND == "signed" else 0
        bits = (words & MASK) ^ ((UNIT << 23) | (MIDDLE << FIRST))
        return bits.to(tl.float32, bitcast=True) - (zero + (2 ** (23 - FIRST) + MIDDLE))


@triton.jit
def numbers_of(
    words, zero, scale, FIELDS: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr,
    dtype: tl.constexpr, FIRST: tl.constexpr = 0, STEP: tl.constexpr = 1
):  # fmt: skip
    """The numbers of words [rows, words] as columns in order, [rows, words * 32 / BITS], times
    ``scale`` unless that is None; ``zero`` and ``scale`` broadcast against the words.

    FIELDS: the field that holds each column of a word, a hexadecimal digit each, the first lowest.
    FIRST, STEP: of every STEP columns the one at FIRST is made; callers leave them.
    """
    if STEP * BITS == 32:
        FIELD: tl.constexpr = (FIELDS >> (4 * FIRST)) & 15
        made = number_of(words, zero, FIELD, BITS, KIND)
        if scale is not None:
            made *= scale
        return made.to(dtype)
    else:
        even = numbers_of(words, zero, scale, FIELDS, BITS, KIND, dtype, FIRST, 2 * STEP)
        odd = numbers_of(words, zero, scale, FIELDS, BITS, KIND, dtype, FIRST + STEP, 2 * STEP)
        return tl.interleave(even, odd)


@triton.jit
def scales_in_float32(scale):
    """Scales as they are stored, in float32; unsigned bytes are exponents, E8M0: 2^(byte - 127),
    of which 255 is NaN (OCP Microscaling Formats, section 5.4.1)."""
    if scale.dtype == tl.uint8:
        power = scale.to(tl.int32)
        bits = tl.where(power == 0, 0x00400000, power << 23)
        return tl.where(power == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    else:
        return scale.to(tl.float32)
