"""Numbers of low-bit weights in registers: from packed words of 32 bits to float32.

A word holds ``32 / BITS`` neighbours of one row of a weight, so a tile of words [rows, words]
stands for [rows, words * 32 / BITS] numbers.  A field is turned into a float without a conversion
instruction, of which a multiprocessor runs few: its bits become the low part of a mantissa, and
what that added is subtracted, exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.constexpr_function
def _lop3(mask: int, bits: int) -> str:
    # The last constant is the truth table of (a & b) ^ c: (0xF0 & 0xCC) ^ 0xAA.
    return f"lop3.b32 $0, $1, {mask}, {bits}, 0x6A;"


@triton.jit
def _and_xor(words, MASK: tl.constexpr, BITS: tl.constexpr):
    """``(words & MASK) ^ BITS`` in one instruction, where the compiler takes two: an instruction
    has room for one constant, and it does not put the other into a register by itself."""
    if _INTERPRETED:
        return (words & MASK) ^ BITS
    else:
        return tl.inline_asm_elementwise(
            _lop3(MASK, BITS),
            "=r,r",
            [words],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def number_of(
    words, FIELD: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr
):
    """``field - OFFSET`` of every word in float32, exact.

    KIND: "unsigned", "signed" (two's complement), or "e2m1", which has no offset: 4 bits are a
    sign, two bits of exponent and one of mantissa (OCP Microscaling Formats, section 5.3.3).
    """
    HALF: tl.constexpr = 16 // BITS
    PLACE: tl.constexpr = BITS * (FIELD % HALF)
    if FIELD >= HALF:  # a mantissa has room for the low half of a word
        words = words >> 16
    if KIND == "e2m1":
        # Exponent and mantissa in their places of a float mean the value times 2^-126.
        size = (words << (22 - PLACE)) & 0x01C00000
        sign = (words << (28 - PLACE)) & -0x80000000
        return (size | sign).to(tl.float32, bitcast=True) * 8.507059173023462e37
    else:
        EXPONENT: tl.constexpr = 127 + 23 - PLACE  # with it, the bit at PLACE counts 1
        MASK: tl.constexpr = (2**BITS - 1) << PLACE
        MIDDLE: tl.constexpr = 2 ** (BITS - 1) if KIND == "signed" else 0
        bits = _and_xor(words, MASK, (EXPONENT << 23) | (MIDDLE << PLACE))
        return bits.to(tl.float32, bitcast=True) - (2.0 ** (23 - PLACE) + MIDDLE + OFFSET)


@triton.jit
def numbers_of(
    words, zero, scale, FIELDS: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr,
    dtype: tl.constexpr, OFFSET: tl.constexpr = 0, FIRST: tl.constexpr = 0, STEP: tl.constexpr = 1
):  # fmt: skip
    """The numbers of words [rows, words], ``(field - OFFSET - zero) * scale`` made in float32, as
    columns in order, [rows, words * 32 / BITS].

    ``zero`` and ``scale`` are None or broadcast against the words.  FIELDS: the field that holds
    each column of a word, a hexadecimal digit each, the first lowest.  FIRST, STEP: of every STEP
    columns, the one at FIRST is made; callers leave them.
    """
    if STEP * BITS == 32:
        FIELD: tl.constexpr = (FIELDS >> (4 * FIRST)) & 15
        number = number_of(words, FIELD, BITS, KIND, OFFSET)
        if zero is not None:
            number -= zero
        if scale is not None:
            number *= scale
        return number.to(dtype)
    else:
        even = numbers_of(words, zero, scale, FIELDS, BITS, KIND, dtype, OFFSET, FIRST, 2 * STEP)
        odd = numbers_of(
            words, zero, scale, FIELDS, BITS, KIND, dtype, OFFSET, FIRST + STEP, 2 * STEP
        )
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
