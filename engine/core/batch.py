"""The seam between the scheduler and the runner.

The scheduler describes one step's work as a ``Batch``; the runner launches it, and a ``StepResult``
comes back with a token for each scheduled request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .request import Request


@dataclass(slots=True)
class ScheduledRequest:
    """The part of one request that one step computes.

    Positions ``start`` to ``start + num_tokens`` of the request are the query tokens.  Read
    ``request`` (slot, block ids, tokens) inside ``Runner.launch``: later it may have moved on.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    """The last query token is the request's last: the step samples one token after it."""

    @property
    def input_on_device(self) -> bool:
        """The (only) query token was sampled by the step in flight: only the device knows it."""
        return self.start >= self.request.num_known_tokens


@dataclass(slots=True)
class Batch:
    """One step.

    ``scheduled`` holds entries of one token first (decodes), then longer prefill chunks.
    ``finished_slots`` were released since the last batch; the runner drops their state **before**
    it reads ``scheduled``, which may use the same slots for other requests.  A request whose slot
    the runner does not hold is new there: it starts at 0, also after a preemption.
    """

    scheduled: list[ScheduledRequest]
    finished_slots: list[int]

    @property
    def num_seqs(self) -> int:
        return len(self.scheduled)

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.scheduled)

    @property
    def query_len(self) -> int:
        """Number of tokens of every request, if it is the same; else 0."""
        first = self.scheduled[0].num_tokens
        return first if all(entry.num_tokens == first for entry in self.scheduled) else 0


@dataclass(slots=True)
class TokenLogprobs:
    """Log probabilities of one sampled token and of the likeliest ones.

    ``rank`` counts from 1.  ``top`` has ``SamplingParams.logprobs`` pairs (token id, logprob), the
    likeliest first.
    """

    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(slots=True)
class StepResult:
    """One entry per scheduled request, in the batch's order; undefined where not ``samples``."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None


class PendingStep(Protocol):
    """A launched step."""

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
