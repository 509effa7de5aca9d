"""Runs a draft head: its program reads hidden states beside token ids.

The first pass of a batch reads those that the target has kept, and joins them by the head's ``fc``;
further passes read what the head itself has made of each sequence.  Both lie on the device.  A row
is at the position of the token before it, whose hidden state it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ....config import FED_SLOTS, HIDDEN, NO_SLOT
from ....config.step_fields import ON_DEVICE
from ....graph_capture import Dispatch
from ...messages.step import Batch, Ints
from ..model_runner import ModelRunner
from .rows import rows_before

Caches = Callable[[], Sequence[Tensor]]
"""The target's caches of hidden states; asked for each step, since a sleep binds others."""


class DraftRunner(ModelRunner):
    """``ModelRunner`` for a draft model, whose rows ``PassRunner`` places."""

    def _order_of(self, batch: Batch) -> Ints | None:
        """From 1 on, since a row's token is the draft of that number, or what the step's row of the
        number before has sampled."""
        if not len(batch.ahead):
            return None
        before = rows_before(batch) if batch.feed_slots[0] == NO_SLOT else None
        return np.full(batch.num_seqs, 1 + ON_DEVICE, np.int32) + (0 if before is None else before)

    def compute(self, num_rows: int, *, is_fed: bool) -> Tensor:
        """Run the program over the first rows, each of one token, without a graph; returns their
        logits.  ``is_fed``: rows follow what the pass before has made."""
        self._fill(num_rows, num_rows, is_fed=is_fed)
        return self.graphs.program.run(self.buffers.views(num_tokens=num_rows, num_seqs=num_rows))

    def _fill(self, num_tokens: int, num_seqs: int, *, is_fed: bool) -> None:
        """Write what the program reads beside the step's inputs."""


class HeadRunner(DraftRunner):
    """``DraftRunner`` for a draft head.

    Args:
        head: its weights, of ``DraftHead`` or ``CapturedHead``.
        kept: what it reads of the target, in the order in which its ``fc`` does.
        fed: [max_num_seqs, 2, 1, pieces, width], bound to its program.
    """

    def __init__(self, *args: Any, head: Any, kept: Caches, fed: Tensor, **others: Any) -> None:
        super().__init__(*args, **others)
        self._head, self._kept, self._fed = head, kept, fed

    def run_stage(self, dispatch: Dispatch, batch: Batch) -> Tensor:
        num_tokens, num_seqs = batch.num_tokens, batch.num_seqs
        self._fill(num_tokens, num_seqs, is_fed=batch.feed_slots[0] != NO_SLOT)
        return self._run(dispatch, num_seqs)[:num_seqs]

    def _fill(self, num_tokens: int, num_seqs: int, *, is_fed: bool) -> None:
        hidden = self.buffers.view(HIDDEN, num_tokens)
        if is_fed:
            slots = self.buffers.view("slots", num_seqs)
            hidden.copy_(self._fed.flatten(1).index_select(0, slots))
        else:
            hidden.copy_(self._of_target(num_tokens))

    def _write_rows(self, arrays: dict[str, npt.NDArray[Any]], batch: Batch) -> None:
        super()._write_rows(arrays, batch)
        arrays[FED_SLOTS][: batch.num_seqs] = batch.slots

    def _of_target(self, num_tokens: int) -> Tensor:
        """[num_tokens, hidden_size] of the step's tokens."""
        slots = self.buffers.view("slot_mapping", num_tokens)
        caches = self._kept()
        size = caches[0].shape[2]
        block, offset = slots // size, slots % size
        states = torch.cat([cache[block, :, offset].flatten(1) for cache in caches], dim=-1)
        fc = self._head.fc
        return states if fc is None else self.ops("linear", states, fc.weight)
