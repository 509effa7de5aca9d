"""``Drafts`` guesses tokens ahead, so that one step brings several tokens of a request.

A decode with k drafts is k + 1 rows of one token each, which share a slot and read the keys that
the same step stores.  Row i has draft i as its input, and samples what follows it with the
request's own parameters, seed and position.  A draft is right if the row before sampled it; a row
behind a wrong one is dropped.  So outputs are those without drafts, greedy or sampled.

The device says which drafts are right.  It also makes the drafts of most requests, where the
drafter is one of the device: their next rows are scheduled while the step before is in flight, for
the case that all its drafts are right, and the device places them.  Others have drafts of the host,
and are scheduled again when their tokens are known.  All of these are in one step: while a step
with such drafts is in flight, the next one has only requests without.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
from msgspec import structs

from ...config.step_fields import NOT_DRAFTED
from ..messages.draft_stats import DraftStats
from ..messages.step import Batch, DraftPasses, EndedOutput, StepResult
from .batch import NO_DRAFT, ON_DEVICE, Drafted, ScheduledRequest, ScheduledStep
from .drafting.parts import make_room, parts_of
from .drafting.rows import room_of, rows_of, with_blocks
from .drafting.seams import Always, Drafter, Planner, Policy
from .kv_blocks import BlockPool
from .prefix_cache import salt_of
from .request import Request

_log = logging.getLogger(__name__)


def class_of(request: Request) -> str:
    """The class of requests whose drafts are right about as often."""
    if request.matcher is not None:
        return "grammar"
    name = "greedy" if request.sampling_params.greedy else "sampled"
    return f"{name}, found none" if request.lacks_drafts else name


NOTHING, NO_ROWS, NO_BLOCKS = "nothing proposed", "no room in the step", "no free KV blocks"
LAST_TOKEN = "one token to come"
_REASONS: dict[str, Callable[[Request], bool]] = {
    "thinking budget": lambda request: request.thinking is not None,
}
"""Why a request never has drafts.  An entry belongs here for whatever makes a row depend on the
tokens before it in a way that neither the host (``make_batch``) nor the sampler can tell."""


def why_none(request: Request) -> str:
    """Why a request never has drafts, or ""."""
    if request.why_no_drafts is None:
        request.why_no_drafts = next(
            (name for name, holds in _REASONS.items() if holds(request)), ""
        )
    return request.why_no_drafts


class Drafts:
    """The drafts of a scheduler's requests.

    Args:
        drafter: guesses them.
        most: most drafts of a request in a step.
        policy: chooses how many; None: always ``most``.
        vocab_size: columns of the logits; a draft beyond them is an error of the drafter.
        on_device: the worker drafts as the drafter does, for all requests but those whose tokens
            the host must know.
        is_replayed: the worker judges drafts by chance, for measurements.
        remembers: the worker looks for drafts in outputs of requests that have ended, too, each
            with so many last tokens of its prompt; 0: it does not.
        planner: the drafter, if the worker drafts in passes of a model.
    """

    def __init__(
        self,
        drafter: Drafter,
        most: int,
        policy: Policy | None = None,
        vocab_size: int = 1 << 31,
        *,
        on_device: bool = False,
        is_replayed: bool = False,
        remembers: int = 0,
        planner: Planner | None = None,
    ) -> None:
        self._drafter: Drafter | None = drafter
        self.on_device, self._is_replayed = on_device, is_replayed
        self.policy = policy or Always(most)
        self.most, self._vocab_size, self._method = most, vocab_size, drafter.method
        self._remembers, self._ended = remembers, list[EndedOutput]()
        self._planner, self._limit, self._reserved, self._has_passes = planner, 0, 0, False
        self._num_in_flight = 0  # steps with drafts of the host
        self._most_now, self._most_of = 0, dict[str, int]()
        self._num_steps = self._num_tokens = 0
        self._drafted, self._accepted = [0] * most, [0] * most
        self._without: Counter[str] = Counter()
        self._error = ""

    def begin(self, running: Collection[Request], limit: int, pool: BlockPool) -> None:
        """A step of ``running`` requests is about to be scheduled, in which one may have up to
        ``limit`` drafts."""
        self._most_now, self._most_of, self._limit = 0, {}, limit
        self._reserved = len(running) * len(pool.groups)  # blocks that are left to others
        if self._drafter is None:
            return
        counts = Counter(class_of(each) for each in running if not why_none(each))
        if counts:
            others = len(running) - counts.total()
            chosen = self.policy.choose(counts, others)
            self._most_of = {name: min(self.most, limit, k) for name, k in chosen.items()}
            self._most_now = max(self._most_of.values())

    def _most_for(self, request: Request) -> int:
        return self._most_of.get(class_of(request), 0)

    def holds(self, request: Request, pool: BlockPool) -> bool:
        """Whether a decode waits for the step in flight, so that it can have drafts behind it; not
        where blocks for them are lacking."""
        is_free = not (request.num_in_flight or self._num_in_flight)
        is_free |= self._is_followed(request)
        if is_free or not self._most_now or self._drafter is None or why_none(request):
            return False
        most = self._most_for(request)
        if not most or request.max_total_tokens - request.num_tokens < 2:
            return False
        planner = self._planner if self.on_device and not request.needs_host else None
        room = planner.needs(request, self._most_now) if planner else request.num_tokens + 1
        missing = sum(pool.num_missing(request.blocks, room, room))
        if missing and missing + self._reserved > pool.num_free:
            return False
        try:
            wants = self._drafter.wants(request)
        except Exception as error:
            self._switch_off(error)
            return False
        if not wants:
            self.policy.observe_drafts(class_of(request), most, 0, 0)
        self._reserved += missing * wants
        return wants

    def _most_of_device(self, request: Request) -> int:
        """Most drafts that the device may make behind a step; none if no step can try them."""
        none = request.max_total_tokens - request.num_tokens < 2 or request.needs_host
        return 0 if none or why_none(request) else self._most_for(request)

    def _is_followed(self, request: Request) -> bool:
        """Whether the device drafts for a request as its tokens come."""
        if not self.on_device or request.needs_host:
            return False
        return self._planner is None or self._planner.follows(request)

    def _num_made(self, request: Request) -> int:
        return self.most if self._planner is None else self._planner.num_made(request)

    def add(
        self, decodes: list[ScheduledRequest], room: int, pool: BlockPool, margin: int
    ) -> list[Drafted]:
        """Put rows of drafts behind the decodes of a step that can have some.

        Args:
            decodes: rows of one token; a row with drafts is followed by theirs.
            room: rows that the step has left.
            pool: gives blocks for drafts if it has more than ``margin`` besides; drafts take
                nobody's place.
        """
        if not self._most_now:
            return []
        entries = [(row, entry) for row, entry in enumerate(decodes) if self._may_draft(entry)]
        if self._drafter is not None and self._drafter.stores_drafts:
            for _, entry in entries:
                with_blocks(entry, min(self._most_now, room_of(entry.request)), pool, margin)
        proposals = self._propose([entry.request for _, entry in entries])
        wanting = sum(1 for proposal in proposals if proposal)
        drafted = []
        for (row, entry), proposal in zip(reversed(entries), reversed(proposals), strict=True):
            most = self._most_for(entry.request)
            if not proposal:
                self._without[NOTHING] += 1
                self.policy.observe_drafts(class_of(entry.request), most, 0, 0)
                continue
            # Everyone gets as many as the rows allow.
            count = min(len(proposal), -(-room // wanting))
            wanting -= 1
            if count == 0:
                self._without[NO_ROWS] += 1
                continue
            count = with_blocks(entry, count, pool, margin)
            if count == 0:
                self._without[NO_BLOCKS] += 1
                continue
            room -= count
            decodes[row + 1 : row + 1] = rows_of(entry, proposal[:count])
            request = entry.request
            request.num_drafts += count
            request.drafts_on_device = proposal[0] == ON_DEVICE
            name = class_of(request)
            drafted.append(Drafted(request, count, most, name, request.drafts_on_device))
        self._num_in_flight += _waits(drafted)
        return drafted

    def _may_draft(self, entry: ScheduledRequest) -> bool:
        request = entry.request
        if not entry.num_sampled:
            return False
        if self.on_device and not request.needs_host:
            if entry.start < request.placed_from:
                return False
            if not self._num_made(request):
                return False
        elif request.num_known_tokens != entry.start + 1:
            return False
        if not self._most_for(request) and not why_none(request):
            return False
        why = why_none(request)
        if not why and room_of(request) < 1:
            why = LAST_TOKEN
        if why:
            self._without[why] += 1
        return not why

    def _propose(self, requests: list[Request]) -> list[list[int]]:
        """Drafts for each request, no more than can be of use to it."""
        none: list[list[int]] = [[] for _ in requests]
        if self._drafter is None or not requests:
            return none
        try:
            ahead = [self.on_device and not each.needs_host for each in requests]
            free = [
                each
                for each, on_device in zip(requests, ahead, strict=True)
                if each.matcher is None and not on_device
            ]
            guesses = [*self._drafter.propose(free, self._most_now)] if free else []
            if len(guesses) != len(free):
                raise ValueError(f"{len(guesses)} proposals for {len(free)} requests")
            rest = iter(guesses)
            proposals = [
                [ON_DEVICE] * min(self._most_now, self._num_made(each))
                if on_device
                else [*(next(rest) if each.matcher is None else each.matcher.drafts)]
                for each, on_device in zip(requests, ahead, strict=True)
            ]
            for drafts, on_device in zip(proposals, ahead, strict=True):
                if (
                    drafts
                    and not on_device
                    and not 0 <= min(drafts) <= max(drafts) < self._vocab_size
                ):
                    raise ValueError(
                        f"drafts {drafts}: expected tokens of 0..{self._vocab_size - 1}"
                    )
        except Exception as error:
            self._switch_off(error)
            return none
        return [
            drafts[: min(self._most_for(request), room_of(request))]
            for drafts, request in zip(proposals, requests, strict=True)
        ]

    def plan(
        self,
        entries: Sequence[ScheduledRequest],
        drafted: Sequence[Drafted],
        pool: BlockPool,
        margin: int,
    ) -> DraftPasses | None:
        """The passes of a draft model behind a step; see ``parts_of`` and ``make_room``."""
        if self._planner is None:
            return None
        if not self._most_of:  # none of them ran before this step
            self.begin([entry.request for entry in entries], self._limit, pool)
        try:
            parts = parts_of(entries, drafted, self._most_of_device)
            make_room(parts, self._planner, self._most_now, pool, margin)
            return self._planner.plan(parts, self._most_now)
        except Exception as error:
            self._switch_off(error)
            return None

    def ask(self, request: Request) -> None:
        """Ask the grammar of a request, with its next mask, which drafts may come: those that it
        forces, or what is guessed, if that costs nothing."""
        most = self._most_for(request)
        if self._drafter is None or request.matcher is None or not most or why_none(request):
            return
        guess: Sequence[int] = ()
        try:
            if getattr(self._drafter, "is_quick", False):
                (guess,) = self._drafter.propose([request], most)
        except Exception as error:
            self._switch_off(error)
            return
        request.matcher.guess(guess, most)

    def settle(self, step: ScheduledStep, result: StepResult) -> None:
        """The tokens of a step are known, and applied to its requests."""
        drafted, token_ids = step.drafted, result.token_ids
        if self.on_device and result.has_drafts is not None:
            for entry, has_drafts in zip(step.scheduled, result.has_drafts.tolist(), strict=True):
                if entry.num_sampled and entry.draft == NO_DRAFT and not entry.request.needs_host:
                    entry.request.lacks_drafts = not has_drafts
        self._num_in_flight -= _waits(drafted)
        lacking = Counter(
            step.scheduled[row].request.request_id
            for row in np.flatnonzero(token_ids == NOT_DRAFTED).tolist()
        )
        for each in drafted:
            request, rows = each.request, each.num_drafts
            gained = request.num_known_tokens - each.num_known
            if gained == 0:
                continue  # it had ended before
            # Rows cost time whether or not the device had drafts for them.
            accepted, count = min(gained - 1, rows), rows - lacking[request.request_id]
            self.policy.observe_drafts(each.name, each.asked, rows, accepted)
            if not count:
                self._without[NOTHING] += 1
                continue
            self._num_steps += 1
            self._num_tokens += gained
            for position in range(count):
                self._drafted[position] += 1
                self._accepted[position] += position < accepted
            if self._drafter is not None:
                try:
                    self._drafter.settle(request, count, accepted)
                except Exception as error:
                    self._switch_off(error)

    def drop(self, drafted: list[Drafted]) -> None:
        """The tokens of a step will not come."""
        self._num_in_flight -= _waits(drafted)
        for each in drafted:
            each.request.num_drafts -= each.num_drafts

    def take_back(self, running: Iterable[Request], pool: BlockPool) -> None:
        """Free the blocks that running requests have for drafts, but for those in flight."""
        for request in running:
            most = max(request.num_tokens + request.num_drafts, request.num_computed_tokens)
            pool.shorten(request.blocks, most)

    def complete(self, batch: Batch, passes: DraftPasses | None) -> Batch:
        """A step's batch with the passes behind it, and with the outputs that have ended since the
        last one, if the worker remembers them."""
        ended, self._ended = self._ended, []
        return structs.replace(batch, passes=passes, ended=ended)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        if self._remembers and request.output_token_ids:
            tokens = request.prompt_token_ids[-self._remembers :] + request.output_token_ids
            self._ended.append(EndedOutput(salt_of(request.cache_salt), tokens))
        if self._drafter is not None:
            try:
                self._drafter.forget(request)
            except Exception as error:
                self._switch_off(error)

    def _switch_off(self, error: Exception) -> None:
        """No request has drafts any more."""
        self._drafter, self._planner, self._most_now = None, None, 0
        self._error = f"{type(error).__name__}: {error}"
        _log.error(
            "the drafter %s has failed and is switched off; requests go on without drafts: %s",
            self._method,
            self._error,
        )

    def observe_step(self, step: ScheduledStep, seconds: float, tokens: int) -> None:
        """A step took ``seconds``, from the end of the one before, and brought ``tokens``."""
        had_passes, self._has_passes = self._has_passes, step.batch.passes is not None
        if had_passes and not step.drafted:
            return  # its time has that of passes, whose drafts it does not try
        if self._drafter is not None and step.batch.query_len == 1:
            depth = max((each.asked for each in step.drafted), default=0)
            self.policy.observe_step(step.batch.num_seqs, depth, seconds, tokens)

    def stats(self) -> DraftStats:
        return DraftStats(
            policy=self.policy.report(),
            is_replayed=self._is_replayed,
            method=self._method,
            most=self.most,
            num_steps=self._num_steps,
            num_tokens=self._num_tokens,
            drafted=[*self._drafted],
            accepted=[*self._accepted],
            without=dict(self._without),
            error=self._error,
        )


def _waits(drafted: list[Drafted]) -> bool:
    """Whether a step has drafts whose acceptance the host must know."""
    return any(not each.on_device for each in drafted)
