"""The runner executes batches on the device.

``launch`` writes a batch's inputs into the static buffers, replays a graph or runs the program, and
samples from the logits.  It waits for nothing; ``LaunchedStep.result`` does, one step later.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...config import FEED, HIDDEN, TOKEN_IDS, slot_mapping_of
from ...config.step_fields import ORDER
from ...graph_capture import Dispatch, GraphKind, Graphs, StepBuffers
from ..messages.cache_group import CacheGroup
from ..messages.step import Batch, DraftPasses, Ints, Logprobs, StepResult
from .peers import RankGroup
from .sampler import Sampled, Sampler
from .sampling.op_table import OpTable


class BlockTables:
    """Every slot's KV block ids of each group on the host, [max_num_seqs, groups, max_blocks]."""

    def __init__(
        self, groups: Sequence[CacheGroup], block_size: int, max_num_seqs: int, max_blocks: int
    ) -> None:
        shape = (max_num_seqs, len(groups), max_blocks)
        self.rows: npt.NDArray[np.int32] = np.zeros(shape, np.int32)
        self.block_size = block_size
        self._groups = groups

    def update(self, batch: Batch) -> None:
        """Write the blocks that the batch's rows have gained."""
        for group, gained in enumerate(batch.block_tables):
            taken = 0
            rows, starts = gained.rows.tolist(), gained.starts.tolist()
            for row, start, count in zip(rows, starts, gained.counts.tolist(), strict=True):
                ids = gained.block_ids[taken : taken + count]
                self.rows[batch.slots[row], group, start : start + count] = ids
                taken += count

    def write_slots(self, arrays: dict[str, npt.NDArray[Any]], of: Ints, positions: Ints) -> None:
        """Write where each group stores the tokens at ``positions`` of the requests in the slots
        ``of``."""
        size = self.block_size
        index, offset = positions // size, positions % size
        for number, group in enumerate(self._groups):
            slots = self.rows[of, number, 0 if group.per_sequence else index]
            if not group.per_sequence:
                slots = slots * size + offset
            arrays[slot_mapping_of(number)][: len(slots)] = slots


@dataclass
class LaunchedStep:
    """A launched step.  Its results are in the host's memory once the event ``done`` has passed."""

    token_ids: Tensor
    logprobs: tuple[Tensor, ...] | None
    done: torch.cuda.Event | None
    has_drafts: Tensor | None = None

    @property
    def has_run(self) -> bool:
        """Whether the launch has run the step, as on a CPU."""
        return self.done is None

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()

    def result(self) -> StepResult:
        """Wait for the step; returns its tokens and, where asked for, their logprobs."""
        self.wait()
        token_ids = self.token_ids.numpy().copy()  # a later step writes there
        has_drafts = None if self.has_drafts is None else self.has_drafts.numpy().copy()
        if self.logprobs is None:
            return StepResult(token_ids, None, has_drafts)
        logprobs = Logprobs(*(tensor.numpy() for tensor in self.logprobs))
        return StepResult(token_ids, logprobs, has_drafts)


class ModelRunner:
    """Launches batches in order on the current stream.

    Args:
        graphs: those of the program, which is bound to weights and KV caches; a missing one is
            captured when a step needs it.
        sampler: turns logits into tokens.
        table: implementations of the ops that run outside of the program.
        block_size: tokens a KV block.
        groups: the layers' groups, each of which has a block table.
        repeats: padding of a decode repeats a sequence, so that it chooses no experts of its own.
        tables: the block tables, if another runner has them too; else it makes its own.
        ranks: the ranks that run the same batches.  Hidden states go from stage to stage, and the
            logits of the last to rank 0, which alone samples.  Its tokens go to the ranks that have
            the embedding on the device, where the next step of each reads them.
    """

    def __init__(
        self,
        graphs: Graphs,
        sampler: Sampler,
        table: OpTable,
        *,
        block_size: int,
        groups: Sequence[CacheGroup],
        repeats: bool = False,
        tables: BlockTables | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        self._ranks, self._repeats = ranks, repeats
        self.graphs, self.sampler, self.ops = graphs, sampler, table
        self.draft: Callable[[DraftPasses], None] | None = None
        """Runs passes of a draft model behind a step, where there is one."""
        self.buffers = buffers = graphs.buffers
        self.tables = tables or BlockTables(
            groups, block_size, buffers.max_seqs, buffers.max_blocks
        )
        self._on_gpu = sampler.last_tokens.device.type == "cuda"

    @property
    def num_groups(self) -> int:
        """Number of block tables of a sequence."""
        return int(self.tables.rows.shape[1])

    def with_graphs(self, graphs: Graphs) -> ModelRunner:
        """A runner of another program over the same buffers, block tables and sampled tokens: the
        two may take turns."""
        other = copy.copy(self)
        other.graphs = graphs
        return other

    def over(self, buffers: StepBuffers) -> Self:
        """A runner of the same program whose inputs lie elsewhere; it replays no graphs."""
        other = copy.copy(self)
        other.buffers = buffers
        return other

    @torch.inference_mode()
    def launch(self, batch: Batch) -> LaunchedStep:
        """Enqueue one step and return without waiting for the device."""
        logits = self.forward(batch)
        sampled = Sampled(self.sampler.last_tokens, None)
        if self._ranks is None or self._ranks.rank == 0:
            self.sampler.remember(batch.ended)
            for sequence in batch.new:  # while the device computes
                self.sampler.admit(sequence)
            sampled = self.sampler.sample(logits, batch, self.buffers)
        launched = self._start_readback(sampled)
        if self.draft is not None and batch.passes is not None:
            self.draft(batch.passes)
        if self._ranks is not None and self._ranks.stage == 0:
            self._ranks.broadcast(self.sampler.shared)
        return launched

    def forward(self, batch: Batch) -> Tensor:
        """Enqueue the program over a batch; returns the logits, as of ``run_stage``."""
        return self.run_stage(self.prepare(batch), batch)

    def prepare(self, batch: Batch) -> Dispatch:
        """Write a batch's inputs; returns what will run over them."""
        self.tables.update(batch)
        dispatch = self.graphs.dispatcher.choose(
            batch.num_tokens, batch.num_seqs, query_len=batch.query_len
        )
        self.graphs.ensure(dispatch)
        self.write_inputs(batch, dispatch)
        return dispatch

    def check(self) -> None:
        """Wait for the device; raises if it can run nothing any more."""
        if self._on_gpu:
            torch.cuda.synchronize()

    def run_stage(self, dispatch: Dispatch, batch: Batch) -> Tensor:
        """Run this rank's stage between what the one before gives and what the next one needs;
        returns the logits, a row a sequence, on rank 0.  Nothing of this is within a graph, and
        only the step's own rows are sent, so each stage may choose its graphs by itself."""
        ranks, num_seqs = self._ranks, batch.num_seqs
        if ranks is None:
            return self._run(dispatch, num_seqs)[:num_seqs]
        stage, last = ranks.stage, ranks.num_stages - 1
        if stage > 0:
            hidden = self.buffers.view(HIDDEN, dispatch.num_tokens)
            ranks.receive(hidden[: batch.num_tokens], stage - 1)
            if (repeated := self._repeated(dispatch, batch)) is not None:
                by_sequence = hidden.view(dispatch.num_seqs, dispatch.query_len, -1)
                by_sequence[num_seqs:] = by_sequence[repeated]
        output = self._run(dispatch, num_seqs)
        if stage < last:
            ranks.send(output[: batch.num_tokens], stage + 1)
            if ranks.rank == 0:
                output = output.new_empty((num_seqs, self.sampler.vocab_size))
                ranks.receive(output, last)
        elif stage > 0 and ranks.tp_rank == 0:
            ranks.send(output[:num_seqs], 0)
        return output[:num_seqs]

    def _run(self, dispatch: Dispatch, num_seqs: int) -> Tensor:
        """Run the program by its graph or without one; its result may have rows of padding."""
        padded = dispatch.num_tokens
        if dispatch.kind is GraphKind.FULL:
            return self.graphs.replay_full(padded, dispatch.num_seqs)
        views = self.buffers.views(num_tokens=padded, num_seqs=num_seqs)
        if dispatch.kind is GraphKind.PIECEWISE:
            return self.graphs.replay_piecewise(padded, views)
        return self.graphs.program.run(views)

    def write_inputs(self, batch: Batch, dispatch: Dispatch) -> None:
        """Write the static inputs, padded to the dispatched sizes.  Padding tokens are stored
        nowhere.  Padding sequences have no context and, except in uniform decode, no tokens; there
        they may repeat a sequence."""
        buffers, padded_seqs = self.buffers, dispatch.num_seqs
        host = buffers.next_host(num_tokens=dispatch.num_tokens, num_seqs=padded_seqs)
        arrays, num_seqs, num_tokens = host.arrays, batch.num_seqs, batch.num_tokens
        self._write_rows(arrays, batch)
        longest = arrays["seq_lens"][:num_seqs]
        if len(batch.ahead):
            longest = longest + np.maximum(batch.ahead, 0)
        num_blocks = -(-int(longest.max()) // self.tables.block_size)
        for field in buffers.schema.tokens:
            arrays[field.name][num_tokens:] = field.padding
        for field in buffers.schema.rows:
            arrays[field.name][num_seqs:] = field.padding
        padding = np.arange(padded_seqs - num_seqs + 1, dtype=np.int32) * dispatch.query_len
        arrays["query_start_loc"][num_seqs:] = num_tokens + padding
        shape = (padded_seqs, self.tables.rows.shape[1], num_blocks)
        tables = host.cells[: math.prod(shape)].reshape(shape)
        tables[:num_seqs] = self.tables.rows[batch.slots, :, :num_blocks]
        tables[num_seqs:] = 0
        if (repeated := self._repeated(dispatch, batch)) is not None:
            for name in (TOKEN_IDS, "positions", FEED):
                by_sequence = arrays[name].reshape(-1, dispatch.query_len)
                by_sequence[num_seqs:] = by_sequence[repeated]
            for name in ("seq_lens", "slots", ORDER):
                arrays[name][num_seqs:] = arrays[name][repeated]
            tables[num_seqs:] = tables[repeated]
        packed = host.filled(tables.size)
        self.ops("write_inputs", packed, self.sampler.last_tokens, *host.targets)
        if len(batch.ahead) and self.sampler.drafts is not None:
            # Graphs may have a row of padding more than there are tokens.
            num_rows, size = min(padded_seqs, buffers.max_tokens), self.tables.block_size
            self.sampler.drafts.place(buffers, num_rows, self.num_groups, size)

    def _repeated(self, dispatch: Dispatch, batch: Batch) -> int | None:
        """The sequence that padding of a decode repeats, if it is to choose no experts of its own:
        a step then reads the weights of no others.  Attention reads K and V of that sequence again,
        so it is the shortest."""
        if not (self._repeats and dispatch.query_len and batch.num_seqs < dispatch.num_seqs):
            return None
        return int((batch.starts + batch.query_lens).argmin())

    def _write_rows(self, arrays: dict[str, npt.NDArray[Any]], batch: Batch) -> None:
        """Write the inputs of rows and tokens, without padding."""
        num_seqs, num_tokens = batch.num_seqs, batch.num_tokens
        arrays["slots"][:num_seqs] = batch.slots
        if (order := self._order_of(batch)) is not None:
            arrays[ORDER][:num_seqs] = order
        seq_lens = np.add(batch.starts, batch.query_lens, out=arrays["seq_lens"][:num_seqs])
        arrays["query_start_loc"][0] = 0
        ends = np.cumsum(batch.query_lens, out=arrays["query_start_loc"][1 : num_seqs + 1])
        slots, positions = batch.slots, batch.starts
        if batch.query_len != 1:
            slots = np.repeat(slots, batch.query_lens)
            positions = np.repeat(seq_lens - ends, batch.query_lens)
            positions += np.arange(num_tokens, dtype=np.int32)
        arrays["positions"][:num_tokens] = positions
        self.tables.write_slots(arrays, slots, positions)
        arrays["input_ids"][:num_tokens] = batch.input_ids
        arrays[FEED][:num_tokens] = batch.feed_slots

    def _order_of(self, batch: Batch) -> Ints | None:
        """``config.ORDER`` of a batch's rows; None where nothing reads it."""
        drafts = self.sampler.drafts
        return None if drafts is None else drafts.order_of(batch)

    def _start_readback(self, sampled: Sampled) -> LaunchedStep:
        logprobs = None
        if sampled.logprobs is not None:
            logprobs = tuple(self._to_host(tensor) for tensor in sampled.logprobs)
        done = None
        if self._on_gpu:
            done = torch.cuda.Event()
            done.record()
        return LaunchedStep(sampled.token_ids, logprobs, done, sampled.has_drafts)

    def _to_host(self, tensor: Tensor) -> Tensor:
        if not self._on_gpu:
            return tensor.clone()  # the next step overwrites the output of a graph
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)
