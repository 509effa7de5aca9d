"""``PassRunner`` runs a draft model's passes behind a step of the target, on the device's state.

A step's rows have sampled tokens, of which ``accept_tokens`` knows the right ones.  The first pass
reads them in rows of the same order (``DraftPasses.fresh``), so their places follow from those of
the step; a row behind a wrong draft stores what the next pass overwrites.  The draft behind the
last right token is the first, and each further pass reads one draft a sequence and samples the
next.  All of them go into ``DraftState.drafts``, where the next step's rows find them.

The host waits for nothing here.  It has the blocks for the case that every draft is right.  All of
these passes are one CUDA graph for a number of sequences, unless a request asks for what depends
on the host.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from ....config import FED_SLOTS, NO_SLOT
from ....config.step_fields import ORDER, TOKEN_IDS
from ....graph_capture import Dispatch, GraphKind, StepBuffers
from ...messages.step import Batch, DraftPasses
from ..sampling.requests import RowParameters
from .head_runner import DraftRunner
from .state import ALIGNED, DraftState

_MOST_GRAPHS, _MOST_BYTES = 128, 1 << 28
"""Graphs of passes that are kept, those that were replayed last, and what they may take."""

Choose = Callable[[Tensor], Tensor]
"""Logits -> the tokens that are chosen."""


def most_graphs(bytes_a_graph: int) -> int:
    """Number of graphs that are kept of so many bytes each."""
    return max(1, min(_MOST_GRAPHS, _MOST_BYTES // max(bytes_a_graph, 1)))


class Size(NamedTuple):
    """Passes of equal sizes have the same launches."""

    rows: int
    num_seqs: int
    depth: int
    drawn_by: tuple[str, ...]
    """Parameters by which tokens are drawn; none: the likeliest are chosen."""


class PassRunner:
    """Runs ``DraftPasses``.

    Args:
        runner: of the draft model.
        drafting: the static inputs of a pass of a row a sequence.
        state: of the target, written.
        target: the static inputs of the target's last step.
        behind: positions between a token and its row: 1 of a head, else 0.
        most: graphs that are kept.
    """

    def __init__(
        self,
        runner: DraftRunner,
        drafting: StepBuffers,
        state: DraftState,
        target: StepBuffers,
        behind: int,
        most: int,
    ) -> None:
        self._most_graphs = most
        self._runner, self._state, self._target, self._behind = runner, state, target, behind
        self._drafting = runner.over(drafting)
        longest, self._count = state.drafts.shape
        # The last row and column take what nobody reads.
        like, width = state.memory.new_zeros, state.memory.shape[1]
        self._tokens = like((longest + 2, width + ALIGNED))
        self._places, self._lengths, self._rows = like((3, width + ALIGNED)).unbind(0)
        self._nowhere = (longest + 1, width)
        self._read = like(drafting.max_seqs)
        self._numbers = torch.arange(
            runner.buffers.max_seqs, dtype=torch.int32, device=state.memory.device
        )
        self._graphs: OrderedDict[Size, Callable[[], None]] = OrderedDict()
        self._parameters: dict[Size, tuple[RowParameters, RowParameters]] = {}
        """The parameters that a graph reads, and those whose values they have."""

    def forget(self) -> None:
        """Drop all graphs, for when the program is bound to other tensors."""
        self._graphs.clear()
        self._parameters.clear()

    @torch.inference_mode()
    def run(self, passes: DraftPasses) -> None:
        """Launch the passes of the target's last step."""
        if passes.reading is not None:
            self._runner.forward(passes.reading)
        fresh, drafting = passes.fresh, passes.drafting
        if fresh is None or drafting is None:
            return
        self._take_sampled()
        sampler, buffers = self._runner.sampler, self._drafting.buffers
        padded = self._padded(fresh, drafting, passes.depth)
        if padded is None:
            _write(self._runner, fresh, fresh.num_seqs)
            _write(self._drafting, drafting, drafting.num_seqs)
            choose: Choose = partial(sampler.choose, batch=drafting, buffers=buffers)
            self._launch(fresh.num_seqs, drafting.num_seqs, passes.depth, choose)
            return
        drafting, rows = padded
        _write(self._runner, fresh, rows)
        _write(self._drafting, drafting, drafting.num_seqs)
        _, parameters = sampler.common(drafting)
        size = Size(rows, drafting.num_seqs, passes.depth, _names(parameters))
        self._replay(size, self._static(size, parameters))

    def _padded(self, fresh: Batch, drafting: Batch, depth: int) -> tuple[Batch, int] | None:
        """A batch of as many sequences as a graph serves, and the rows that this has in the first
        pass; None where no graph serves it."""
        runner = self._runner
        if not runner.graphs.are_captured or not runner.sampler.common(drafting)[0]:
            return None
        sizes = runner.graphs.dispatcher.decode_sizes
        widest = min(self._drafting.buffers.max_seqs, self._drafting.buffers.max_tokens)
        fitting = (size for size in sizes if drafting.num_seqs <= size <= widest)
        if (num_seqs := next(fitting, None)) is None:
            return None
        most = min(runner.buffers.max_seqs, runner.buffers.max_tokens)
        rows = min(num_seqs * (depth + 1), most)
        if fresh.num_seqs > rows:  # the step had more drafts a request than follow
            return None
        return _repeated(drafting, num_seqs), rows

    def _replay(self, size: Size, parameters: RowParameters | None) -> None:
        """Replay the graph of a size, or launch what it holds and capture it."""
        if (replay := self._graphs.get(size)) is not None:
            self._graphs.move_to_end(size)
            replay()
            return
        sampler, buffers = self._runner.sampler, self._drafting.buffers

        def choose(logits: Tensor) -> Tensor:
            return sampler.draw(sampler.spread(logits), parameters, buffers)

        launch = partial(self._launch, size.rows, size.num_seqs, size.depth, choose)
        launch()  # the drafts of this step; libraries set up what a capture must not
        self._graphs[size] = self._runner.graphs.capture(launch)
        if len(self._graphs) > self._most_graphs:
            oldest, _ = self._graphs.popitem(last=False)
            self._parameters.pop(oldest, None)

    def _static(self, size: Size, parameters: RowParameters | None) -> RowParameters | None:
        """The parameters at the addresses that a graph reads."""
        if parameters is None:
            return None
        static, values = self._parameters.get(size, (None, None))
        if static is None:
            names = [field.name for field in fields(parameters)]
            tensors = {name: getattr(parameters, name) for name in names}
            copies = {name: t.clone() for name, t in tensors.items() if t is not None}
            static = replace(parameters, **copies)
        elif values is not parameters:
            for name in size.drawn_by:
                getattr(static, name).copy_(getattr(parameters, name))
        self._parameters[size] = static, parameters
        return static

    def _launch(self, num_rows: int, num_seqs: int, depth: int, choose: Choose) -> None:
        """Enqueue the passes over inputs that are written."""
        logits = self._read_sampled(num_rows)
        state, drafting = self._state, self._drafting
        order, slots = (drafting.buffers.view(name, num_seqs) for name in (ORDER, "slots"))
        logits = logits.index_select(0, self._rows.index_select(0, slots))
        for number in range(depth):
            # For the first draft a row's place is that of the token which it follows.
            self._place(drafting, order + (number - 1), self._lengths, state.drafts)
            if number:
                logits = drafting.compute(num_seqs, is_fed=True)
            drafts, read = state.drafts[number], self._read[:num_seqs]
            drafting.ops("keep_tokens", drafts, choose(logits), slots, read)

    def _take_sampled(self) -> None:
        """Keep by slot what the step's rows have sampled, and where the first of them stands."""
        state = self._state
        count = state.kept.shape[0]
        order, slots, lens = (
            self._target.view(name, count) for name in (ORDER, "slots", "seq_lens")
        )
        dump, nowhere = self._nowhere
        number = torch.where(order < 0, dump, order)
        self._tokens.index_put_((number, slots), state.kept)
        of = torch.where(order == 0, slots, nowhere)
        self._places.index_put_((of,), lens - self._behind)
        torch.sub(state.lengths, self._behind, out=self._lengths[: self._count])

    def _read_sampled(self, num_rows: int) -> Tensor:
        """The pass over what the step has sampled.  Only the row of a sequence's last token keeps a
        hidden state, and its number."""
        runner, buffers = self._runner, self._runner.buffers
        self._place(runner, buffers.view(ORDER, num_rows), self._places, self._tokens)
        slots, lens = (buffers.view(name, num_rows) for name in ("slots", "seq_lens"))
        is_last = lens == self._lengths.index_select(0, slots)
        of = torch.where(is_last, slots, self._nowhere[1])
        self._rows.index_put_((of,), self._numbers[:num_rows])
        if self._behind:
            fed = buffers.view(FED_SLOTS, num_rows)
            fed.copy_(torch.where(is_last, slots, NO_SLOT))
        return runner.compute(num_rows, is_fed=False)

    def _place(self, runner: DraftRunner, order: Tensor, lengths: Tensor, tokens: Tensor) -> None:
        """Write the inputs of rows by ``ops.place_rows``."""
        num_rows = order.shape[0]
        names = ("slots", TOKEN_IDS, "positions", "seq_lens")
        slots, *inputs = (runner.buffers.view(name, num_rows) for name in names)
        tables, mappings = runner.buffers.of_groups(runner.num_groups, num_rows)
        known = (lengths, tokens, slots, tables, runner.tables.block_size)
        runner.ops("place_rows", *known, order, *inputs, mappings)


def _write(runner: DraftRunner, batch: Batch, num_rows: int) -> None:
    runner.write_inputs(batch, Dispatch(GraphKind.NONE, num_rows, num_rows, 1))


def _names(parameters: RowParameters | None) -> tuple[str, ...]:
    if parameters is None:
        return ()
    names = (field.name for field in fields(parameters))
    return tuple(name for name in names if getattr(parameters, name) is not None)


def _repeated(batch: Batch, num_seqs: int) -> Batch:
    """A batch whose first row comes again until there are ``num_seqs``: that changes nothing, where
    padding would have a slot of another request."""
    if (more := num_seqs - batch.num_seqs) == 0:
        return batch
    names = ("slots", "starts", "query_lens", "num_sampled", "input_ids", "feed_slots", "ahead")
    arrays = {name: getattr(batch, name) for name in names}
    return structs.replace(
        batch, **{name: np.concatenate((a, a[:1].repeat(more))) for name, a in arrays.items()}
    )
