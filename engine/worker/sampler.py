"""Turns logits into tokens on the device.

A greedy batch takes one kernel; others are sampled with the parameters of each request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ...config import TOKEN_IDS, ResolvedConfig
from ...graph_capture import HostRing, StepBuffers
from ..messages.step import Batch, EndedOutput, NewSequence
from .drafts.rows import ban, seen_tokens
from .drafts.state import DraftState
from .sampling.op_table import OpTable
from .sampling.requests import REQUEST, RowParameters, Rows

_ALWAYS = (1 << 31) - 1
"""Longer than any sequence."""
_Key: TypeAlias = tuple[int, bytes, bytes]
"""A batch's number of requests admitted before, its slots, and which of its rows sample."""


@dataclass(frozen=True)
class Sampled:
    """One step's tokens [num_seqs] int32, in host memory that the device writes; ``logprobs`` as
    ``ops.token_logprobs`` returns them, on the device, if some request of the batch wants them;
    ``has_drafts`` as in ``StepResult``, in host memory."""

    token_ids: Tensor
    logprobs: tuple[Tensor, Tensor, Tensor, Tensor] | None
    has_drafts: Tensor | None = None


class Sampler:
    """Samples one token a sequence, and keeps the state of earlier tokens that sampling needs.

    Requests without a seed get one of their own, from ``config.model.seed`` and
    ``NewSequence.arrival``.

    Args:
        vocab_size: columns of the logits.
    """

    _ahead = 0
    """Positions between a row's length and the token that it samples."""

    def __init__(self, table: OpTable, config: ResolvedConfig, vocab_size: int) -> None:
        self._ops, self.vocab_size = table, vocab_size
        self._device = torch.device(config.hardware.device)
        self._max_num_seqs, self._seed = config.scheduler.max_num_seqs, config.model.seed
        self.drafts: DraftState | None = None
        if config.scheduler.speculative is not None:
            self.drafts = DraftState(table, config, self._device)
            self.last_tokens, self.shared = self.drafts.last_tokens, self.drafts.memory
        else:
            self.last_tokens = torch.zeros(
                self._max_num_seqs, dtype=torch.int32, device=self._device
            )
            self.shared = self.last_tokens
        # Of drafts the host reads a second part; both begin at whole lines of memory.
        self._read = HostRing(self._device, 2 * (-(-config.scheduler.max_num_rows // 32) * 32))
        self._slots = np.zeros(self._max_num_seqs, REQUEST)
        self._stop_ids: dict[int, frozenset[int]] = {}
        self._biases: dict[int, Mapping[int, float]] = {}
        self._allowed: dict[int, Tensor] = {}
        self._bits = torch.arange(32, dtype=torch.int32, device=self._device)
        self._num_admitted = 0
        self._counts: Tensor | None = None
        self._prompt_mask: Tensor | None = None
        self._rows: dict[_Key, Rows] = {}
        self._never = torch.tensor(-torch.inf, device=self._device)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernels of a greedy step, so that the first request does not wait for it."""
        logits = torch.zeros((1, self.vocab_size), dtype=dtype, device=self._device)
        slots = torch.zeros(1, dtype=torch.int32, device=self._device)
        token_ids, (_, read) = self._ops("argmax", logits), self._read.take()
        self._ops("keep_tokens", self.last_tokens, token_ids, slots, read[:1])

    def admit(self, sequence: NewSequence) -> None:
        """Set up the state of a request that starts in a slot.  A seed that is made for it stays
        the same after a preemption."""
        params, slot = sequence.sampling_params, sequence.slot
        self._slots[slot] = (
            params.temperature,
            min(params.top_k, self.vocab_size),
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
            (self._seed << 32) + sequence.arrival if params.seed is None else params.seed,
            params.has_penalties,
            params.greedy and not params.has_penalties,
            params.plain_greedy and params.logprobs is None,
            -1 if params.logprobs is None else params.logprobs,
            params.prompt_logprobs or 0,
            params.min_tokens > 0,
            bool(params.logit_bias),
            params.allowed_token_ids is not None,
            min(sequence.num_prompt_tokens + params.min_tokens, 1 << 62),
        )
        self._stop_ids[slot] = sequence.stop_ids
        self._biases[slot] = params.logit_bias or {}
        if params.allowed_token_ids is not None:
            allowed = self._send(params.allowed_token_ids, torch.long)
            none = torch.zeros(self.vocab_size, dtype=torch.bool, device=self._device)
            self._allowed[slot] = none.index_fill_(0, allowed, True)
        self._num_admitted += 1
        if self.drafts is not None:
            self.drafts.admit(sequence, self._send)
        if not params.has_penalties:
            return
        if self._counts is None or self._prompt_mask is None:
            shape = (self._max_num_seqs, self.vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._prompt_mask = torch.zeros(shape, dtype=torch.bool, device=self._device)
        counts = np.bincount(sequence.output_token_ids, minlength=self.vocab_size)
        self._counts[slot].copy_(self._send(counts, torch.int32))
        prompt = self._send(sequence.prompt_token_ids, torch.long)
        self._prompt_mask[slot].zero_().index_fill_(0, prompt, True)

    def remember(self, outputs: Sequence[EndedOutput]) -> None:
        """Requests have ended; drafts may be found in their ``outputs``."""
        if self.drafts is not None and self.drafts.ring is not None:
            self.drafts.ring.remember(outputs, self._send)

    def _send(self, values: Any, dtype: torch.dtype | None = None) -> Tensor:
        """Copy a list or an array to the device; nothing waits for the copy."""
        host = torch.as_tensor(values, dtype=dtype)
        if self._device.type == "cuda":
            host = host.pin_memory()  # a copy of pageable memory would wait for the device
        return host.to(self._device, non_blocking=True)

    def sample(self, logits: Tensor, batch: Batch, buffers: StepBuffers) -> Sampled:
        """Choose the next token of every row.

        Args:
            logits: [num_seqs, vocab], the model's dtype.
            buffers: have the inputs of the step on the device; a sequence's length is the position
                of the token being sampled.
        """
        token_ids = self.choose(logits, batch, buffers)
        if not len(batch.targets) and self._slots["plain"][batch.slots].all():
            return self._keep(token_ids, buffers)
        rows, logprobs = self._rows_of(batch), None
        asked, num_logprobs = token_ids, rows.num_logprobs
        if len(batch.targets):
            targets = self._send(batch.targets.copy())
            asked = torch.where(targets < 0, token_ids, targets)
            wanted = rows.requests["num_prompt_logprobs"][batch.targets >= 0]
            num_logprobs = max(num_logprobs, int(wanted.max()))
        if num_logprobs >= 0:
            logprobs = self._ops("token_logprobs", logits, asked, num_logprobs)
        penalized = rows.parameters.penalty_slots if rows.parameters is not None else None
        return replace(self._keep(token_ids, buffers, penalized), logprobs=logprobs)

    def choose(self, logits: Tensor, batch: Batch, buffers: StepBuffers) -> Tensor:
        """[num_seqs] int32, the next token of every row.  Arguments are those of ``sample``."""
        if self._slots["plain"][batch.slots].all():
            return self.draw(logits, None, buffers)
        rows = self._rows_of(batch)
        banned = self._banned(batch, rows)
        if rows.draws or banned or rows.has_bias or rows.has_allowed or len(batch.masked_rows):
            return self._sample(logits, batch, rows, banned, buffers)
        return self.draw(logits, None, buffers)

    def draw(
        self, logits: Tensor, parameters: RowParameters | None, buffers: StepBuffers
    ) -> Tensor:
        """[num_seqs] int32: the likeliest tokens, or those drawn by ``parameters``; a CUDA graph
        may hold it."""
        token_ids: Tensor
        if parameters is None:
            token_ids = self._ops("argmax", logits)
            return token_ids
        seq_lens = buffers.view("seq_lens", len(logits))
        token_ids = self._ops(
            "sample",
            logits,
            parameters.temperature,
            parameters.top_k,
            parameters.top_p,
            parameters.min_p,
            parameters.seeds,
            seq_lens + self._ahead if self._ahead else seq_lens,
        )
        return token_ids

    def _keep(
        self, token_ids: Tensor, buffers: StepBuffers, penalized: Tensor | None = None
    ) -> Sampled:
        """Keep the tokens on the device, by slot, and count them in the slots ``penalized``."""
        host, read = self._read.take()
        count, has_drafts = token_ids.shape[0], None
        if self.drafts is not None:
            behind = len(read) // 2
            token_ids = self.drafts.keep(token_ids, buffers, read[:count], read[behind:][:count])
            has_drafts = host[behind:][:count] if self.drafts.finds else None
        else:
            slots = buffers.view("slots", count)
            self._ops("keep_tokens", self.last_tokens, token_ids, slots, read[:count])
        if penalized is not None:
            self._ops("count_tokens", token_ids, penalized, self._counts)
        return Sampled(host[:count], None, has_drafts)

    def _rows_of(self, batch: Batch) -> Rows:
        """Collect what the requests ask for, or reuse rows if nobody came or went: of a draft
        model there are those of a batch and those with its padding."""
        key = (self._num_admitted, batch.slots.tobytes(), batch.num_sampled.tobytes())
        if key not in self._rows:
            if len(self._rows) > 1:
                del self._rows[next(iter(self._rows))]
            requests, samples = self._slots[batch.slots], batch.num_sampled > 0
            self._rows[key] = Rows(
                requests=requests,
                samples=samples,
                draws=bool((samples & ~requests["likeliest"]).any()),
                has_min_tokens=bool(requests["has_min_tokens"].any()),
                has_bias=bool((samples & requests["has_bias"]).any()),
                has_allowed=bool((samples & requests["has_allowed"]).any()),
                num_logprobs=int(requests["num_logprobs"].max(initial=-1, where=samples)),
            )
        return self._rows[key]

    def _banned(self, batch: Batch, rows: Rows) -> list[tuple[int, int, int]]:
        """(row, token id, length) of the tokens that are banned by the batch, or would end a
        sequence before it has this length."""
        banned = [(row, token_id, _ALWAYS) for row, token_id in batch.banned.tolist()]
        if not rows.has_min_tokens:
            return banned
        lens = batch.starts + batch.query_lens
        too_short = rows.samples & (lens < rows.requests["min_len"])
        too_short[batch.masked_rows] = False  # their masks say so
        return banned + [
            (row, token_id, int(rows.requests["min_len"][row]))
            for row in np.flatnonzero(too_short).tolist()
            for token_id in self._stop_ids[batch.slots[row]]
        ]

    def _sample(
        self,
        logits: Tensor,
        batch: Batch,
        rows: Rows,
        banned: list[tuple[int, int, int]],
        buffers: StepBuffers,
    ) -> Tensor:
        seq_lens = buffers.view("seq_lens", batch.num_seqs)
        if rows.parameters is None:
            rows.parameters = self._upload(batch, rows)
        parameters = rows.parameters
        values = logits
        has_masks = bool(len(batch.masked_rows))
        changes = has_masks or rows.has_bias or rows.has_allowed or bool(banned)
        if changes or parameters.penalty_slots is not None:
            values = logits.to(torch.float32, copy=True)
        penalized, counts, mask = parameters.penalty_slots, self._counts, self._prompt_mask
        if penalized is not None and counts is not None and mask is not None:
            self._ops(
                "apply_penalties",
                values,
                *seen_tokens(
                    counts,
                    mask,
                    penalized,
                    batch,
                    buffers.view(TOKEN_IDS, batch.num_seqs),
                    self._send,
                ),
                parameters.repetition_penalty,
                parameters.frequency_penalty,
                parameters.presence_penalty,
            )
        if rows.has_bias:
            self._add_biases(values, batch, rows)
        if has_masks:
            self._mask(values, batch)
        if rows.has_allowed:
            self._keep_allowed(values, batch, rows)
        if banned and len(batch.ahead):
            ban(values, banned, seq_lens, self._send)
        elif banned:
            places = self._send([each[:2] for each in banned], torch.long)
            values.index_put_(tuple(places.unbind(1)), self._never)
        return self.draw(values, parameters, buffers)

    def _add_biases(self, values: Tensor, batch: Batch, rows: Rows) -> None:
        """Add what requests ask for to logits [num_seqs, vocab]."""
        entries = [
            (row, token_id, bias)
            for row in np.flatnonzero(rows.samples & rows.requests["has_bias"]).tolist()
            for token_id, bias in self._biases[batch.slots[row]].items()
        ]
        at = self._send([entry[:2] for entry in entries], torch.long).unbind(1)
        bias = self._send([entry[2] for entry in entries], torch.float32)
        values.index_put_(tuple(at), bias, accumulate=True)

    def _keep_allowed(self, values: Tensor, batch: Batch, rows: Rows) -> None:
        """Set the logits of tokens that are not allowed to -inf; values [num_seqs, vocab]."""
        numbers = np.flatnonzero(rows.samples & rows.requests["has_allowed"])
        allowed = torch.stack([self._allowed[slot] for slot in batch.slots[numbers].tolist()])
        at = self._send(numbers)
        values.index_copy_(0, at, values.index_select(0, at).masked_fill_(~allowed, -torch.inf))

    def _mask(self, values: Tensor, batch: Batch) -> None:
        """Set the logits of tokens that a grammar forbids to -inf; values [num_seqs, vocab]."""
        rows = self._send(batch.masked_rows.astype(np.int64))
        words = self._send(batch.masks.copy()).unsqueeze(2)
        allowed = (words >> self._bits & 1).flatten(1)[:, : values.shape[1]].bool()
        masked = values.index_select(0, rows).masked_fill_(~allowed, -torch.inf)
        values.index_copy_(0, rows, masked)

    def _upload(self, batch: Batch, rows: Rows) -> RowParameters:
        def column(name: str) -> Tensor:
            return self._send(rows.requests[name].copy())

        def optional(name: str, off: float) -> Tensor | None:
            return None if (rows.requests[name] == off).all() else column(name)

        # Rows that sample nothing yet (unfinished prefills) must not be counted as output.
        penalized = rows.samples & rows.requests["has_penalties"]
        slots = np.where(penalized, batch.slots, np.int32(-1))
        return RowParameters(
            temperature=column("temperature"),
            top_k=optional("top_k", 0),
            top_p=optional("top_p", 1.0),
            min_p=optional("min_p", 0.0),
            seeds=column("seed"),
            penalty_slots=self._send(slots) if penalized.any() else None,
            repetition_penalty=column("repetition_penalty"),
            frequency_penalty=column("frequency_penalty"),
            presence_penalty=column("presence_penalty"),
        )
