"""``PassRunner`` runs a draft model's passes behind a step of the target, on the device's state.

A step's rows have sampled tokens, of which ``accept_tokens`` knows the right ones.  The first pass
reads them in rows of the same order (``DraftPasses.fresh``), so their places follow from those of
the step; a row behind a wrong draft stores what the next pass overwrites.  The draft behind the
last right token is the first, and each further pass reads one draft a sequence and samples the
next.  All of them go into ``DraftState.drafts``, where the next step's rows find them.

The host waits for nothing here.  It has the blocks for the case that every draft is right.  All of
these passes are one CUDA graph for a number of sequences (``pass_sizes``), a number of drafts and a
form of drawing (``DraftSampler``).
"""

from __future__ import annotations

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
from .draft_sampler import DraftSampler
from .head_runner import DraftRunner
from .pass_sizes import Form, PassSizes
from .state import ALIGNED, DraftState

Choose = Callable[[Tensor], Tensor]
"""Logits -> the tokens that are chosen."""


class Size(NamedTuple):
    """Passes of equal sizes have the same launches."""

    rows: int
    num_seqs: int
    depth: int
    form: Form


class PassRunner:
    """Runs ``DraftPasses``.

    Args:
        runner: of the draft model.
        sampler: draws its tokens.
        drafting: the static inputs of a pass of a row a sequence.
        state: of the target, written.
        target: the static inputs of the target's last step.
        behind: positions between a token and its row: 1 of a head, else 0.
        sizes: numbers of sequences that have graphs.
    """

    def __init__(
        self,
        runner: DraftRunner,
        sampler: DraftSampler,
        drafting: StepBuffers,
        state: DraftState,
        target: StepBuffers,
        behind: int,
        sizes: PassSizes,
    ) -> None:
        self._sampler, self._sizes = sampler, sizes
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
        self._graphs: dict[Size, Callable[[], None]] = {}
        self._parameters: dict[Size, tuple[RowParameters, RowParameters]] = {}
        """The parameters that a graph reads, and those whose values they have."""

    def forget(self) -> None:
        """Drop all graphs, for when the program is bound to other tensors."""
        self._graphs.clear()
        self._parameters.clear()
        self._sizes.forget()

    @torch.inference_mode()
    def run(self, passes: DraftPasses) -> None:
        """Launch the passes of the target's last step."""
        if passes.reading is not None:
            self._runner.forward(passes.reading)
        fresh, drafting = passes.fresh, passes.drafting
        if fresh is None or drafting is None:
            return
        self._take_sampled()
        form = self._sampler.form(drafting)
        size = self._size_of(fresh.num_seqs, drafting.num_seqs, passes.depth, form)
        padded = drafting if size is None else _repeated(drafting, size.num_seqs)
        parameters = self._sampler.parameters(padded, form)
        rows = fresh.num_seqs if size is None else size.rows
        _write(self._runner, fresh, rows)
        _write(self._drafting, padded, padded.num_seqs)
        if size is None:
            self._launch(rows, padded.num_seqs, passes.depth, self._by(parameters))
        else:
            self._replay(size, self._static(size, parameters))

    def _size_of(self, num_rows: int, num_seqs: int, depth: int, form: Form) -> Size | None:
        """The graph that serves so many rows of the first pass, and sequences, if there is one."""
        if not self._runner.graphs.are_captured:
            return None
        # The step may have had more drafts a request than follow.
        num_seqs = self._sizes.choose(max(num_seqs, -(-num_rows // (depth + 1))), depth, form)
        buffers = self._runner.buffers
        rows = min(num_seqs * (depth + 1), buffers.max_seqs, buffers.max_tokens)
        return Size(rows, num_seqs, depth, form) if num_seqs else None

    def _by(self, parameters: RowParameters | None) -> Choose:
        buffers = self._drafting.buffers
        return partial(self._sampler.draw_drafts, parameters=parameters, buffers=buffers)

    def _replay(self, size: Size, parameters: RowParameters | None) -> None:
        """Replay the graph of a size, or launch what it holds and capture it."""
        if (replay := self._graphs.get(size)) is not None:
            replay()
            return
        choose = self._by(parameters)
        launch = partial(self._launch, size.rows, size.num_seqs, size.depth, choose)
        launch()  # the drafts of this step; libraries set up what a capture must not
        self._graphs[size] = self._runner.graphs.capture(launch)

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
            for field in fields(parameters):
                if (value := getattr(parameters, field.name)) is not None:
                    getattr(static, field.name).copy_(value)
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
