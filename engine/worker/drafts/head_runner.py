"""Runs a draft head: its program reads hidden states beside token ids.

The first pass of a batch reads those that the target has kept, and joins them by the head's ``fc``;
further passes read what the head itself has made of each sequence.  Both lie on the device.  A row
is at the position of the token before it, whose hidden state it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
import torch
from msgspec import structs
from torch import Tensor

from ....config import FED_SLOTS, HIDDEN, NO_SLOT, ResolvedConfig
from ....graph_capture import Dispatch, StepBuffers
from ...messages.step import Batch, NewSequence
from ..model_runner import ModelRunner
from ..sampler import Sampled, Sampler
from ..sampling.op_table import OpTable

Caches = Callable[[], Sequence[Tensor]]
"""The target's caches of hidden states; asked for each step, since a sleep binds others."""


class HeadSampler(Sampler):
    """Samples the target's tokens from logits of those that the head knows, by the noise with which
    the target will: the token is at the second position behind a row's."""

    _ahead = 1

    def __init__(
        self, table: OpTable, config: ResolvedConfig, vocab_size: int, ids: Tensor | None
    ) -> None:
        super().__init__(table, config, vocab_size)
        self._ids, self._most = ids, config.scheduler.max_num_seqs
        self._spread: Tensor | None = None

    def admit(self, sequence: NewSequence) -> None:
        super().admit(structs.replace(sequence, num_prompt_tokens=sequence.num_prompt_tokens - 1))

    def sample(self, logits: Tensor, batch: Batch, buffers: StepBuffers) -> Sampled:
        if self._ids is not None:
            if self._spread is None:
                # Other columns are never written.
                self._spread = logits.new_full((self._most, self.vocab_size), -torch.inf)
            logits = self._spread[: len(logits)].index_copy_(1, self._ids, logits)
        return super().sample(logits, batch, buffers)


class HeadRunner(ModelRunner):
    """``ModelRunner`` for a draft head.

    Args:
        head: its weights, of ``DraftHead`` or ``CapturedHead``.
        kept: what it reads of the target, in the order in which its ``fc`` does.
        fed: [max_num_seqs, 2, 1, pieces, width], bound to its program.
    """

    def __init__(self, *args: Any, head: Any, kept: Caches, fed: Tensor, **others: Any) -> None:
        super().__init__(*args, **others)
        self._head, self._kept, self._fed = head, kept, fed

    def _run_stage(self, dispatch: Dispatch, batch: Batch) -> Tensor:
        num_tokens, num_seqs = batch.num_tokens, batch.num_seqs
        hidden = self._buffers.view(HIDDEN, num_tokens)
        if batch.feed_slots[0] == NO_SLOT:
            hidden.copy_(self._of_target(num_tokens))
        else:
            slots = self._buffers.view("slots", num_seqs)
            hidden.copy_(self._fed.flatten(1).index_select(0, slots))
        return self._run(dispatch, num_seqs)[:num_seqs]

    def _write_rows(self, arrays: dict[str, npt.NDArray[Any]], batch: Batch) -> None:
        super()._write_rows(arrays, batch)
        arrays[FED_SLOTS][: batch.num_seqs] = batch.slots

    def _of_target(self, num_tokens: int) -> Tensor:
        """[num_tokens, hidden_size] of the step's tokens."""
        slots = self._buffers.view("slot_mapping", num_tokens)
        caches = self._kept()
        size = caches[0].shape[2]
        block, offset = slots // size, slots % size
        states = torch.cat([cache[block, :, offset].flatten(1) for cache in caches], dim=-1)
        fc = self._head.fc
        return states if fc is None else self._ops("linear", states, fc.weight)
