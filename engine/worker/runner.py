"""The runner executes batches on the device.

``launch`` writes a batch's inputs into the static buffers, replays a graph or runs the program, and
samples from the logits.  It waits for nothing; ``LaunchedStep.result`` does, one step later.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...compiler.run.program import Program
from ...config import FEED, NO_SLOT, slot_mapping_of
from ...graph_capture import Dispatch, Dispatcher, GraphKind, Graphs, StepBuffers
from ..core.batch import Batch, ScheduledRequest, StepResult, TokenLogprobs
from ..core.kv_blocks import CacheGroup, SequenceBlocks
from .sampler import OpTable, Sampled, Sampler


class BlockTables:
    """Every slot's KV block ids of each group on the host, [max_num_seqs, groups, max_blocks],
    updated incrementally; ``filled`` counts those of each slot."""

    def __init__(
        self, groups: Sequence[CacheGroup], block_size: int, max_num_seqs: int, max_blocks: int
    ) -> None:
        shape = (max_num_seqs, len(groups), max_blocks)
        self.rows: npt.NDArray[np.int32] = np.zeros(shape, np.int32)
        self.filled = [0] * max_num_seqs
        self.block_size = block_size
        self._groups = groups
        self._filled = [[0] * len(groups) for _ in self.filled]

    def release(self, slot: int) -> None:
        self.filled[slot] = 0
        self._filled[slot] = [0] * len(self._groups)

    def update(self, slot: int, blocks: SequenceBlocks) -> bool:
        """Append the blocks that the slot's request has gained; returns whether it is new there."""
        new = self.filled[slot] == 0
        self.filled[slot] = blocks.num_entries
        for group, (table, filled) in enumerate(
            zip(blocks.tables, self._filled[slot], strict=True)
        ):
            self.rows[slot, group, filled : len(table)] = table[filled:]
            self._filled[slot][group] = len(table)
        return new

    def write_slots(
        self,
        arrays: dict[str, npt.NDArray[Any]],
        tokens: slice,
        of: npt.NDArray[np.int32] | int,
        positions: npt.NDArray[np.int32],
    ) -> None:
        """Write where each group stores ``tokens``, which stand at ``positions`` of the requests in
        the slots ``of``."""
        size = self.block_size
        index, offset = positions // size, positions % size
        for number, group in enumerate(self._groups):
            slots = self.rows[of, number, 0 if group.per_sequence else index]
            if not group.per_sequence:
                slots = slots * size + offset
            arrays[slot_mapping_of(number)][tokens] = slots


@dataclass
class LaunchedStep:
    """A launched step.  Its results are in the host's memory once the event ``done`` has passed;
    ``num_logprobs`` has the number of top logprobs that each row wants, or None."""

    num_logprobs: list[int | None]
    token_ids: Tensor
    logprobs: tuple[Tensor, ...] | None
    done: torch.cuda.Event | None

    def result(self) -> StepResult:
        """Wait for the step; returns its tokens and, where asked for, their logprobs."""
        if self.done is not None:
            self.done.synchronize()
        token_ids: list[int] = self.token_ids.tolist()
        if self.logprobs is None:
            return StepResult(token_ids)
        chosen, ranks, top, top_ids = (tensor.tolist() for tensor in self.logprobs)
        rows: list[TokenLogprobs | None] = []
        for row, count in enumerate(self.num_logprobs):
            if count is None:
                rows.append(None)
                continue
            best = list(zip(top_ids[row][:count], top[row][:count], strict=True))
            rows.append(TokenLogprobs(chosen[row], ranks[row], best))
        return StepResult(token_ids, rows)


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
        groups: the layers' groups, each of which has a block table.
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
        groups: Sequence[CacheGroup],
    ) -> None:
        self._program, self.graphs, self._dispatcher = program, graphs, dispatcher
        self._buffers, self._sampler, self._ops = buffers, sampler, table
        self._tables = BlockTables(groups, block_size, buffers.max_seqs, buffers.max_blocks)
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
        for slot in batch.finished_slots:
            self._tables.release(slot)
        num_tokens, num_seqs = batch.num_tokens, batch.num_seqs
        dispatch = self._dispatcher.choose(
            num_tokens,
            num_seqs,
            query_len=batch.query_len,
        )
        self.graphs.ensure(dispatch)
        self._write_inputs(batch, dispatch)
        logits = self._run(dispatch, num_seqs)
        slots, seq_lens = (self._buffers.view(name, num_seqs) for name in ("slots", "seq_lens"))
        return self._start_readback(batch, self._sampler.sample(logits, batch, slots, seq_lens))

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
        arrays, slots = host.arrays, self._update_tables(batch)
        num_seqs, num_tokens = len(slots), self._write_rows(arrays, batch.scheduled, slots)
        num_blocks = -(-int(arrays["seq_lens"][:num_seqs].max()) // self._tables.block_size)
        for field in buffers.schema.tokens:
            arrays[field.name][num_tokens:] = field.padding
        for field in buffers.schema.rows:
            arrays[field.name][num_seqs:] = field.padding
        padding = np.arange(padded_seqs - num_seqs + 1, dtype=np.int32) * dispatch.query_len
        arrays["query_start_loc"][num_seqs:] = num_tokens + padding
        shape = (padded_seqs, self._tables.rows.shape[1], num_blocks)
        tables = host.cells[: math.prod(shape)].reshape(shape)
        tables[:num_seqs] = self._tables.rows[arrays["slots"][:num_seqs], :, :num_blocks]
        tables[num_seqs:] = 0
        packed, *targets = buffers.targets(host, **sizes, columns=num_blocks)
        self._ops("write_inputs", packed, self._sampler.last_tokens, *targets)

    def _update_tables(self, batch: Batch) -> list[int]:
        """Set up the blocks and the sampling state of each row's request; returns the slots."""
        tables, slots = self._tables, []
        for entry in batch.scheduled:
            request = entry.request
            slot = request.slot
            slots.append(slot)
            if tables.filled[slot] != request.blocks.num_entries and tables.update(
                slot, request.blocks
            ):
                self._sampler.admit(request, slot)
        return slots

    def _write_rows(
        self,
        arrays: dict[str, npt.NDArray[Any]],
        scheduled: Sequence[ScheduledRequest],
        slots: list[int],
    ) -> int:
        """Write the inputs of rows and tokens, without padding; returns the number of tokens.
        Rows of one token are written together, since every step may have hundreds of them."""
        starts = np.array([entry.start for entry in scheduled], np.int32)
        counts = np.array([entry.num_tokens for entry in scheduled], np.int32)
        arrays["slots"][: len(slots)] = slots
        arrays["seq_lens"][: len(slots)] = starts + counts
        arrays["query_start_loc"][0] = 0
        ends = np.cumsum(counts, out=arrays["query_start_loc"][1 : len(slots) + 1])
        ones = int(np.searchsorted(counts > 1, True))  # they come first
        arrays[FEED][:ones] = [
            slot if entry.input_on_device else NO_SLOT
            for slot, entry in zip(slots[:ones], scheduled, strict=False)
        ]
        arrays["positions"][:ones] = starts[:ones]
        self._tables.write_slots(arrays, slice(ones), arrays["slots"][:ones], starts[:ones])
        arrays["input_ids"][:ones] = 0
        for row in np.flatnonzero(arrays[FEED][:ones] == NO_SLOT):
            entry = scheduled[row]
            arrays["input_ids"][row] = entry.request.tokens(entry.start, entry.start + 1)[0]
        for entry, slot, end in zip(
            scheduled[ones:], slots[ones:], ends[ones:].tolist(), strict=True
        ):
            tokens = slice(end - entry.num_tokens, end)
            positions = np.arange(entry.start, entry.start + entry.num_tokens, dtype=np.int32)
            last = entry.start + entry.num_tokens
            known = entry.request.tokens(entry.start, last)
            arrays[FEED][tokens] = NO_SLOT
            if len(known) < entry.num_tokens:  # the last one is sampled by the step in flight
                arrays[FEED][end - 1] = slot
                known = [*known, 0]
            arrays["input_ids"][tokens] = known
            arrays["positions"][tokens] = positions
            self._tables.write_slots(arrays, tokens, slot, positions)
        return int(ends[-1])

    def _start_readback(self, batch: Batch, sampled: Sampled) -> LaunchedStep:
        logprobs, wanted = None, []
        if sampled.logprobs is not None:
            logprobs = tuple(self._to_host(tensor) for tensor in sampled.logprobs)
            wanted = [
                entry.request.sampling_params.logprobs if entry.samples else None
                for entry in batch.scheduled
            ]
        done = None
        if self._on_gpu:
            done = torch.cuda.Event()
            done.record()
        return LaunchedStep(wanted, sampled.token_ids, logprobs, done)

    def _to_host(self, tensor: Tensor) -> Tensor:
        if not self._on_gpu:
            return tensor.clone()  # the next step overwrites the output of a graph
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)
