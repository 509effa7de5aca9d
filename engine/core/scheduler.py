"""The scheduler decides which tokens of which requests the next step computes.

``schedule`` returns a step, and ``update`` takes the tokens that it sampled.  ``WaitingQueue`` says
which request starts next, and ``turns`` which running one is preempted.
"""

from __future__ import annotations

import time
from collections import OrderedDict

from msgspec import structs

from ...config import UserError
from ...config.step_fields import NOT_DRAFTED, REJECTED
from ..messages.requests import NewTokens, RequestLimits, StepOutputs
from ..messages.step import StepResult
from .batch import IN_PLACE, NO_DRAFT, ScheduledRequest, ScheduledStep, make_batch
from .chunks import StepLimits
from .drafts import Drafts
from .kv_blocks import BlockPool, SequenceBlocks
from .prefix_cache import cache_full_blocks, find_prefix
from .request import Request, RequestStatus
from .scoring import add_rows, bounded_end, scored_by
from .step_times import StepPace
from .turns import gives_way, in_order, last_running, share_of_a_call
from .waiting import WaitingQueue


class Scheduler:
    """Continuous batching under one token budget, with chunked prefill and preemption by recompute.

    Steps overlap: ``schedule`` may be called before ``update`` has seen the step before, and then
    counts the tokens in flight as if they were known.

    Args:
        pool: the KV blocks; the scheduler alone allocates from it.
        step_limits: the most that a step may have.
        prefix_caching: start behind the longest prefix whose blocks are still cached; never where
            a block holds the state of a whole sequence.
        heed_priority: order by priority before anything else.
        drafts: guesses tokens ahead; None: nobody does.
    """

    def __init__(
        self,
        pool: BlockPool,
        step_limits: StepLimits,
        *,
        prefix_caching: bool = False,
        heed_priority: bool = False,
        drafts: Drafts | None = None,
    ) -> None:
        self.pool, self.step_limits, self.drafts = pool, step_limits, drafts
        self.pace = StepPace(step_limits.max_step_s)
        self.prefix_caching = prefix_caching and not pool.has_states
        self.heed_priority = heed_priority
        self.limits = RequestLimits(
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            groups=list(pool.groups),
            longest_chunk=step_limits.longest_chunk,
            heed_priority=heed_priority,
        )
        """A request that breaks one of these limits is never queued."""
        self.running: OrderedDict[str, Request] = OrderedDict()
        self.waiting = WaitingQueue(heed_priority, share_of_a_call(step_limits.max_num_seqs))
        self._has_part = False  # the last step left a part of a prompt
        self._lacks_blocks = False  # the first that waits could not start in the last step
        self.num_prefix_tokens = self.num_prefix_hits = 0
        """Tokens that were looked for and found in the prefix cache."""
        self.num_preemptions = 0
        self._free_slots = list(range(step_limits.max_num_seqs - 1, -1, -1))
        self._uncached: list[Request] = []  # for ``cache_blocks``
        self._set_aside: list[Request] = []  # by ``_admit``, until ``schedule`` returns
        self._news = StepOutputs(None, [], [])
        self._free_rows = step_limits.most_rows

    def __contains__(self, request_id: object) -> bool:
        return request_id in self.running or request_id in self.waiting

    @property
    def num_unfinished(self) -> int:
        return len(self.running) + len(self.waiting)

    def add(self, request: Request) -> None:
        """Queue a request, for all outputs that it asks for.

        Raises:
            UserError: its id is in use, or the KV cache could never hold it.
        """
        if request.request_id in self:
            raise UserError(f"request_id {request.request_id!r} is in use: ids must be unique")
        self.limits.check_size(len(request.prompt_token_ids), request.max_total_tokens)
        self.waiting.add(request)

    def abort(self, name: str) -> None:
        """Finish an output that has begun, or all of a request, at once and free what they hold;
        an id that is unknown is ignored."""
        request = self.running.get(name)
        for each in self.waiting.find(name) if request is None else [request]:
            self.finish(each, RequestStatus.FINISHED_ABORTED)

    def abort_all(self) -> None:
        for name in [*self.running, *(each.request_id for each in self.waiting)]:
            self.abort(name)

    def finish(self, request: Request, status: RequestStatus) -> None:
        """Finish a request; tokens that it has in flight will be discarded."""
        if request.status is RequestStatus.RUNNING:
            self._release(request)
            self.waiting.leave(request)
        else:
            self.waiting.remove(request)
        self.waiting.close(request)
        request.status = status
        if self.drafts is not None:
            self.drafts.forget(request)
        if request.matcher is not None:
            request.matcher.close()
        if status is not RequestStatus.FINISHED_ABORTED:
            self._news.finished.append(request.finished())

    def take_outputs(self, tokens: NewTokens | None) -> StepOutputs:
        """Return the news since the last call, with the ``tokens`` of a finished step."""
        news, self._news = self._news, StepOutputs(None, [], [])
        return structs.replace(news, tokens=tokens)

    def schedule(self) -> ScheduledStep | None:
        """Choose the next step's work; None if nothing can run before a step in flight ends."""
        self.cache_blocks()
        if self.waiting.has_large and (self._lacks_blocks or not self._free_slots):
            for request in gives_way(self.running, self.waiting):
                self._preempt(request)
        self._lacks_blocks = False
        decodes: list[ScheduledRequest] = []
        prefills: list[ScheduledRequest] = []
        budget = room = self.step_limits.max_num_batched_tokens
        if self._has_part or (self.waiting.num_tokens and self._free_slots):
            room = self.step_limits.room(self.running.values(), self.waiting.num_tokens)
            room = self.pace.room(self.running.values(), room)
        preempted_before = self.num_preemptions
        self._free_rows = self.step_limits.most_rows - len(self.running)
        self._has_part = False
        if (drafts := self.drafts) is not None:
            drafts.begin(self.running.values(), self.limits.longest_chunk - 1, self.pool)
        order = in_order(self.running, self.waiting, self.heed_priority)
        for request in order:
            if budget == 0:
                break
            if request.status is not RequestStatus.RUNNING or self._fails(request):
                continue  # preempted just now
            num_tokens, ahead = request.num_tokens, request.num_drafts
            if num_tokens + ahead >= request.max_total_tokens or request.waits:
                continue  # its last token or its mask is to come
            start = request.num_computed_tokens
            end = start + 1
            if num_tokens - start > 1:
                end = self._chunk_end(request, start, num_tokens, min(budget, room))
                room -= end - start
                self._has_part |= end < num_tokens
                if end == start:
                    continue
            elif drafts is not None and drafts.holds(request, self.pool):
                continue
            if end + ahead > request.blocks.num_slots and not self._make_room(request, end, order):
                continue
            entry = self._take(request, end, num_tokens)
            budget -= entry.num_tokens
            self._free_rows -= add_rows(entry, decodes, prefills)
        # Admit nothing after a preemption: the preempted request would return, to be preempted.
        room = min(budget, room)
        while room > 0 and self.num_preemptions == preempted_before:
            admitted = self._admit(room)
            if admitted is None:
                break
            num_tokens = admitted.num_tokens
            end = self._chunk_end(admitted, admitted.num_computed_tokens, num_tokens, room)
            self._has_part |= end < num_tokens
            entry = self._take(admitted, end, num_tokens)
            room -= entry.num_tokens
            budget -= entry.num_tokens
            self._free_rows -= add_rows(entry, decodes, prefills)
        for request in self._set_aside:
            self.waiting.put(request)
        self._set_aside.clear()
        if not (entries := decodes + prefills):
            return None
        if drafts is None:
            return ScheduledStep(entries, make_batch(entries, self.limits.vocab_size))
        margin = len(self.running) * len(self.pool.groups)
        drafted = drafts.add(decodes, min(budget, self._free_rows), self.pool, margin)
        scheduled, passes = decodes + prefills, drafts.plan(entries, drafted, self.pool, margin)
        batch = make_batch(scheduled, self.limits.vocab_size, device_drafts=drafts.on_device)
        return ScheduledStep(scheduled, drafts.complete(batch, passes), drafted)

    def cache_blocks(self) -> None:
        """Let others find the blocks that a scheduled step fills.  Call it behind the launch; where
        others wait, who may find them in the same step, ``schedule`` has done it already."""
        for request in self._uncached:
            cache_full_blocks(self.pool, request)
        self._uncached.clear()

    def update(self, step: ScheduledStep, result: StepResult) -> NewTokens:
        """Apply the sampled tokens of a step and finish the requests that they end.

        Tokens of requests that finished while the step was in flight are dropped.  Tokens of
        preempted requests are kept, since they were sampled before the preemption.  A request whose
        logits give no token ends with an error.

        Raises:
            RuntimeError: the result does not have the tokens of every entry of the step.
        """
        scheduled = step.scheduled
        token_ids = result.token_ids.tolist()
        if (got := len(token_ids)) != len(scheduled):
            raise RuntimeError(f"step result has {got} tokens for {len(scheduled)} requests")
        self._news.scored.extend(scored_by(step, result))
        request_ids: list[str] = []
        rows: list[int] = []
        for each in step.drafted:
            each.arrive()
        for row, (entry, token_id) in enumerate(zip(scheduled, token_ids, strict=True)):
            if not entry.num_sampled:
                continue
            request = entry.request
            if entry.draft == NO_DRAFT:
                request.num_in_flight -= 1
            elif token_id in (REJECTED, NOT_DRAFTED):
                continue
            else:
                request.num_computed_tokens += request.status is RequestStatus.RUNNING
            if request.is_finished:
                continue
            if token_id < 0:
                # What it stored may be NaN, so none of its blocks, not even a shared one, is found.
                request.fail_without_token(token_id)
                self.finish(request, RequestStatus.FINISHED_ERROR)
                self.pool.forget(request.block_keys)
                continue
            request.output_token_ids.append(token_id)
            request_ids.append(request.request_id)
            rows.append(row)
            if self.prefix_caching:
                cache_full_blocks(self.pool, request)
            status = request.status_after_last_token()
            if status is not request.status:
                self.finish(request, status)
            elif request.matcher is not None and self.drafts is not None:
                self.drafts.ask(request)
        if self.drafts is not None:
            self.drafts.settle(step, result)
        if len(rows) == len(token_ids):
            return NewTokens(request_ids, result.token_ids, result.logprobs)
        logprobs = result.logprobs.of(rows) if result.logprobs else None
        return NewTokens(request_ids, result.token_ids[rows], logprobs)

    def drop(self, step: ScheduledStep) -> None:
        """Forget a step: none of its tokens will come."""
        for entry in step.scheduled:
            if entry.draft == NO_DRAFT:
                entry.request.num_in_flight -= entry.num_sampled
        if self.drafts is not None:
            self.drafts.drop(step.drafted)

    def fail(self, step: ScheduledStep, error: str) -> None:
        """Finish the requests of a step that failed; call it when no step is in flight.

        Keys and values that the step should have stored may be missing.  So no block is found by
        its content any more, and all other running requests, which may share blocks, are computed
        anew.
        """
        self._uncached.clear()
        self.drop(step)
        for entry in step.scheduled:
            if not entry.request.is_finished:
                entry.request.error = error
                self.finish(entry.request, RequestStatus.FINISHED_ERROR)
        for request in list(self.running.values()):
            self._preempt(request)
        self.pool.forget_all()

    def _fails(self, request: Request) -> bool:
        """Finish a request whose grammar has failed."""
        if request.matcher is None or not request.matcher.error:
            return False
        request.error, request.is_refused = request.matcher.error, True
        self.finish(request, RequestStatus.FINISHED_ERROR)
        return True

    def _chunk_end(self, request: Request, start: int, num_tokens: int, budget: int) -> int:
        """Where the chunk ends that begins at ``start`` of a request of ``num_tokens`` tokens."""
        end = min(num_tokens, start + min(budget, self.limits.longest_chunk))
        if request.is_scored:
            most_rows = 1 if self.pool.has_states else 1 + self._free_rows
            return bounded_end(request, start, end, most_rows)
        return end

    def _take(self, request: Request, end: int, num_tokens: int) -> ScheduledRequest:
        """Schedule the request's tokens up to ``end`` of ``num_tokens``; it has their blocks."""
        start = request.num_computed_tokens
        if self.drafts is not None and self.pool.has_windows:
            # ``_make_room`` comes late for blocks ahead of need.  No row will lie before ``start``.
            self.pool.free_behind(request.blocks, start)
        request.num_computed_tokens = end
        if self.prefix_caching and end >= (request.num_cached_blocks + 1) * self.pool.block_size:
            self._uncached.append(request)
            if self.waiting:
                self.cache_blocks()
        if end - start > 1 and self.pool.has_windows:
            request.blocks.num_slots = 0  # look again at the next step: much may be behind them
        num_sampled = int(end == num_tokens)
        request.num_in_flight += num_sampled
        ahead = request.num_drafts or IN_PLACE
        return ScheduledRequest(request, start, end - start, num_sampled, ahead=ahead)

    def _make_room(self, request: Request, end: int, order: list[Request]) -> bool:
        """Give a running request the blocks for its tokens up to ``end`` and drafts in flight, and
        take back those that are behind its windows now; False if it had to be preempted, as the
        last in ``order``, or waits: fewer may do when it is known which drafts are right."""
        pool, blocks, ahead = self.pool, request.blocks, request.num_drafts
        pool.free_behind(blocks, request.num_computed_tokens)
        missing = pool.num_missing(blocks, end + ahead, request.num_tokens + ahead)
        if self.drafts is not None and sum(missing) > pool.num_free:
            self.drafts.take_back(self.running.values(), pool)
            if ahead and sum(missing) > pool.num_free:
                return False
        while sum(missing) > pool.num_free:
            victim = last_running(order)
            if len(self.running) == 1:
                raise RuntimeError(
                    f"request {request.request_id!r} alone exceeds the KV cache of "
                    f"{pool.num_blocks} blocks: blocks were lost"
                )
            self._preempt(victim)
            if victim is request:
                return False
        pool.extend(blocks, missing)
        return True

    def _admit(self, budget: int) -> Request | None:
        """Start the first waiting request if a slot, the budget and the blocks allow it."""
        if not self._free_slots or self._free_rows < 1:
            return None
        while (request := self.waiting.first()) is not None and request.matcher is not None:
            if self._fails(request):
                continue
            if request.matcher.is_ready:
                break
            self.waiting.take(request)
            self._set_aside.append(request)
        # A preempted request is recomputed from the tokens that the CPU knows: wait for the rest.
        if request is None or request.num_in_flight > 0:
            return None
        pool, num_tokens = self.pool, request.num_tokens
        if not self.step_limits.enable_chunked_prefill and num_tokens > budget:
            return None
        # Cached blocks hold no logits, which a scored prompt needs.
        searched, alone = self.prefix_caching and not request.is_scored, len(self.waiting) == 1
        blocks = find_prefix(pool, request, alone) if searched else pool.find([])
        start, shared = len(blocks.tables[0]) * pool.block_size, blocks.held()
        needed = pool.most_blocks(num_tokens, self.limits.longest_chunk) - len(shared)
        # Leave each running request a block of each group, or the newcomer would soon be preempted.
        margin = len(self.running) * len(pool.groups)
        if needed + pool.num_idle(shared) + margin > pool.num_free:
            self._lacks_blocks = True
            return None
        self.waiting.take(request)
        pool.share(shared)
        end = self._chunk_end(request, start, num_tokens, budget)
        pool.extend(blocks, pool.num_missing(blocks, end, num_tokens))
        request.slot, request.blocks = self._free_slots.pop(), blocks
        request.num_cached_blocks = start // pool.block_size
        request.num_computed_tokens, request.placed_from = start, num_tokens
        is_first = request.status is RequestStatus.WAITING  # else it was preempted
        if is_first:
            self._news.started[request.request_id] = time.monotonic()
        if self.prefix_caching:
            self.num_prefix_tokens += num_tokens
            self.num_prefix_hits += start
            if start and is_first:
                self._news.cached_tokens[request.request_id] = start
        self._free_rows -= 1
        request.status = RequestStatus.RUNNING
        self.running[request.request_id] = request
        return request

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0
        self.num_preemptions += 1
        self._news.preempted.append(request.request_id)
        self.waiting.put(request)

    def _release(self, request: Request) -> None:
        del self.running[request.request_id]
        self.pool.free(request.blocks.held())
        request.blocks, request.num_cached_blocks = SequenceBlocks(), 0
        self._free_slots.append(request.slot)
        request.slot = -1
