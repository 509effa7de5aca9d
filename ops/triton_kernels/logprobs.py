"""Log-probabilities of rows of logits.

Two kernels read parts of each row: one for log-sum-exp and rank, one for the top K.  A third
reduces their partial results to those of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .sampling import FLOAT32_MAX, load_clean, ordered_bits, this_row

_NO_KEY = tl.constexpr(-(2**63))


@triton.jit
def _logsumexp_partial_kernel(
    logits_ptr,
    token_ids_ptr,
    best_ptr,
    sum_ptr,
    ahead_ptr,
    vocab,
    row_stride,
    num_blocks,
    BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    row, row_ptr = this_row(logits_ptr, row_stride, PROGRAMMATIC)
    split = tl.program_id(1)
    chosen_id = tl.minimum(tl.maximum(tl.load(token_ids_ptr + row), 0), vocab - 1)
    chosen = load_clean(row_ptr, chosen_id, vocab)
    cols = split * num_blocks * BLOCK + tl.arange(0, BLOCK)
    best = tl.full((), -FLOAT32_MAX, tl.float32)  # finite: -inf - -inf is no number
    total = tl.zeros((), tl.float32)
    ahead = tl.zeros((BLOCK,), tl.int32)
    for _ in range(num_blocks):
        values = load_clean(row_ptr, cols, vocab)
        before = (values > chosen) | ((values == chosen) & (cols < chosen_id))
        ahead += before.to(tl.int32)
        top = tl.maximum(best, tl.max(values, axis=0))
        total = total * tl.exp(best - top) + tl.sum(tl.exp(values - top), axis=0)
        best = top
        cols += BLOCK
    out = row * tl.num_programs(1) + split
    tl.store(best_ptr + out, best)
    tl.store(sum_ptr + out, total)
    tl.store(ahead_ptr + out, tl.sum(ahead, axis=0))


@triton.jit
def _top_partial_kernel(
    logits_ptr,
    keys_ptr,
    vocab,
    row_stride,
    num_logprobs,
    BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """The best logits of one block of a row, as int64 keys: the ordered value in the upper half,
    the inverted index in the lower."""
    row, row_ptr = this_row(logits_ptr, row_stride, PROGRAMMATIC)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = load_clean(row_ptr, cols, vocab)
    keys = (ordered_bits(values).to(tl.int64) << 32) | (0xFFFFFFFF - cols.to(tl.int64))
    keys = tl.where(cols < vocab, keys, _NO_KEY)
    out_ptr = keys_ptr + (row * tl.num_programs(1) + tl.program_id(1)) * num_logprobs
    for place in range(num_logprobs):
        top = tl.max(keys, axis=0)
        tl.store(out_ptr + place, top)
        keys = tl.where(keys == top, _NO_KEY, keys)


@triton.jit
def _logprobs_reduce_kernel(
    logits_ptr, token_ids_ptr, best_ptr, sum_ptr, ahead_ptr, keys_ptr, chosen_logprob_ptr,
    chosen_rank_ptr, top_logprobs_ptr, top_ids_ptr, vocab, row_stride, splits, num_keys,
    num_logprobs, SPLITS_BLOCK: tl.constexpr, KEYS_BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr
):  # fmt: skip
    row, row_ptr = this_row(logits_ptr, row_stride, PROGRAMMATIC)
    lanes = tl.arange(0, SPLITS_BLOCK)
    mask = lanes < splits
    best = tl.load(best_ptr + row * splits + lanes, mask=mask, other=-FLOAT32_MAX)
    sums = tl.load(sum_ptr + row * splits + lanes, mask=mask, other=0.0)
    ahead = tl.load(ahead_ptr + row * splits + lanes, mask=mask, other=0)
    top = tl.max(best, axis=0)
    weight = tl.sum(sums * tl.exp(best - top), axis=0)
    total = tl.log(tl.maximum(weight, 1e-30))  # 1 or more, 0 in a row of only -inf
    chosen_id = tl.minimum(tl.maximum(tl.load(token_ids_ptr + row), 0), vocab - 1)
    chosen = load_clean(row_ptr, chosen_id, vocab)
    logprob = tl.where(chosen == float("-inf"), chosen, chosen - top - total)
    tl.store(chosen_logprob_ptr + row, logprob)
    tl.store(chosen_rank_ptr + row, 1 + tl.sum(ahead, axis=0))
    slots = tl.arange(0, KEYS_BLOCK)
    keys = tl.load(keys_ptr + row * num_keys + slots, mask=slots < num_keys, other=_NO_KEY)
    for place in range(num_logprobs):
        key = tl.max(keys, axis=0)
        keys = tl.where(keys == key, _NO_KEY, keys)
        index = (0xFFFFFFFF - (key & 0xFFFFFFFF)).to(tl.int32)
        value = load_clean(row_ptr, index, vocab)
        logprob = tl.where(value == float("-inf"), value, value - top - total)
        tl.store(top_logprobs_ptr + row * num_logprobs + place, logprob)
        tl.store(top_ids_ptr + row * num_logprobs + place, index)
