"""``EngineCore`` runs requests in steps: it schedules, launches, and applies what comes back.

While a step runs, the one before is waited for, so that the device always has work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import TypeAlias

from msgspec.structs import asdict, replace

from ...config import EngineDeadError, ResolvedConfig, UserError
from ..grammar.matchers import Grammars, Matcher
from ..messages.cache_group import CacheGroup
from ..messages.draft_run import DraftRun
from ..messages.requests import AbortRequests, AddRequest, CoreStats, StepOutputs
from ..messages.step import PendingStep, Runner
from ..messages.step_reads import StepReads
from .batch import ScheduledStep
from .chunks import StepLimits
from .drafts import Drafts
from .kv_blocks import BlockPool
from .preparing import Preparing
from .request import Request
from .scheduler import Scheduler
from .step_clock import StepClock

NO_READS = StepReads()
_LOOK_S = 0.002
"""Longest wait for a grammar while no step can run, in seconds; then whoever steps looks for new
requests."""
_Failed: TypeAlias = tuple[ScheduledStep, BaseException]


class EngineCore:
    """Runs requests, one step a call; see ``Core`` for what the frontend calls.

    Args:
        async_scheduling: keep one step in flight; its tokens are seen one call later.
        grammars: for requests with structured output.
        reads: the bytes that a step has to read.
        vocab_size: columns of the logits.
        now: the time in seconds, by which steps are timed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        async_scheduling: bool = True,
        grammars: Grammars | None = None,
        reads: StepReads = NO_READS,
        vocab_size: int = 1 << 31,
        now: Callable[[], float] = perf_counter,
    ) -> None:
        self.scheduler = scheduler
        scheduler.limits = self.limits = replace(scheduler.limits, vocab_size=vocab_size)
        """A request that breaks one of these limits is never queued."""
        self.runner = runner
        self._grammars = grammars
        self._preparing = Preparing()
        self._most_in_flight = 2 if async_scheduling else 1
        self._in_flight: list[tuple[ScheduledStep, PendingStep]] = []
        self._dead: Exception | None = None
        self.is_sleeping = False
        """No request is taken while weights or KV cache are not there."""
        self.reads = reads
        self._clock = StepClock(reads, now)

    def check_size(self, request: AddRequest) -> None:
        """Raise ``UserError`` if the request can never run here; any thread may ask."""
        self.limits.check(request)

    def add(self, request: AddRequest) -> None:
        """Queue a request, for all outputs that it asks for.

        Raises:
            UserError: its id is in use, the KV cache could never hold it, it has a grammar where
                there is no tokenizer, it names a token that the model does not have, or the core is
                closed or sleeps.
            EngineDeadError: the device is lost.
        """
        self._check_alive()
        if self.is_sleeping:
            raise UserError("the engine sleeps and takes no request: call wake_up() first")
        self.limits.check_token_ids(request)
        if request.request_id in self._preparing:
            raise UserError(f"request_id {request.request_id!r} is in use: ids must be unique")
        matcher = self._matcher(request.sampling_params.grammar)
        queued = Request(**asdict(request), matcher=matcher)
        if queued.waits and request.request_id not in self.scheduler:
            self.check_size(request)
            self._preparing.add(queued)
        else:
            self.scheduler.add(queued)

    def _matcher(self, grammar: str | None) -> Matcher | None:
        if grammar is None:
            return None
        if self._grammars is None:
            raise UserError("grammar: this engine has none; make it with a tokenizer")
        return self._grammars.matcher(grammar)

    def abort(self, request: AbortRequests) -> None:
        """End requests or outputs and free what they hold; unknown ids are ignored."""
        for name in request.request_ids:
            self._preparing.abort(name)
            self.scheduler.abort(name)
        self._note_in_flight()

    def step(self) -> StepOutputs:
        """Launch the next step, and apply the oldest in flight unless another may join it.

        When a step fails, its requests end with an error, and the others are served on.

        Raises:
            EngineDeadError: the device is lost; every later call raises it too.
        """
        self._check_alive()
        # An interrupt during the last wait has left all in flight that may be: then launch none.
        clock = self._clock
        clock.start()
        step = self._schedule() if len(self._in_flight) < self._most_in_flight else None
        clock.lap("schedule")
        if step is None and not self._in_flight and self.num_unfinished and not self._is_owed:
            raise RuntimeError(f"{self.num_unfinished} requests, but none can run")
        failed: list[_Failed] = []
        if step is not None:
            clock.in_flight(len(self._in_flight) + 1)
            clock.launching(step)
            try:
                pending = self.runner.launch(step.batch)
                self._in_flight.append((step, pending))
                clock.launched(step, pending.has_run)
                self.scheduler.cache_blocks()
            except Exception as error:
                failed.append((step, error))
            except BaseException as interrupt:
                with suppress(EngineDeadError):  # which the next call raises; this one was stopped
                    self._recover([(step, interrupt)])
                raise
        another_may_join = step is not None and len(self._in_flight) < self._most_in_flight
        tokens = None
        if self._in_flight and (failed or not another_may_join):
            # It stays in flight if an interrupt cuts the wait short.
            oldest, pending = self._in_flight[0]
            try:
                result = pending.result()
                clock.lap("wait")
                seconds, whole_seconds = clock.ended(oldest, self._kind(oldest))
                self.scheduler.pace.note(oldest, seconds)
            except Exception as error:
                del self._in_flight[0]
                failed.insert(0, (oldest, error))
            else:
                del self._in_flight[0]
                tokens = self.scheduler.update(oldest, result)
                if self.scheduler.drafts is not None and whole_seconds:
                    num_tokens = len(tokens.request_ids)
                    self.scheduler.drafts.observe_step(oldest, whole_seconds, num_tokens)
                if self._grammars is not None:
                    self._grammars.flush()
                clock.lap("update")
        if failed:
            self._recover(failed)
        self._note_in_flight()
        return self.scheduler.take_outputs(tokens)

    def _schedule(self) -> ScheduledStep | None:
        if self._grammars is None:
            return self.scheduler.schedule()
        while True:
            self._grammars.settle()
            for request in self._preparing.take_ready():
                self.scheduler.add(request)
            step = self.scheduler.schedule()
            can_wait = step is None and not self._in_flight and self._is_owed
            if not (can_wait and self._grammars.wait(_LOOK_S)):
                return step

    @property
    def _is_owed(self) -> bool:
        """Whether something of a grammar is to come."""
        return self._grammars is not None and self._grammars.process.is_owed

    def _note_in_flight(self) -> None:
        # A step whose requests have all ended is not waited for.
        unfinished = self.num_unfinished
        self._clock.in_flight(len(self._in_flight) if unfinished else 0)
        if not unfinished:
            self._clock.rest()

    def _kind(self, step: ScheduledStep) -> str:
        return "decode" if step.batch.query_len == 1 else "mixed"

    def rest(self) -> None:
        """Forget all cached prefixes and wait for the device, so that ``is_sleeping`` may be set.

        Raises:
            UserError: requests are unfinished.
        """
        self._check_alive()
        if self.num_unfinished:
            raise UserError(f"sleep: {self.num_unfinished} requests run; wait for them, or abort")
        self.runner.check()
        self.scheduler.pool.forget_all()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; what runs goes on.  Returns True."""
        self.scheduler.pool.forget_all()
        return True

    def stats(self) -> CoreStats:
        """Count what runs, waits and was found in the prefix cache."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        return CoreStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(self._preparing),
            num_kv_blocks=pool.num_blocks,
            num_free_kv_blocks=pool.num_free,
            num_held=[*pool.num_held],
            peak_held=[*pool.peak_held],
            num_preemptions=scheduler.num_preemptions,
            prefix_caching=scheduler.prefix_caching,
            num_prefix_tokens=scheduler.num_prefix_tokens,
            num_prefix_hits=scheduler.num_prefix_hits,
            drafts=scheduler.drafts.stats() if scheduler.drafts else None,
            phase_s=dict(self._clock.phase_s),
            idle_s=self._clock.idle_s,
            busy_s=dict(self._clock.busy_s),
            read_bytes=dict(self._clock.read_bytes),
            chunk_sizes=dict(sorted(scheduler.pace.sizes.items())),
            num_over_bound=scheduler.pace.num_over,
        )

    @property
    def num_unfinished(self) -> int:
        return self.scheduler.num_unfinished + len(self._preparing)

    @property
    def is_busy(self) -> bool:
        """Whether requests run, or enough wait to fill a step."""
        scheduler = self.scheduler
        return bool(scheduler.running) or self.num_unfinished >= scheduler.step_limits.max_num_seqs

    def close(self) -> Exception:
        """Abort all requests and release the runner.  Returns the error that every later call
        raises.  A core whose device is lost stays as it is."""
        if self._dead is None:
            with suppress(Exception):
                self.runner.check()
            self._in_flight.clear()
            self._preparing.clear()
            if self._grammars is not None:
                self._grammars.close()
            self.scheduler.abort_all()
            del self.runner
            self._dead = UserError(
                "the engine is closed, and serves no request any more; make a new LLM"
            )
        return self._dead

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._dead

    def _recover(self, failed: list[_Failed]) -> None:
        """End the requests of failed steps.  A step in flight may have read what those failed to
        write, so it is dropped, and its other requests are computed anew."""
        try:
            self.runner.check()
        except EngineDeadError as lost:  # says so itself
            self._dead = lost
            raise
        except Exception as lasting:
            first = _message(failed[0][1])
            self._dead = EngineDeadError(
                f"the device failed and runs nothing more: {first}; restart the engine"
            )
            raise self._dead from lasting
        for step, _ in self._in_flight:
            self.scheduler.drop(step)
        self._in_flight.clear()
        for step, error in failed:
            self.scheduler.fail(step, _message(error))


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def make_core(
    config: ResolvedConfig,
    num_blocks: int,
    groups: Sequence[CacheGroup],
    runner: Runner,
    grammars: Grammars | None = None,
    reads: StepReads = NO_READS,
    *,
    vocab_size: int,
    draft: DraftRun | None = None,
) -> EngineCore:
    """Make the core over ``num_blocks`` KV blocks, which ``groups`` of layers share; ``draft`` is
    the draft model, where there is one."""
    asked = config.scheduler
    limits = StepLimits(
        asked.max_num_seqs,
        asked.max_num_batched_tokens,
        config.model.max_model_len,
        asked.enable_chunked_prefill,
        asked.long_prefill_token_threshold,
        asked.max_num_mixed_tokens,
        asked.max_step_ms / 1e3,
        asked.max_num_rows,
    )
    pool = BlockPool(num_blocks, config.cache.block_size, groups)
    drafts: Drafts | None = None
    if asked.speculative is not None:
        from .drafters import make_drafts  # a start without drafts imports no drafter

        # Later stages of a pipeline are not told how many tokens a request has.
        on_device = config.parallel.pipeline_parallel_size == 1
        drafts = make_drafts(asked.speculative, pool, vocab_size, draft, on_device=on_device)
    scheduler = Scheduler(
        pool,
        limits,
        prefix_caching=asked.prefix_caching,
        heed_priority=asked.policy == "priority",
        drafts=drafts,
    )
    return EngineCore(
        scheduler,
        runner,
        async_scheduling=asked.async_scheduling,
        grammars=grammars,
        reads=reads,
        vocab_size=vocab_size,
    )
