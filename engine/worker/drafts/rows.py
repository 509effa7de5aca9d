"""Penalties of rows that follow drafts: what a row counts beside the output so far, and which of
the sampled tokens become a part of the output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ...messages.step import Batch, Ints

Send: TypeAlias = Callable[[Any, torch.dtype], Tensor]
"""Copies an array to the device."""


def rows_before(batch: Batch) -> Ints | None:
    """[num_seqs] the number of rows of the same request before each row that samples; None if no
    request has drafts.  Rows of drafts follow each other, and have one token each."""
    same = (batch.slots[1:] == batch.slots[:-1]) & (batch.num_sampled[1:] > 0)
    if not same.any():
        return None
    numbers = np.arange(batch.num_seqs, dtype=np.int32)
    firsts = np.maximum.accumulate(np.where(np.r_[True, ~same], numbers, np.int32(0)))
    before: Ints = numbers - firsts
    return before


def seen_tokens(
    counts: Tensor, prompt_mask: Tensor, slots: Tensor, batch: Batch, send: Send
) -> tuple[Tensor, Tensor, Tensor]:
    """``output_counts``, ``prompt_mask`` and ``slots`` of ``ops.apply_penalties``, in which a row
    behind drafts counts them.

    Args:
        counts: [max_num_seqs, vocab] int32 of outputs.
        prompt_mask: [max_num_seqs, vocab] bool.
        slots: [num_seqs] int32, -1 for rows without penalties.
    """
    before = rows_before(batch)
    if before is None:
        return counts, prompt_mask, slots
    pairs = [
        (row, int(batch.input_ids[row - back]))
        for row in np.flatnonzero(before).tolist()
        for back in range(before[row])
    ]
    of = slots.clamp(min=0).long()
    gathered = counts.index_select(0, of)
    rows, tokens = send(pairs, torch.long).unbind(1)
    gathered.index_put_((rows, tokens), gathered.new_ones(()), accumulate=True)
    numbers = torch.arange(batch.num_seqs, dtype=torch.int32, device=slots.device)
    return gathered, prompt_mask.index_select(0, of), torch.where(slots < 0, slots, numbers)


def counted_slots(token_ids: Tensor, slots: Tensor, batch: Batch, send: Send) -> Tensor:
    """``slots`` of ``ops.count_tokens``: -1 for rows behind a draft that the row before has not
    sampled.

    Args:
        token_ids: [num_seqs] int32, as sampled.
        slots: [num_seqs] int32, -1 for rows without penalties.
    """
    before = rows_before(batch)
    if before is None:
        return slots
    # Rows of drafts come before longer rows, so that a row's number is that of its token.
    inputs = send(batch.input_ids[: batch.num_seqs].copy(), torch.int32)
    behind = send(before, torch.int64)
    wrong = behind.clamp(max=1)
    wrong[1:] *= token_ids[:-1] != inputs[1:]
    so_far = wrong.cumsum(0)
    firsts = torch.arange(batch.num_seqs, device=slots.device) - behind
    return torch.where(so_far == so_far.index_select(0, firsts), slots, torch.full_like(slots, -1))
