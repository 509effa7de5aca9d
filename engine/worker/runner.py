"""The runner executes batches on the device.

``launch`` writes a batch's inputs into the static buffers, replays a graph or runs the program, and
samples from the logits.  It waits for nothing; ``LaunchedStep.result`` does, one step later.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...compiler.run.program import Program
from ...config import FEED
from ...graph_capture import Dispatch, Dispatcher, GraphKind, Graphs, StepBuffers
from ..messages.step import Batch, BlockTableUpdate, Logprobs, StepResult
from .sampler import OpTable, Sampled, Sampler


class BlockTables:
    """Every slot's KV block ids of one group on the host, [max_num_seqs, max_blocks]; ``filled``
    counts those of each slot."""

    def __init__(self, max_num_seqs: int, max_blocks: int) -> None:
        self.rows: npt.NDArray[np.int32] = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.filled: npt.NDArray[np.int32] = np.zeros(max_num_seqs, np.int32)

    def update(self, batch: Batch, change: BlockTableUpdate) -> None:
        """Drop the released slots' blocks, then append those that the batch's rows have gained."""
        if batch.released_slots:
            self.filled[batch.released_slots] = 0
        if not len(change.rows):
            return
        slots, start = batch.slots[change.rows].tolist(), 0
        for slot, count in zip(slots, change.counts.tolist(), strict=True):
            filled = self.filled[slot]
            self.rows[slot, filled : filled + count] = change.block_ids[start : start + count]
            self.filled[slot] += count
            start += count


@dataclass
class LaunchedStep:
    """A launched step.  Its results are in the host's memory once the event ``done`` has passed."""

    token_ids: Tensor
    logprobs: tuple[Tensor, ...] | None
    done: torch.cuda.Event | None

    def result(self) -> StepResult:
        """Wait for the step; returns its tokens and, where asked for, their logprobs."""
        if self.done is not None:
            self.done.synchronize()
        token_ids = self.token_ids.numpy().copy()  # a later step writes there
        if self.logprobs is None:
            return StepResult(token_ids)
        return StepResult(token_ids, Logprobs(*(tensor.numpy() for tensor in self.logprobs)))


class Runner:
    """Launches batches in order on the current stream.

    Args:
        program: bound to weights and KV caches.
        graphs: the graphs of that program; a missing one is captured when a step needs it.
        dispatcher: chooses the graph of every step, and counts.
        buffers: the static inputs that the graphs read.
        sampler: turns logits into tokens.
        table: implementations of the ops that run outside of the program.
        block_size: tokens a KV block.
    """

    def __init__(
        self,
        program: Program,
        graphs: Graphs,
        dispatcher: Dispatcher,
        buffers: StepBuffers,
        sampler: Sampler,
        table: OpTable,
        *,
        block_size: int,
    ) -> None:
        self._program, self.graphs, self._dispatcher = program, graphs, dispatcher
        self._buffers, self._sampler, self._ops = buffers, sampler, table
        self._block_size = block_size
        self._tables = BlockTables(buffers.max_seqs, buffers.max_blocks)
        self._on_gpu = sampler.last_tokens.device.type == "cuda"

    def with_program(self, program: Program, graphs: Graphs, dispatcher: Dispatcher) -> Runner:
        """A runner of another program over the same buffers, block tables and sampled tokens: the
        two may take turns."""
        other = copy.copy(self)
        other._program, other.graphs, other._dispatcher = program, graphs, dispatcher
        return other

    @torch.inference_mode()
    def launch(self, batch: Batch) -> LaunchedStep:
        """Enqueue one step and return without waiting for the device."""
        (change,) = batch.block_tables
        self._tables.update(batch, change)
        num_seqs = batch.num_seqs
        dispatch = self._dispatcher.choose(batch.num_tokens, num_seqs, query_len=batch.query_len)
        self.graphs.ensure(dispatch)
        for sequence in batch.new:
            self._sampler.admit(sequence)
        self._write_inputs(batch, dispatch)
        logits = self._run(dispatch, num_seqs)
        slots, seq_lens = (self._buffers.view(name, num_seqs) for name in ("slots", "seq_lens"))
        return self._start_readback(self._sampler.sample(logits, batch, slots, seq_lens))

    def check(self) -> None:
        """Wait for the device; raises if it can run nothing any more."""
        if self._on_gpu:
            torch.cuda.synchronize()

    def _run(self, dispatch: Dispatch, num_seqs: int) -> Tensor:
        """Run the step by its graph or without one; returns the logits, a row a sequence."""
        padded = dispatch.num_tokens
        if dispatch.kind is GraphKind.FULL:
            return self.graphs.replay_full(padded, dispatch.num_seqs)[:num_seqs]
        views = self._buffers.views(num_tokens=padded, num_seqs=num_seqs)
        if dispatch.kind is GraphKind.PIECEWISE:
            return self.graphs.replay_piecewise(padded, views)
        return self._program.run(views)

    def _write_inputs(self, batch: Batch, dispatch: Dispatch) -> None:
        """Write the static inputs, padded to the dispatched sizes.  Padding tokens are stored
        nowhere.  Padding sequences have no context and, except in uniform decode, no tokens."""
        buffers, padded_seqs = self._buffers, dispatch.num_seqs
        sizes = {"num_tokens": dispatch.num_tokens, "num_seqs": padded_seqs}
        host = buffers.next_host(**sizes)
        arrays, tables = host.arrays, self._tables
        num_seqs, num_tokens = batch.num_seqs, batch.num_tokens
        self._write_rows(arrays, batch)
        for field in buffers.schema.tokens:
            arrays[field.name][num_tokens:] = field.padding
        for field in buffers.schema.rows:
            arrays[field.name][num_seqs:] = field.padding
        padding = np.arange(padded_seqs - num_seqs + 1, dtype=np.int32) * dispatch.query_len
        arrays["query_start_loc"][num_seqs:] = num_tokens + padding
        num_blocks = int(tables.filled[batch.slots].max())
        table = host.cells[: padded_seqs * num_blocks].reshape(padded_seqs, num_blocks)
        table[:num_seqs] = tables.rows[batch.slots, :num_blocks]
        table[num_seqs:] = 0
        packed, *targets = buffers.targets(host, **sizes, columns=num_blocks)
        self._ops("write_inputs", packed, self._sampler.last_tokens, *targets)

    def _write_rows(self, arrays: dict[str, npt.NDArray[Any]], batch: Batch) -> None:
        """Write the inputs of rows and tokens, without padding."""
        num_seqs, num_tokens, size = batch.num_seqs, batch.num_tokens, self._block_size
        arrays["slots"][:num_seqs] = batch.slots
        seq_lens = np.add(batch.starts, batch.query_lens, out=arrays["seq_lens"][:num_seqs])
        arrays["query_start_loc"][0] = 0
        ends = np.cumsum(batch.query_lens, out=arrays["query_start_loc"][1 : num_seqs + 1])
        slots, positions = batch.slots, batch.starts
        if batch.query_len != 1:
            slots = np.repeat(slots, batch.query_lens)
            positions = np.repeat(seq_lens - ends, batch.query_lens)
            positions += np.arange(num_tokens, dtype=np.int32)
        arrays["positions"][:num_tokens] = positions
        arrays["slot_mapping"][:num_tokens] = (
            self._tables.rows[slots, positions // size] * size + positions % size
        )
        arrays["input_ids"][:num_tokens] = batch.input_ids
        arrays[FEED][:num_tokens] = batch.feed_slots

    def _start_readback(self, sampled: Sampled) -> LaunchedStep:
        logprobs = None
        if sampled.logprobs is not None:
            logprobs = tuple(self._to_host(tensor) for tensor in sampled.logprobs)
        done = None
        if self._on_gpu:
            done = torch.cuda.Event()
            done.record()
        return LaunchedStep(sampled.token_ids, logprobs, done)

    def _to_host(self, tensor: Tensor) -> Tensor:
        if not self._on_gpu:
            return tensor.clone()  # the next step overwrites the output of a graph
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)
