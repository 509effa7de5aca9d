"""What rows of drafts change in sampling: what a row counts beside the output so far, and bans that
depend on a length which the device alone knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    counts: Tensor, prompt_mask: Tensor, slots: Tensor, batch: Batch, input_ids: Tensor, send: Send
) -> tuple[Tensor, Tensor, Tensor]:
    """``output_counts``, ``prompt_mask`` and ``slots`` of ``ops.apply_penalties``, in which a row
    behind drafts counts them.

    Args:
        counts: [max_num_seqs, vocab] int32 of outputs.
        prompt_mask: [max_num_seqs, vocab] bool.
        slots: [num_seqs] int32, -1 for rows without penalties.
        input_ids: [num_seqs] int32 on the device; rows of drafts come before longer rows, so that
            a row's number is that of its token.
    """
    before = rows_before(batch)
    if before is None:
        return counts, prompt_mask, slots
    pairs = [
        (row, row - back) for row in np.flatnonzero(before).tolist() for back in range(before[row])
    ]
    of = slots.clamp(min=0).long()
    gathered = counts.index_select(0, of)
    rows, inputs = send(pairs, torch.long).unbind(1)
    tokens = input_ids.index_select(0, inputs).long()
    gathered.index_put_((rows, tokens), gathered.new_ones(()), accumulate=True)
    numbers = torch.arange(batch.num_seqs, dtype=torch.int32, device=slots.device)
    return gathered, prompt_mask.index_select(0, of), torch.where(slots < 0, slots, numbers)


def ban(
    values: Tensor, banned: Sequence[tuple[int, int, int]], seq_lens: Tensor, send: Send
) -> None:
    """Set logits to -inf where a sequence is too short for the token.

    Args:
        values: [num_seqs, vocab], written.
        banned: (row, token id, the length from which the token may come).
        seq_lens: [num_seqs] int32 on the device, which may be more than the host knows.
    """
    rows, tokens, lens = send(banned, torch.long).unbind(1)
    never = values.new_full((), -torch.inf)
    now = torch.where(seq_lens.index_select(0, rows) < lens, never, values[rows, tokens])
    values.index_put_((rows, tokens), now)
