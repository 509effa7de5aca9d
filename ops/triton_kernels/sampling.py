"""Sampling kernels over rows of logits [num_seqs, vocab].

An argmax splits each row over several programs, which write one candidate each, and a second small
launch reduces the candidates.  There are no atomics and no state between calls, and the result is
the same for any split.  The thresholds of top-k and top-p are found by a radix search over the bits
of the floats, with one program a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..sampling import noise as _sampling
from .dependent import wait_for_previous

FLOAT32_MAX = tl.constexpr(_sampling.FLOAT32_MAX)
_GREEDY_TEMPERATURE = tl.constexpr(_sampling.GREEDY_TEMPERATURE)
_NO_INDEX = tl.constexpr(2**31 - 1)
_NOT_A_NUMBER = tl.constexpr(_sampling.NOT_A_NUMBER)
_NOTHING_LEFT = tl.constexpr(_sampling.NOTHING_LEFT)


@triton.jit
def this_row(logits_ptr, row_stride, PROGRAMMATIC: tl.constexpr):
    """The first line of a kernel that reads rows of logits: the program's row, and its address."""
    wait_for_previous(PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    return row, logits_ptr + row * row_stride


@triton.jit
def load_clean(row_ptr, cols, vocab):
    """Float32 logits; NaN and columns past the end are -inf, +inf is the largest finite value."""
    values = tl.load(row_ptr + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32)
    values = tl.where(values == values, values, float("-inf"))
    return tl.minimum(values, FLOAT32_MAX)


@triton.jit
def mix(h):
    h = h ^ (h >> 16)
    h = h * tl.full((), 0x7FEB352D, tl.uint32)
    h = h ^ (h >> 15)
    h = h * tl.full((), 0x846CA68B, tl.uint32)
    return h ^ (h >> 16)


@triton.jit
def _row_keys(seed, position):
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    place = position.to(tl.uint32)
    key0 = mix(mix(mix(low ^ tl.full((), 0x9E3779B9, tl.uint32)) ^ high) ^ place)
    inverted = place ^ tl.full((), 0xFFFFFFFF, tl.uint32)
    key1 = mix(mix(mix(high ^ tl.full((), 0x85EBCA6B, tl.uint32)) + low) ^ inverted)
    return key0, key1


@triton.jit
def _gumbel(cols, key0, key1):
    """The noise of ``_sampling.gumbel_noise``, computed by the same operations."""
    h = mix(mix(cols.to(tl.uint32) ^ key0) + key1)
    w = tl.minimum((h.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.960464477539063e-08)
    series = w * (1.0 + w * (0.5 + w * (1.0 / 3.0 + w * 0.25)))
    exponential = tl.where(w < 1.0 / 64.0, series, -tl.log(1.0 - w))
    return -tl.log(exponential)


@triton.jit
def _argmax_partial_kernel(
    logits_ptr, temperature_ptr, threshold_ptr, seeds_ptr, positions_ptr, best_ptr, index_ptr,
    vocab, row_stride, num_blocks, SAMPLE: tl.constexpr, FILTER: tl.constexpr, BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr
):  # fmt: skip
    row, row_ptr = this_row(logits_ptr, row_stride, PROGRAMMATIC)
    split = tl.program_id(1)
    cols = split * num_blocks * BLOCK + tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    index = tl.full((BLOCK,), _NOTHING_LEFT, tl.int32)
    infinite = tl.full((), FLOAT32_MAX, tl.float32)  # what +inf is
    if SAMPLE:
        temperature = tl.load(temperature_ptr + row)
        infinite = tl.where(temperature >= _GREEDY_TEMPERATURE, float("nan"), infinite)
        key0, key1 = _row_keys(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    for _ in range(num_blocks):
        values = tl.load(row_ptr + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32)
        values = tl.where(values > FLOAT32_MAX, infinite, values)
        if SAMPLE:  # noqa: SIM102 (a compile-time condition around a run-time one)
            if temperature >= _GREEDY_TEMPERATURE:
                noisy = tl.div_rn(values, temperature) + _gumbel(cols, key0, key1)
                if FILTER:
                    noisy = tl.where(values < tl.load(threshold_ptr + row), float("-inf"), noisy)
                values = noisy
        index = tl.where(values > best, cols, index)
        best = tl.maximum(values, best, propagate_nan=tl.PropagateNan.ALL)
        cols += BLOCK
    # A NaN wins every reduction from here on; its index says that it is one.
    broken = best != best
    best = tl.where(broken, float("inf"), best)
    index = tl.where(broken, _NOT_A_NUMBER, index)
    top = tl.max(best, axis=0)
    out = row * tl.num_programs(1) + split
    tl.store(best_ptr + out, top)
    tl.store(index_ptr + out, tl.min(tl.where(best == top, index, _NO_INDEX), axis=0))


@triton.jit
def _argmax_reduce_kernel(
    best_ptr, index_ptr, out_ptr, splits, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr
):
    wait_for_previous(PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    mask = lanes < splits
    best = tl.load(best_ptr + row * splits + lanes, mask=mask, other=float("-inf"))
    index = tl.load(index_ptr + row * splits + lanes, mask=mask, other=_NO_INDEX)
    top = tl.max(best, axis=0)
    tl.store(out_ptr + row, tl.min(tl.where(best == top, index, _NO_INDEX), axis=0))


@triton.jit
def ordered_bits(values):
    """Float32 without NaN to int32, keeping order; -0 and 0 are one value."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _radix_key(values):
    sign = tl.full((), 0x80000000, tl.uint32)
    return ordered_bits(values).to(tl.uint32, bitcast=True) ^ sign


@triton.jit
def _key_to_float(key):
    """The inverse of ``_radix_key``.  Keys of no number give -inf."""
    sign = tl.full((), 0x80000000, tl.uint32)
    bits = (key ^ sign).to(tl.int32, bitcast=True)
    value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(value == value, value, float("-inf"))


@triton.jit
def _weights(values, threshold, best, temperature):
    return tl.where(values >= threshold, tl.exp(tl.div_rn(values - best, temperature)), 0.0)


@triton.jit
def _row_best(row_ptr, vocab, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for _ in range(0, vocab, BLOCK):
        best = tl.maximum(best, load_clean(row_ptr, cols, vocab))
        cols += BLOCK
    top = tl.max(best, axis=0)
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _row_mass(row_ptr, vocab, threshold, best, temperature, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    mass = tl.zeros((BLOCK,), tl.float32)
    for _ in range(0, vocab, BLOCK):
        mass += _weights(load_clean(row_ptr, cols, vocab), threshold, best, temperature)
        cols += BLOCK
    return tl.sum(mass, axis=0)


@triton.jit
def _radix_search(
    row_ptr,
    vocab,
    target,
    threshold,
    best,
    temperature,
    BY_MASS: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest t such that the logits of t or more have at least ``target`` members, or with
    BY_MASS at least that mass.

    Each round finds two bits of t, from the top: one pass over the row counts all three candidate
    digits.  Sums of non-negative terms in one fixed order are monotone in t even after rounding.
    """
    key = tl.zeros((), tl.uint32)
    digit = tl.full((), 1 << 30, tl.uint32)
    for _ in range(ROUNDS):
        first = key + digit
        second = first + digit
        third = second + digit
        cols = tl.arange(0, BLOCK)
        sum1 = tl.zeros((BLOCK,), tl.float32)
        sum2 = tl.zeros((BLOCK,), tl.float32)
        sum3 = tl.zeros((BLOCK,), tl.float32)
        for _ in range(0, vocab, BLOCK):
            values = load_clean(row_ptr, cols, vocab)
            keys = _radix_key(values)
            if BY_MASS:
                weights = _weights(values, threshold, best, temperature)
            else:
                weights = tl.where(cols < vocab, 1.0, 0.0)
            sum1 += tl.where(keys >= first, weights, 0.0)
            sum2 += tl.where(keys >= second, weights, 0.0)
            sum3 += tl.where(keys >= third, weights, 0.0)
            cols += BLOCK
        total1 = tl.sum(sum1, axis=0)
        total2 = tl.sum(sum2, axis=0)
        total3 = tl.sum(sum3, axis=0)
        # With a target of 0 (top_p = 0), the best token must stay: require some mass.
        key = tl.where((total1 >= target) & (total1 > 0), first, key)
        key = tl.where((total2 >= target) & (total2 > 0), second, key)
        key = tl.where((total3 >= target) & (total3 > 0), third, key)
        digit = digit >> 2
    return _key_to_float(key)


@triton.jit
def _threshold_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, threshold_ptr, vocab, row_stride,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr, ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr
):  # fmt: skip
    row, row_ptr = this_row(logits_ptr, row_stride, PROGRAMMATIC)
    temperature = tl.load(temperature_ptr + row)
    threshold = tl.full((), float("-inf"), tl.float32)
    if temperature >= _GREEDY_TEMPERATURE:  # a greedy row needs no filter
        best = tl.zeros((), tl.float32)
        if HAS_MIN_P or HAS_TOP_P:
            needs_best = tl.full((), 0, tl.int1)
            if HAS_MIN_P:
                min_p = tl.load(min_p_ptr + row)
                needs_best = needs_best | (min_p > 0)
            if HAS_TOP_P:
                top_p = tl.load(top_p_ptr + row)
                needs_best = needs_best | (top_p < 1)
            if needs_best:
                best = _row_best(row_ptr, vocab, BLOCK)
        if HAS_MIN_P:  # noqa: SIM102
            if min_p > 0:
                threshold = tl.minimum(best + temperature * tl.log(min_p), best)
        if HAS_TOP_K:
            top_k = tl.load(top_k_ptr + row)
            if (top_k > 0) & (top_k < vocab):
                count = top_k.to(tl.float32)  # exact below 2**24
                kth = _radix_search(
                    row_ptr, vocab, count, threshold, best, temperature, False, ROUNDS, BLOCK
                )
                threshold = tl.maximum(threshold, kth)
        if HAS_TOP_P:  # noqa: SIM102
            if top_p < 1:
                mass = top_p * _row_mass(row_ptr, vocab, threshold, best, temperature, BLOCK)
                nucleus = _radix_search(
                    row_ptr, vocab, mass, threshold, best, temperature, True, ROUNDS, BLOCK
                )
                threshold = tl.maximum(threshold, nucleus)
    tl.store(threshold_ptr + row, threshold)
