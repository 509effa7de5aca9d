"""Low-bit weights: their numbers in registers, a tiled GEMM by them, and their plain conversion.

A word holds ``32 / BITS`` neighbours of one row of a weight, so a tile of words [rows, words]
stands for [rows, words * 32 / BITS] numbers.  A field is turned into a float without a conversion
instruction, of which a multiprocessor runs few: its bits become the low part of a mantissa, and
what that added is subtracted, exactly.

The weight is read as it is stored: words of 32 bits along the columns of each row, with a scale,
and perhaps a zero point, for a group of columns.  Up to some rows of x, the columns of a step are
summed field by field, so that a thread multiplies the numbers of the words that it has; the columns
of x are put in that order.  With more rows, the numbers are put in the order of x.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import gated, plain
from .dependent import prefetch, wait_for_previous
from .groups import Added, Normed, Rows, Scales
from .linear_fp8 import place_of_program, sum_of_splits

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


@triton.jit
def _mma(w, x, total, SWAPPED: tl.constexpr):
    """``total`` plus x @ w.T; both transposed if SWAPPED."""
    if _INTERPRETED:  # it holds bfloat16 as integers and would multiply those
        x = x.to(tl.float32)
        w = w.to(tl.float32)
    if SWAPPED:
        return tl.dot(w, tl.trans(x), total, input_precision="ieee")
    else:
        return tl.dot(x, tl.trans(w), total, input_precision="ieee")


@triton.jit
def _by_field(tile, PER_WORD: tl.constexpr):
    """The columns of a tile [rows, columns], those of each field of the words together."""
    WORDS: tl.constexpr = tile.shape[1] // PER_WORD
    by_word = tl.reshape(tile, (tile.shape[0], WORDS, PER_WORD))
    return tl.reshape(tl.permute(by_word, (0, 2, 1)), (tile.shape[0], WORDS * PER_WORD))


@triton.jit
def _of_group(scale: Scales, zero: Scales, rows, group, inside, ZERO_OFFSET: tl.constexpr):
    """The scale and the zero point of rows in a group, in float32; 0 where there is none."""
    other = None if inside is None else 0.0
    at = scale.ptr + rows * scale.row_stride + group * scale.group_stride
    s = scales_in_float32(tl.load(at, mask=inside, other=other))
    z = tl.zeros_like(s)
    if zero.ptr is not None:
        at = zero.ptr + rows * zero.row_stride + group * zero.group_stride
        z = tl.load(at, mask=inside, other=other).to(tl.float32) + ZERO_OFFSET
    return s, z


@triton.jit
def _sums(
    x_rows, weight_rows, scale: Scales, zero: Scales, read_cols, first, last, K,
    ZERO_OFFSET: tl.constexpr, FIELDS: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr,
    OFFSET: tl.constexpr, GROUP: tl.constexpr, SCALING: tl.constexpr, SWAPPED: tl.constexpr,
    BY_FIELD: tl.constexpr, WHOLE_STEPS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """The sums of a tile over steps ``first`` to ``last - 1``; transposed if SWAPPED."""
    PER_WORD: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = BLOCK_K // PER_WORD
    depth, word = tl.arange(0, BLOCK_K), tl.arange(0, WORDS)
    x_at = x_rows + depth[None, :]
    weight_at = weight_rows + word[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M) if SWAPPED else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    # Of whole rows and steps, the next step's are loaded ahead, so that no step waits for its own.
    of_step = tl.zeros((BLOCK_N,), dtype=tl.float32)
    zero_of_step = of_step
    if SCALING != "words":
        group = first * BLOCK_K // GROUP
        of_step, zero_of_step = _of_group(scale, zero, read_cols, group, None, ZERO_OFFSET)
    for step in range(first, last):
        start = step * BLOCK_K
        inside = None if WHOLE_STEPS else (start + depth < K)[None, :]
        words_inside = None if WHOLE_STEPS else (start + word * PER_WORD < K)[None, :]
        a = tl.load(x_at + start, mask=inside, other=None if WHOLE_STEPS else 0.0)
        w = tl.load(weight_at + step * WORDS, mask=words_inside, other=None if WHOLE_STEPS else 0)
        if SCALING == "words":
            group = ((start + word * PER_WORD) // GROUP)[None, :]
            s, z = _of_group(scale, zero, read_cols[:, None], group, words_inside, ZERO_OFFSET)
        else:
            s = of_step[:, None] if SCALING == "numbers" else None
            z = zero_of_step[:, None]
        numbers = numbers_of(w, z, s, FIELDS, BITS, KIND, a.dtype, OFFSET)
        if BY_FIELD:
            numbers, a = _by_field(numbers, PER_WORD), _by_field(a, PER_WORD)
        if SCALING == "steps":
            partial = _mma(numbers, a, tl.zeros_like(total), SWAPPED)
            total += partial * (of_step[:, None] if SWAPPED else of_step[None, :])
        else:
            total = _mma(numbers, a, total, SWAPPED)
        if SCALING == "steps" or SCALING == "numbers":
            group = tl.minimum(start + BLOCK_K, K - 1) // GROUP
            of_step, zero_of_step = _of_group(scale, zero, read_cols, group, None, ZERO_OFFSET)
    if SCALING == "sums":
        total *= of_step[:, None] if SWAPPED else of_step[None, :]
    return total


@triton.jit
def _linear_lowbit_kernel(
    x: Rows, weight: Rows, scale: Scales, zero: Scales, row_scale_ptr, bias_ptr, norm: Normed,
    add: Added, out_ptr, partial_ptr, counter_ptr, M, N, K, splits, ZERO_OFFSET: tl.constexpr,
    FIELDS: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr,
    GROUP: tl.constexpr, SCALING: tl.constexpr, ACTIVATION: tl.constexpr, GATES: tl.constexpr,
    SWAPPED: tl.constexpr, BY_FIELD: tl.constexpr, WHOLE_STEPS: tl.constexpr,
    SQUARES: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, PROGRAMMATIC: tl.constexpr
):  # fmt: skip
    """out = act(x @ ((field - zero) * scale * row_scale).T + bias).

    ``norm``: x lacks the scale that a norm finds for each row, by which the sums are multiplied.
    ``add``: the result and a residual are summed, and out is the sum times a norm's weight.
    A scale is for GROUP columns.  SCALING: what is multiplied by it: the "sums" of whole rows;
    those of "steps", or their "numbers", where steps divide groups; or numbers by "words", of
    which groups are made.  GATES: the weight's rows are gates, then ups; a tile has them by turns.
    With ``partial_ptr``, ``splits`` programs share a tile's depth.  AHEAD: lines of 128 bytes of
    each row of a weight tile that are fetched into L2 while the kernel ahead still runs.
    """
    PER_WORD: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = BLOCK_K // PER_WORD
    tile, split, rows, first_col, first, last = place_of_program(
        partial_ptr, splits, tl.cdiv(K, BLOCK_K), M, N, GROUP_M, BLOCK_M, BLOCK_N
    )
    cols = first_col + tl.arange(0, BLOCK_N)
    # Rows and columns outside are read as the last ones, and not written.
    read_rows = tl.minimum(rows, M - 1).to(tl.int64)
    of_weight = tl.minimum(cols, N - 1)
    if GATES:
        of_weight = of_weight % 2 * (N // 2) + of_weight // 2
    read_cols = of_weight.to(tl.int64)
    weight_rows = weight.ptr + read_cols[:, None] * weight.stride
    if PROGRAMMATIC:
        line = tl.minimum(first * WORDS + tl.arange(0, AHEAD) * 32, K // PER_WORD - 1)
        prefetch(weight_rows + line[None, :])
    wait_for_previous(PROGRAMMATIC)
    total = _sums(
        x.ptr + read_rows[:, None] * x.stride, weight_rows, scale, zero, read_cols, first, last, K,
        ZERO_OFFSET, FIELDS, BITS, KIND, OFFSET, GROUP, SCALING, SWAPPED, BY_FIELD, WHOLE_STEPS,
        BLOCK_M, BLOCK_N, BLOCK_K
    )  # fmt: skip
    if SWAPPED:
        total = tl.trans(total)
    whole = True
    if partial_ptr is not None:
        total, whole = sum_of_splits(
            total, tile, split, splits, partial_ptr, counter_ptr, BLOCK_M, BLOCK_N
        )
    if whole:
        if row_scale_ptr is not None:
            total *= tl.load(row_scale_ptr + of_weight).to(tl.float32)[None, :]
        if norm.ptr is not None:
            total *= _norm_scale(norm, read_rows, K, SQUARES)[:, None]
        if bias_ptr is not None:
            total += tl.load(bias_ptr + of_weight).to(tl.float32)[None, :]
        if add.ptr is not None:
            total = _add(total, rows, first_col, M, N, add, out_ptr.dtype.element_ty, BLOCK_N)
        _store(total, rows, first_col, M, N, out_ptr, ACTIVATION, GATES, BLOCK_M, BLOCK_N)


@triton.jit
def _norm_scale(norm: Normed, rows, K, SQUARES: tl.constexpr):
    """What an RMS norm multiplies each row with, from the sums of squares of its parts."""
    part = tl.arange(0, SQUARES)[None, :]
    at = norm.ptr + rows[:, None] * norm.parts + part
    squares = tl.load(at, mask=part < norm.parts, other=0.0)
    return tl.rsqrt(tl.sum(squares, axis=1) / K + norm.eps)


@triton.jit
def _add(
    total, rows, first_col, M, N, add: Added, dtype: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The rounded sums plus the residual, rounded, which is written; times the norm's weight.  A
    tile leaves the sum of squares of each row."""
    cols = first_col + tl.arange(0, BLOCK_N)
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    at = rows.to(tl.int64)[:, None] * N + cols[None, :]
    residual = tl.load(add.ptr + at, mask=inside, other=0.0).to(tl.float32)
    total = (total.to(dtype).to(tl.float32) + residual).to(dtype).to(tl.float32)
    tl.store(add.total + at, total.to(dtype), mask=inside)
    squares = tl.sum(tl.where(inside, total * total, 0.0), axis=1)
    tiles = tl.cdiv(N, BLOCK_N)
    tl.store(add.squares + rows.to(tl.int64) * tiles + first_col // BLOCK_N, squares, mask=rows < M)
    weight = tl.load(add.weight + cols, mask=cols < N, other=0.0).to(tl.float32)
    if add.offset is not None:
        weight += add.offset
    return total * weight[None, :]


@triton.jit
def _store(
    total, rows, first_col, M, N, out_ptr, ACTIVATION: tl.constexpr, GATES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Write a tile's sums, rounded, or what the activation makes of the rounded sums."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    WIDTH: tl.constexpr = BLOCK_N // 2 if GATES else BLOCK_N
    width = N // 2 if GATES else N
    first = first_col // 2 if GATES else first_col
    if ACTIVATION is not None:
        total = total.to(dtype).to(tl.float32)
        if GATES:
            gate, up = tl.split(tl.reshape(total, (BLOCK_M, WIDTH, 2)))
            total = gated(gate, up, ACTIVATION)
        else:
            total = plain(total, ACTIVATION)
    cols = first + tl.arange(0, WIDTH)
    out = out_ptr + rows.to(tl.int64)[:, None] * width + cols[None, :]
    tl.store(out, total.to(dtype), mask=(rows < M)[:, None] & (cols < width)[None, :])


@triton.jit
def _dequantize_kernel(
    weight: Rows, scale: Scales, zero: Scales, row_scale_ptr, out_ptr, N, K,
    ZERO_OFFSET: tl.constexpr, FIELDS: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr,
    OFFSET: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
    PROGRAMMATIC: tl.constexpr
):  # fmt: skip
    """out[N, K] = (field - zero) * scale * row_scale, rounded to its dtype."""
    wait_for_previous(PROGRAMMATIC)
    PER_WORD: tl.constexpr = 32 // BITS
    of_row = tl.cdiv(K, WORDS * PER_WORD)
    rows = (tl.program_id(0) // of_row * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    first = tl.program_id(0) % of_row * WORDS
    words = first + tl.arange(0, WORDS)
    there = (rows < N)[:, None]
    inside = there & (words * PER_WORD < K)[None, :]
    w = tl.load(weight.ptr + rows[:, None] * weight.stride + words[None, :], mask=inside, other=0)
    group = (words * PER_WORD // GROUP)[None, :]
    s, z = _of_group(scale, zero, rows[:, None], group, inside, ZERO_OFFSET)
    numbers = numbers_of(w, z, s, FIELDS, BITS, KIND, tl.float32, OFFSET)
    if row_scale_ptr is not None:
        numbers *= tl.load(row_scale_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    columns = first * PER_WORD + tl.arange(0, WORDS * PER_WORD)
    out = out_ptr + rows[:, None] * K + columns[None, :]
    tl.store(out, numbers.to(out_ptr.dtype.element_ty), mask=there & (columns < K)[None, :])
