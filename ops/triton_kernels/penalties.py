"""Penalties for tokens seen before, and the counting that feeds them: state stays on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._op import Launch


@triton.jit
def _penalties_kernel(
    logits_ptr,
    counts_ptr,
    prompt_mask_ptr,
    slots_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    vocab,
    logits_stride,
    counts_stride,
    mask_stride,
    BLOCK: tl.constexpr,
):
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
    token_ids_ptr, slots_ptr, counts_ptr, num_tokens, counts_stride, BLOCK: tl.constexpr
):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token_ids = tl.load(token_ids_ptr + rows, mask=rows < num_tokens, other=-1)
    slots = tl.load(slots_ptr + rows, mask=rows < num_tokens, other=-1).to(tl.int64)
    valid = (token_ids >= 0) & (slots >= 0)
    tl.atomic_add(counts_ptr + slots * counts_stride + token_ids, 1, mask=valid, sem="relaxed")


def apply_penalties(
    logits: Tensor,
    output_counts: Tensor,
    prompt_mask: Tensor,
    slots: Tensor,
    repetition_penalty: Tensor,
    frequency_penalty: Tensor,
    presence_penalty: Tensor,
) -> Launch:
    num_seqs, vocab = logits.shape
    for name, rows in [("logits", logits), ("counts", output_counts), ("mask", prompt_mask)]:
        if rows.stride(-1) != 1 or rows.shape[-1] != vocab:
            raise ValueError(
                f"{name} has shape {list(rows.shape)} and stride {rows.stride()}, "
                f"expected rows of {vocab} contiguous columns"
            )
    block = min(2048, triton.next_power_of_2(vocab))
    return Launch(
        kernel=_penalties_kernel,
        grid=(num_seqs, triton.cdiv(vocab, block)),
        args={
            "logits_ptr": logits,
            "counts_ptr": output_counts,
            "prompt_mask_ptr": prompt_mask.view(torch.int8),
            "slots_ptr": slots,
            "repetition_ptr": repetition_penalty,
            "frequency_ptr": frequency_penalty,
            "presence_ptr": presence_penalty,
            "vocab": vocab,
            "logits_stride": logits.stride(0),
            "counts_stride": output_counts.stride(0),
            "mask_stride": prompt_mask.stride(0),
        },
        constexprs={"BLOCK": block},
        num_warps=8,
    )


def count_tokens(token_ids: Tensor, slots: Tensor, output_counts: Tensor) -> Launch:
    if output_counts.stride(-1) != 1:
        raise ValueError(f"output_counts has stride {output_counts.stride()}, expected (..., 1)")
    num_tokens = token_ids.shape[0]
    block = min(256, triton.next_power_of_2(max(num_tokens, 1)))
    return Launch(
        kernel=_count_tokens_kernel,
        grid=(triton.cdiv(num_tokens, block),),
        args={
            "token_ids_ptr": token_ids,
            "slots_ptr": slots,
            "counts_ptr": output_counts,
            "num_tokens": num_tokens,
            "counts_stride": output_counts.stride(0),
        },
        constexprs={"BLOCK": block},
        num_warps=4,
    )
