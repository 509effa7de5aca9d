"""The core sends a worker a ``Batch`` a step, and the worker sends a ``StepResult`` back.

Rows are the step's sequences.  The worker keeps what it was told of a slot (block tables, sampling
state) until the slot is released, so that a step brings only what has changed.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from .sampling_params import SamplingParams

Ints: TypeAlias = npt.NDArray[np.int32]
Floats: TypeAlias = npt.NDArray[np.float32]


class NewSequence(Struct, frozen=True):
    """A request that is new in its slot, also after a preemption: what sampling needs of it.

    ``arrival`` is its number among all outputs that have come.  ``stop_ids`` are banned before
    ``min_tokens``.  Token ids are there where penalties count them, or drafts are looked for there.
    ``salt`` is of outputs in which those may be found.
    """

    slot: int
    sampling_params: SamplingParams
    arrival: int
    num_prompt_tokens: int
    stop_ids: frozenset[int]
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    salt: int = 0


class EndedOutput(Struct, frozen=True):
    """The end of a prompt and the output behind it, in which drafts of other requests of the same
    salt may be found."""

    salt: int
    token_ids: list[int]


class BlockTableUpdate(Struct, frozen=True):
    """The blocks that the block tables of one group gain: ``counts[i]`` blocks from entry
    ``starts[i]`` of row ``rows[i]``'s table on, which may have had others there; ``block_ids`` has
    them one behind the other."""

    rows: Ints
    starts: Ints
    counts: Ints
    block_ids: Ints


NO_TARGET = -1
_NO_TARGETS: Ints = np.zeros(0, np.int32)


class Batch(Struct, frozen=True):
    """One step.

    Rows of one token come first (decodes), then longer prefill chunks.

    Attributes:
        slots: [num_seqs] the worker's row of each sequence, 0..max_num_seqs-1.
        starts: [num_seqs] position of the first query token.
        query_lens: [num_seqs] number of query tokens.
        num_sampled: [num_seqs] 1 if a token is sampled behind the last query token; 0 while a
            prompt is unfinished.
        input_ids: [num_tokens] token ids; 0 where ``feed_slots`` has one.
        feed_slots: [num_tokens] the slot whose sampled token, known to the device alone, is the
            input, else ``NO_SLOT``.
        block_tables: a change a group of KV caches.
        new: the requests that are new in their slots; what their slots held before is dropped.
        query_len: the number of tokens of every sequence, if it is the same; else 0.
        targets: [num_seqs] the token whose log probability behind the row is asked for, of a row
            that samples none, else ``NO_TARGET``; empty if there is no such row.  The tokens of a
            prompt whose log probabilities are asked for are rows of their own, in one slot.
        masked_rows: [num_masked] the rows where some tokens only may come, by a grammar or forced.
        masks: [num_masked, words] of them, a bit a token: whether it is permitted, also by
            ``bad_words`` and ``min_tokens``.
        banned: [num_banned, 2] other rows, and tokens that must not be sampled there.
        ahead: [num_seqs] of rows whose place and draft the device alone knows, the most positions
            by which they are behind ``starts``, as many as drafts are in flight; -1 in other rows;
            empty if there is no such row.
        ended: outputs that have ended since the step before, where drafts are looked for in them.
        passes: what a draft model does behind the step, on rank 0; None: nothing.
    """

    slots: Ints
    starts: Ints
    query_lens: Ints
    num_sampled: Ints
    input_ids: Ints
    feed_slots: Ints
    block_tables: list[BlockTableUpdate]
    new: list[NewSequence]
    query_len: int
    targets: Ints = _NO_TARGETS
    masked_rows: Ints = _NO_TARGETS
    masks: Ints = _NO_TARGETS
    banned: Ints = _NO_TARGETS
    ahead: Ints = _NO_TARGETS
    ended: list[EndedOutput] = []
    passes: DraftPasses | None = None

    @property
    def num_seqs(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


class DraftPasses(Struct, frozen=True):
    """The passes of a draft model behind a step, which wait for no token of it.

    Attributes:
        depth: drafts that each sequence of ``drafting`` gets.
        reading: tokens that are known to the host and that the model has not read; None: there are
            none.
        fresh: a row for each row of the step that samples, of sequences that are drafted for: it
            reads what that row has sampled.  The device places it, and knows whether it counts.
            None: there is no such sequence.
        drafting: a row a sequence, whose token is the draft before; the device places it.
    """

    depth: int
    reading: Batch | None = None
    fresh: Batch | None = None
    drafting: Batch | None = None


class Logprobs(Struct, frozen=True):
    """Log probabilities of sampled tokens and of the likeliest ones.

    Attributes:
        chosen, token_ranks: [num_tokens] of the sampled tokens; ranks by logit count from 1.
        top, top_ids: [num_tokens, most that a request wants] the likeliest, in order.
    """

    chosen: Floats
    token_ranks: Ints
    top: Floats
    top_ids: Ints

    def of(self, rows: list[int]) -> Logprobs:
        return Logprobs(
            self.chosen[rows], self.token_ranks[rows], self.top[rows], self.top_ids[rows]
        )


class StepResult(Struct, frozen=True):
    """The tokens that a step sampled.

    Attributes:
        token_ids: [num_seqs] the token of each row; undefined where its ``num_sampled`` is 0.  A
            negative id says why there is none: see ``ops.argmax``, and ``config.REJECTED`` for a
            row behind a wrong draft.
        logprobs: those of the same tokens and of ``Batch.targets``, if a request wants them.
        has_drafts: [num_seqs] whether the device has drafts behind the row's request, of the first
            of its rows that sample; None where it looks for none.
    """

    token_ids: Ints
    logprobs: Logprobs | None = None
    has_drafts: Ints | None = None


class PendingStep(Protocol):
    """A launched step."""

    @property
    def has_run(self) -> bool:
        """Whether its launch has run it, as on a CPU."""

    def result(self) -> StepResult:
        """Waits until the step has run; called once, in the order of the launches.  Raises what
        went wrong in it."""


class Runner(Protocol):
    """Runs batches in the order of their launches."""

    def launch(self, batch: Batch) -> PendingStep:
        """Enqueues one step and returns at once; everything the step needs is copied now.  May
        raise, with the finished slots dropped; the step has not happened then."""

    def check(self) -> None:
        """Waits for all launched steps; raises when the device can run nothing any more."""
