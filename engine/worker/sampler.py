"""Turns logits into tokens on the device.

A greedy batch takes one kernel; others are sampled with the parameters of each request.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ... import ops
from ...compiler.lowering.check_kernels import unfit
from ...config import CompileConfig, ResolvedConfig, step_schema
from ...graph_capture import HostRing
from ...model_executor.spec import ModelSpec
from ..core.batch import Batch, ScheduledRequest
from ..core.request import Request


@dataclass(frozen=True)
class Sampled:
    """One step's tokens [num_seqs] int32, in host memory that the device writes; ``logprobs`` as
    ``ops.token_logprobs`` returns them, on the device, if some request of the batch wants them."""

    token_ids: Tensor
    logprobs: tuple[Tensor, Tensor, Tensor, Tensor] | None


@dataclass(frozen=True)
class _RowParameters:
    """Sampling parameters of a batch on the device, one row a sequence."""

    temperature: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    seeds: Tensor
    penalty_slots: Tensor | None
    repetition_penalty: Tensor
    frequency_penalty: Tensor
    presence_penalty: Tensor


class OpTable:
    """Implementations of the ops that run outside the compiled program, chosen once by dtypes."""

    def __init__(self, config: CompileConfig, sm: int) -> None:
        self._config, self._kernels, self._sm = config, dict(config.kernels), sm
        self._chosen: dict[tuple[Any, ...], Any] = {}
        self.choices: dict[str, str] = {}

    def __call__(self, name: str, *args: Any) -> Any:
        """Run op ``name`` by the implementation that fits ``args``."""
        key = (name, *(a.dtype for a in args if isinstance(a, Tensor)))
        overload = self._chosen.get(key)
        if overload is None:
            op = ops.BY_NAME[name]
            desc = op.describe(args, sm=self._sm)
            forced = self._kernels.get(name, "")
            try:
                choice = ops.choose(
                    op, desc, inline_first=not self._config.hand_kernels, override=forced
                )
            except ops.NoImplementationError as error:
                if forced:
                    raise unfit(name, forced, error) from error
                raise
            self.choices[name] = str(choice)
            overload = self._chosen[key] = op.overload(choice.implementation)
        return overload(*args)


def outside_calls(
    spec: ModelSpec, num_tokens: int, num_seqs: int
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Every form of call that a step of these sizes makes outside the compiled program: the op's
    name, and arguments on the meta device."""

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    ids = ints(num_seqs)
    floats = torch.empty(num_seqs, dtype=torch.float32, device="meta")
    shape = (num_seqs, spec.vocab_size)
    logits = torch.empty(shape, dtype=spec.dtype, device="meta")
    counts = torch.empty(shape, dtype=torch.int32, device="meta")
    values = torch.empty(shape, dtype=torch.float32, device="meta")
    step = step_schema(len(spec.cache_groups))
    tables = ints(num_seqs, len(step.tables), 1)
    fields = (ints(len(step.tokens) - 1, num_tokens), ints(len(step.rows), num_seqs + 1), tables)
    yield "write_inputs", (ints(step.packed_size(num_tokens, num_seqs, 1)), ids, *fields)
    yield "keep_tokens", (ids, ids, ids, ids)
    yield "argmax", (logits,)
    for num_logprobs in (0, 1):
        yield "token_logprobs", (logits, ids, num_logprobs)
    yield "apply_penalties", (values, counts, counts.bool(), ids, floats, floats, floats)
    yield "count_tokens", (ids, ids, counts)
    for top_k, top_p, min_p in itertools.product((None, ids), (None, floats), (None, floats)):
        seeds = torch.empty(num_seqs, dtype=torch.int64, device="meta")
        for each in (logits, values):  # as the model gives them, or with penalties and bans
            yield "sample", (each, floats, top_k, top_p, min_p, seeds, ids)


class Sampler:
    """Samples one token a sequence, and keeps the state of earlier tokens that sampling needs.

    Requests without a seed get one of their own, from ``config.model.seed`` and their order of
    arrival.

    Args:
        vocab_size: columns of the logits.
    """

    def __init__(self, table: OpTable, config: ResolvedConfig, vocab_size: int) -> None:
        self._ops, self._vocab_size = table, vocab_size
        self._device = torch.device(config.hardware.device)
        self._max_num_seqs, self._seed = config.scheduler.max_num_seqs, config.model.seed
        self.last_tokens = torch.zeros(self._max_num_seqs, dtype=torch.int32, device=self._device)
        self._read = HostRing(self._device, self._max_num_seqs)
        self._counts: Tensor | None = None
        self._prompt_mask: Tensor | None = None
        self._rows: tuple[tuple[Any, ...], _RowParameters] | None = None
        self._never = torch.tensor(-torch.inf, device=self._device)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernels of a greedy step, so that the first request does not wait for it."""
        logits = torch.zeros((1, self._vocab_size), dtype=dtype, device=self._device)
        slots = torch.zeros(1, dtype=torch.int32, device=self._device)
        self._keep(self._ops("argmax", logits), slots)

    def admit(self, request: Request, slot: int) -> None:
        """Set up the device state of a request that starts in ``slot``."""
        if not request.sampling_params.has_penalties:
            return
        if self._counts is None or self._prompt_mask is None:
            shape = (self._max_num_seqs, self._vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._prompt_mask = torch.zeros(shape, dtype=torch.bool, device=self._device)
        counts = np.bincount(request.output_token_ids, minlength=self._vocab_size)
        self._counts[slot].copy_(self._send(counts, torch.int32))
        prompt = self._send(request.prompt_token_ids, torch.long)
        self._prompt_mask[slot].zero_().index_fill_(0, prompt, True)

    def _send(self, values: Any, dtype: torch.dtype) -> Tensor:
        """Copy a list or an array to the device; nothing waits for the copy."""
        host = torch.as_tensor(values, dtype=dtype)
        if self._device.type == "cuda":
            host = host.pin_memory()  # a copy of pageable memory would wait for the device
        return host.to(self._device, non_blocking=True)

    def sample(self, logits: Tensor, batch: Batch, slots: Tensor, seq_lens: Tensor) -> Sampled:
        """Choose the next token of every row.

        Args:
            logits: [num_seqs, vocab], the model's dtype.
            slots, seq_lens: [num_seqs] int32 on the device; a sequence's length is the position
                of the token being sampled.
        """
        entries = batch.scheduled
        wanted = {e.request.sampling_params.logprobs for e in entries if e.samples}
        num_logprobs = max((n for n in wanted if n is not None), default=None)
        if all(_is_plain_greedy(entry) for entry in entries):
            token_ids = self._ops("argmax", logits)
        else:
            token_ids = self._sample(logits, entries, seq_lens)
        logprobs = None
        if num_logprobs is not None:
            logprobs = self._ops("token_logprobs", logits, token_ids, num_logprobs)
        return Sampled(self._keep(token_ids, slots), logprobs)

    def _keep(self, token_ids: Tensor, slots: Tensor) -> Tensor:
        """Keep the tokens on the device, by slot; returns where the host will find them."""
        host, read = self._read.take()
        count = token_ids.shape[0]
        self._ops("keep_tokens", self.last_tokens, token_ids, slots, read[:count])
        return host[:count]

    def _sample(self, logits: Tensor, entries: list[ScheduledRequest], seq_lens: Tensor) -> Tensor:
        rows = self._parameters(entries)
        banned = [
            (row, token_id)
            for row, entry in enumerate(entries)
            if _below_min_tokens(entry)
            for token_id in entry.request.stop_ids
        ]
        values = logits
        if banned or rows.penalty_slots is not None:
            values = logits.to(torch.float32, copy=True)
        if rows.penalty_slots is not None:
            self._ops(
                "apply_penalties",
                values,
                self._counts,
                self._prompt_mask,
                rows.penalty_slots,
                rows.repetition_penalty,
                rows.frequency_penalty,
                rows.presence_penalty,
            )
        if banned:
            values.index_put_(tuple(self._send(banned, torch.long).unbind(1)), self._never)
        token_ids: Tensor = self._ops(
            "sample",
            values,
            rows.temperature,
            rows.top_k,
            rows.top_p,
            rows.min_p,
            rows.seeds,
            seq_lens,
        )
        if rows.penalty_slots is not None:
            self._ops("count_tokens", token_ids, rows.penalty_slots, self._counts)
        return token_ids

    def _parameters(self, entries: list[ScheduledRequest]) -> _RowParameters:
        """The batch's rows on the device; the last batch's rows if nobody came or went."""
        key = tuple((e.request.arrival, e.request.slot, e.samples) for e in entries)
        if self._rows is None or self._rows[0] != key:
            self._rows = key, self._upload(entries)
        return self._rows[1]

    def _upload(self, entries: list[ScheduledRequest]) -> _RowParameters:
        params = [entry.request.sampling_params for entry in entries]

        def column(values: list[Any], dtype: torch.dtype) -> Tensor:
            return self._send(values, dtype)

        def optional(values: list[Any], off: Any, dtype: torch.dtype) -> Tensor | None:
            return None if all(v == off for v in values) else column(values, dtype)

        # Rows that sample nothing yet (unfinished prefills) must not be counted as output.
        penalized = [
            e.request.slot if e.samples and e.request.sampling_params.has_penalties else -1
            for e in entries
        ]
        return _RowParameters(
            temperature=column([p.temperature for p in params], torch.float32),
            top_k=optional([p.top_k for p in params], 0, torch.int32),
            top_p=optional([p.top_p for p in params], 1.0, torch.float32),
            min_p=optional([p.min_p for p in params], 0.0, torch.float32),
            seeds=column([self._seed_of(e.request) for e in entries], torch.int64),
            penalty_slots=optional(penalized, -1, torch.int32),
            repetition_penalty=column([p.repetition_penalty for p in params], torch.float32),
            frequency_penalty=column([p.frequency_penalty for p in params], torch.float32),
            presence_penalty=column([p.presence_penalty for p in params], torch.float32),
        )

    def _seed_of(self, request: Request) -> int:
        """The request's seed, or one made for it, which stays the same after a preemption."""
        seed = request.sampling_params.seed
        return seed if seed is not None else (self._seed << 32) + request.arrival


def _below_min_tokens(entry: ScheduledRequest) -> bool:
    request = entry.request
    sampled_before = entry.start + entry.num_tokens - len(request.prompt_token_ids)
    return entry.samples and sampled_before < request.sampling_params.min_tokens


def _is_plain_greedy(entry: ScheduledRequest) -> bool:
    """Whether only the likeliest token is asked for, or no token at all."""
    params = entry.request.sampling_params
    if params.plain_greedy:
        return True
    plain = params.greedy and not params.has_penalties and not _below_min_tokens(entry)
    return plain or not entry.samples
