"""Penalties for tokens seen before, and the counting that feeds them: state stays on the device."""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import wait_for_previous


@triton.jit
def _penalties_kernel(
    logits_ptr, counts_ptr, prompt_mask_ptr, slots_ptr, repetition_ptr, frequency_ptr, presence_ptr,
    vocab, logits_stride, counts_stride, mask_stride, BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr
):  # fmt: skip
    wait_for_previous(PROGRAMMATIC)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot >= 0:
        repetition = tl.load(repetition_ptr + row)
        frequency = tl.load(frequency_ptr + row)
        presence = tl.load(presence_ptr + row)
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = cols < vocab
        counts = tl.load(counts_ptr + slot * counts_stride + cols, mask=mask, other=0)
        in_prompt = tl.load(prompt_mask_ptr + slot * mask_stride + cols, mask=mask, other=0)
        logits = tl.load(logits_ptr + row * logits_stride + cols, mask=mask, other=0.0)
        in_output = counts > 0
        scaled = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
        penalized = tl.where(
            in_output, scaled - (frequency * counts.to(tl.float32) + presence), scaled
        )
        seen = in_output | (in_prompt != 0)
        tl.store(logits_ptr + row * logits_stride + cols, penalized, mask=mask & seen)


@triton.jit
def _count_tokens_kernel(
    token_ids_ptr,
    slots_ptr,
    counts_ptr,
    num_tokens,
    counts_stride,
    BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    wait_for_previous(PROGRAMMATIC)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token_ids = tl.load(token_ids_ptr + rows, mask=rows < num_tokens, other=-1)
    slots = tl.load(slots_ptr + rows, mask=rows < num_tokens, other=-1).to(tl.int64)
    valid = (token_ids >= 0) & (slots >= 0)
    tl.atomic_add(counts_ptr + slots * counts_stride + token_ids, 1, mask=valid, sem="relaxed")
