"""Describes the launches of the penalties for tokens seen before, and of the counting they need."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.launch import Launch, Launches
from ..core.tiles import cdiv, next_power_of_2

_COUNT_BLOCK = 256


def apply_penalties(
    logits: Tensor,
    output_counts: Tensor,
    prompt_mask: Tensor,
    slots: Tensor,
    *penalties: Tensor,
) -> Launches[None]:
    """``penalties``: repetition, frequency and presence, as of the op."""
    repetition, frequency, presence = penalties
    num_seqs, vocab = logits.shape
    for name, rows in [("logits", logits), ("counts", output_counts), ("mask", prompt_mask)]:
        if rows.stride(-1) != 1 or rows.shape[-1] != vocab:
            raise ValueError(
                f"{name} has shape {list(rows.shape)} and stride {rows.stride()}, "
                f"expected rows of {vocab} contiguous columns"
            )
    block = min(2048, next_power_of_2(vocab))
    launch = Launch(
        kernel="penalties:_penalties_kernel",
        grid=(num_seqs, cdiv(vocab, block)),
        args={
            "logits_ptr": logits,
            "counts_ptr": output_counts,
            "prompt_mask_ptr": prompt_mask.view(torch.int8),
            "slots_ptr": slots,
            "repetition_ptr": repetition,
            "frequency_ptr": frequency,
            "presence_ptr": presence,
            "vocab": vocab,
            "logits_stride": logits.stride(0),
            "counts_stride": output_counts.stride(0),
            "mask_stride": prompt_mask.stride(0),
        },
        constexprs={"BLOCK": block},
        num_warps=8,
    )
    return [launch], None


def count_tokens(token_ids: Tensor, slots: Tensor, output_counts: Tensor) -> Launches[None]:
    if output_counts.stride(-1) != 1:
        raise ValueError(f"output_counts has stride {output_counts.stride()}, expected (..., 1)")
    num_tokens = token_ids.shape[0]
    launch = Launch(
        kernel="penalties:_count_tokens_kernel",
        grid=(cdiv(num_tokens, _COUNT_BLOCK),),
        args={
            "token_ids_ptr": token_ids,
            "slots_ptr": slots,
            "counts_ptr": output_counts,
            "num_tokens": num_tokens,
            "counts_stride": output_counts.stride(0),
        },
        constexprs={"BLOCK": _COUNT_BLOCK},
        num_warps=4,
        dynamic=("num_tokens",),
    )
    return [launch], None
