"""``DraftState`` keeps on the device what drafts need from step to step, by slot: how many tokens
a request has, the tokens, and its next drafts.

Behind the sampler ``accept_tokens`` says which rows of drafts were right, and ``propose_ngrams``
drafts anew.  Ahead of the next step's program ``place_rows`` makes its inputs from that.  So the
host may launch a step before it knows what the one before accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....config import ResolvedConfig
from ....config.speculative import LOOKUP_METHODS
from ....config.step_fields import NO_SAMPLE, ON_DEVICE, ORDER, TOKEN_IDS
from ....graph_capture import StepBuffers
from ...messages.step import Batch, Ints, NewSequence
from .ring import OutputRing
from .rows import Send, rows_before

ALIGNED = 32
"""Rows of the state begin at multiples of so many words, as those of ``StepBuffers`` do."""


class DraftState:
    """The state of all slots, and the ops that read and write it.

    Attributes:
        memory: [2 + most, max_num_seqs and more] int32: the newest tokens, the lengths, the drafts.
            It is what the other ranks need.
        finds: whether drafts are looked for here, and not always there.
        ring: earlier outputs in which they are looked for, too; None without.
        kept: [num_seqs] int32: the tokens of the last step's rows, as of ``ops.accept_tokens``.
    """

    def __init__(self, ops: Any, config: ResolvedConfig, device: torch.device) -> None:
        asked, self._ops = config.scheduler.speculative, ops
        assert asked is not None
        most, count = asked.num_speculative_tokens, config.scheduler.max_num_seqs
        wide = -(-count // ALIGNED) * ALIGNED

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.memory = zeros(2 + most, wide)
        self.last_tokens, self.lengths, *_ = self.memory[:, :count]
        self.drafts = self.memory[2:, :count]
        self._lookup = (asked.prompt_lookup_min, asked.prompt_lookup_max)
        is_whole = config.parallel.pipeline_parallel_size == 1
        self.finds = asked.method in LOOKUP_METHODS and not asked.acceptance and is_whole
        self.ring: OutputRing | None = None
        if self.finds and asked.method == "suffix" and asked.suffix_cached_tokens:
            capacity = max(asked.suffix_cached_tokens, 2)
            self.ring = OutputRing(ops, capacity, count, device)
        self._history = zeros(count, config.model.max_model_len if self.finds else 0)
        self._chances: Tensor | None = None
        if asked.acceptance:
            self._chances = torch.tensor(asked.acceptance, dtype=torch.float32, device=device)
        self._judged = zeros(count) - 1
        self._repeats = asked.method in LOOKUP_METHODS and bool(asked.acceptance)
        self.kept = zeros(0)

    def admit(self, sequence: NewSequence, send: Send) -> None:
        """A request begins in a slot."""
        tokens = [*sequence.prompt_token_ids, *sequence.output_token_ids]
        if self.finds and tokens:
            self._history[sequence.slot, : len(tokens)].copy_(send(tokens, torch.int32))
        if self.ring is not None:
            self.ring.admit(sequence.slot, sequence.salt)
        if self._chances is not None:
            is_judged = sequence.sampling_params.grammar is None
            seed = sequence.arrival & 0x7FFFFFFF if is_judged else -1
            self._judged[sequence.slot].fill_(seed)

    def order_of(self, batch: Batch) -> Ints:
        """``config.ORDER`` of a batch's rows."""
        before = rows_before(batch)
        zeros = np.zeros(batch.num_seqs, np.int32)
        order: Ints = np.where(
            batch.num_sampled > 0, zeros if before is None else before, NO_SAMPLE
        )
        if len(batch.ahead):
            order += np.where(batch.ahead >= 0, np.int32(ON_DEVICE), np.int32(0))
        return order

    def place(self, buffers: StepBuffers, num_seqs: int, num_groups: int, block_size: int) -> None:
        """Make the inputs of rows that the device alone can place; the others are written."""
        names = ("slots", ORDER, TOKEN_IDS, "positions", "seq_lens")
        slots, order, *fields = (buffers.view(name, num_seqs) for name in names)
        tables, mappings = buffers.of_groups(num_groups, num_seqs)
        state = (self.lengths, self.drafts, slots, tables, block_size)
        self._ops("place_rows", *state, order, *fields, mappings)

    def keep(
        self, token_ids: Tensor, buffers: StepBuffers, read: Tensor, has_drafts: Tensor
    ) -> Tensor:
        """Accept the drafts of a step, and make those of the next.

        Args:
            token_ids: [num_seqs] int32, as sampled.
            read, has_drafts: [num_seqs] int32, written: the host's memory.  ``has_drafts`` says
                which rows' requests have drafts for the next step, if ``finds``.

        Returns:
            [num_seqs] int32: what ``read`` has too, see ``ops.accept_tokens``.
        """
        num_seqs = token_ids.shape[0]
        names = (TOKEN_IDS, "slots", ORDER, "seq_lens")
        input_ids, slots, order, seq_lens = (buffers.view(name, num_seqs) for name in names)
        state = (self.last_tokens, self.lengths, self._history, self._chances, self._judged)
        kept = torch.empty_like(token_ids)
        rows = (token_ids, input_ids, slots, order, seq_lens, kept, read)
        self._ops("accept_tokens", *state, *rows)
        if self.finds:
            known = (self._history, self.lengths, slots, order, *self._lookup)
            if self.ring is not None:
                self.ring.propose(*known, drafts=self.drafts, has_drafts=has_drafts)
            else:
                self._ops("propose_ngrams", *known, self.drafts, has_drafts)
        elif self._repeats:
            # A replayed acceptance asks for drafts always, whatever they are.
            self.drafts.copy_(self.last_tokens.expand_as(self.drafts))
        self.kept = kept
        return kept


def draft_calls(num_seqs: int, num_groups: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Every form of call of ``DraftState`` for a model of so many KV groups, and of ``PassRunner``
    for a drafter of one or as many: the op's name, and arguments on the meta device."""

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    ids, known, drafts = ints(num_seqs), ints(num_seqs, 1), ints(1, num_seqs)
    for chances in (None, torch.empty(1, device="meta")):
        yield "accept_tokens", (ids, ids, known, chances, *[ids] * 8)
    for groups in sorted({1, num_groups}):  # a draft model's layers are mostly one
        tables, mappings = ints(num_seqs, groups, 1), ints(groups, num_seqs)
        yield "place_rows", (ids, drafts, ids, tables, 16, *[ids] * 4, mappings)
    yield "propose_ngrams", (known, ids, ids, ids, 1, 1, drafts, ids)
    salts = torch.empty(num_seqs, dtype=torch.int64, device="meta")
    ring = (ids, salts, ints(1), salts, salts)
    yield "propose_suffix", (known, ids, ids, ids, 1, 1, *ring, drafts, ids)
