"""The engine loop runs requests in steps, on one thread at a time.

``add_request`` checks a prompt and queues it.  ``step`` schedules a batch and launches it; while it
runs, the result of the step before is read, and the outputs that it brought are returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import Any, TypeAlias

from ...config import EngineDeadError, UserError
from ..core.batch import Batch, PendingStep, Runner, StepResult
from ..core.request import Request, RequestStatus
from ..core.scheduler import NewToken, Scheduler
from ..messages.sampling_params import SamplingParams
from .inputs import InputProcessor, Prompt
from .output_processor import OutputProcessor
from .outputs import RequestOutput
from .stats import StatsLog


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A caller's request that may be queued; ``requests`` generate its ``n`` outputs."""

    request_id: str
    requests: list[Request]
    final_only: bool


_Launched: TypeAlias = tuple[Batch, PendingStep]
_Failed: TypeAlias = tuple[Batch, BaseException]
_ANY_THREAD = nullcontext()


class EngineLoop:
    """Runs requests, one step a call.  One thread at a time may call it, see ``driver.py``.

    Args:
        scheduler, runner, inputs: the parts it drives.
        eos_token_ids: ids that end generation, see ``find_eos_token_ids``.
        async_scheduling: keep one step in flight; its tokens are seen one call later.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: Runner,
        inputs: InputProcessor,
        eos_token_ids: frozenset[int],
        async_scheduling: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.inputs = inputs
        self.eos_token_ids = eos_token_ids
        self.async_scheduling = async_scheduling
        self._outputs = OutputProcessor(inputs.tokenizer)
        self._in_flight: list[_Launched] = []
        self._dead: Exception | None = None
        self._numbers = count()
        self.stepped_s = 0.0
        """The time at which the last step ended, by ``perf_counter``."""
        self.stats: StatsLog | None = StatsLog(scheduler, self._outputs)
        """Logs throughput and the use of the KV cache; None logs nothing."""
        self.driver: Callable[[], object] = lambda: None
        """The driver that callers share, see ``driver_of``; weak, since it holds the engine."""
        self.on_tokens: Callable[[list[NewToken]], None] | None = None
        """Called with the tokens of every step, as soon as the host knows them."""

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        final_only: bool = False,
        priority: int = 0,
    ) -> str:
        """Queue a prompt; returns the request's id (made up when None).

        With ``final_only`` there is one output, when the request has finished, which is cheaper.
        A lower ``priority`` runs first, under ``scheduling_policy="priority"``.

        Raises:
            UserError: the prompt is bad, the id is in use, or the KV cache is too small for it.
        """
        checked = self.check_request(
            prompt, params, request_id, final_only=final_only, priority=priority
        )
        self.queue(checked)
        return checked.request_id

    def check_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        final_only: bool = False,
        priority: int = 0,
    ) -> CheckedRequest:
        """Check a prompt and encode it: the first half of ``add_request``, without the queueing.

        Raises:
            UserError: the prompt is bad, the KV cache is too small for it, or it has a priority
                where requests run by arrival.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise UserError(_not_params(params))
        if request_id is not None and not isinstance(request_id, str):
            raise UserError(f"request_id={request_id!r}: expected text")
        self._check_priority(priority)
        made_up = request_id is None
        while request_id is None or (made_up and request_id in self._outputs):
            request_id = f"request-{next(self._numbers)}"
        token_ids, text = self.inputs.prepare(prompt, params)
        salt = self.inputs.cache_salt(prompt)
        requests = [
            Request(
                request_id=request_id if params.n == 1 else f"{request_id}#{index}",
                prompt_token_ids=token_ids,
                sampling_params=params if params.n == 1 else params.of_child(index),
                max_total_tokens=self.inputs.max_total_tokens(len(token_ids), params),
                eos_token_ids=self.eos_token_ids,
                prompt=text,
                priority=priority,
                cache_salt=salt,
            )
            for index in range(params.n)
        ]
        self.scheduler.check_size(requests[0])
        return CheckedRequest(request_id, requests, final_only)

    def _check_priority(self, priority: object) -> None:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise UserError(f"priority={priority!r}: expected an integer")
        if priority != 0 and not self.scheduler.heed_priority:
            raise UserError(
                f"priority={priority}: requests run by arrival; start with "
                "scheduling_policy='priority'"
            )

    def queue(self, checked: CheckedRequest) -> None:
        """Queue a checked request: the second half of ``add_request``.

        Raises:
            UserError: the id is in use.
        """
        if self._dead is not None:
            raise self._dead
        request_id, requests = checked.request_id, checked.requests
        if request_id in self._outputs or any(r.request_id in self.scheduler for r in requests):
            raise UserError(f"request_id {request_id!r} is in use: ids must be unique")
        for request in requests:
            self.scheduler.add(request)
        self._outputs.add(request_id, requests, final_only=checked.final_only)

    def step(self) -> list[RequestOutput]:
        """Launch the next step and return the outputs with new tokens that the last one brought.

        The list is empty while the first step is in flight.  When a step fails, its requests end
        with ``finish_reason`` "error", and the others are served on.

        Raises:
            EngineDeadError: the device is lost; every later call raises it too.
        """
        if self._dead is not None:
            raise self._dead
        start = perf_counter()
        # An interrupt during the last wait leaves two steps in flight: then launch no third.
        batch = self.scheduler.schedule() if len(self._in_flight) < 2 else None
        if batch is None and not self._in_flight and self.has_unfinished():
            raise RuntimeError(f"{self.scheduler.num_unfinished} requests, but none can run")
        failed: list[_Failed] = []
        if batch is not None:
            try:
                self._in_flight.append((batch, self.runner.launch(batch)))
            except Exception as error:
                failed.append((batch, error))
            except BaseException as interrupt:
                self._recover([(batch, interrupt)])
                raise
        ahead = int(self.async_scheduling and batch is not None and not failed)
        failed = self._read(ahead) + failed
        if failed:
            self._recover(failed)
        outputs = self._outputs.collect()
        self.stepped_s = perf_counter()
        if self.stats is not None:
            self.stats.add_step(self.stepped_s - start)
        return outputs

    def abort(self, request_id: str) -> RequestOutput | None:
        """Stop a request at once.  Returns its output so far, or None if the id is unknown."""
        if request_id not in self._outputs:
            return None
        for child in self._outputs.request_ids(request_id):
            self.scheduler.abort(child)
        return self._outputs.abort(request_id)

    def report(self) -> dict[str, Any]:
        """Return facts and counters of this engine as plain data."""
        return {
            "num_kv_blocks": self.scheduler.pool.num_blocks,
            "num_preemptions": self.scheduler.num_preemptions,
            "prefix_cache": {
                "enabled": self.scheduler.prefix_caching,
                "queried_tokens": self.scheduler.num_prefix_tokens,
                "hit_tokens": self.scheduler.num_prefix_hits,
            },
        }

    def has_unfinished(self) -> bool:
        return self.scheduler.num_unfinished > 0

    def __contains__(self, request_id: object) -> bool:
        """Whether a caller's request is unfinished."""
        return request_id in self._outputs

    def on_device(self) -> AbstractContextManager[object]:
        """The context that a thread must be in while it steps."""
        return _ANY_THREAD

    def close(self) -> Exception:
        """Abort all requests and release the runner.  Returns the error that every later call
        raises.  An engine whose device is lost stays as it is."""
        if isinstance(self._dead, EngineDeadError):
            return self._dead
        closed = UserError("the engine is closed, and serves no request any more; make a new LLM")
        if self._dead is None:
            with suppress(Exception):
                self.runner.check()
            self._in_flight.clear()
            for request_id in self._outputs.open_ids():
                self.abort(request_id)
            del self.runner
            self._dead = closed
        return self._dead

    def check_open(self, call: str) -> None:
        """Raise a ``UserError`` that names the call if the engine is closed."""
        if self._dead is not None and not isinstance(self._dead, EngineDeadError):
            raise UserError(f"{call}: {self._dead}")

    def _read(self, ahead: int) -> list[_Failed]:
        """Wait for all steps but the last ``ahead``, and accept them until one has failed.  A step
        stays in flight if an interrupt cuts the wait for it short."""
        while len(self._in_flight) > ahead:
            batch, pending = self._in_flight[0]
            try:
                result = pending.result()
            except Exception as error:
                del self._in_flight[0]
                return [(batch, error)]
            del self._in_flight[0]
            self._accept(batch, result)
        return []

    def _accept(self, batch: Batch, result: StepResult) -> None:
        tokens, failed = self.scheduler.update(batch, result)
        self._outputs.num_output_tokens += len(tokens)
        if failed:
            self._outputs.touch(failed)
        if self.on_tokens is not None:
            self.on_tokens(tokens)
        for token in tokens:
            stop = self._outputs.append(token)
            if stop is not None:
                self.scheduler.finish(token.request, RequestStatus.FINISHED_STOPPED, stop)

    def _recover(self, failed: list[_Failed]) -> None:
        """End the requests of failed steps.  A step in flight may have read what those failed to
        write, so it is dropped, and its other requests are computed anew."""
        try:
            self.runner.check()
        except Exception as lasting:
            first = _message(failed[0][1])
            self._dead = EngineDeadError(
                f"the device failed and runs nothing more: {first}; restart the engine"
            )
            raise self._dead from lasting
        for batch, _ in self._in_flight:
            self.scheduler.drop(batch)
        self._in_flight.clear()
        for batch, error in failed:
            self._outputs.touch(self.scheduler.fail(batch, _message(error)))


def _message(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _not_params(params: object) -> str:
    if isinstance(params, Mapping):
        return "sampling_params is a dict: expected SamplingParams; write SamplingParams(**params)"
    return f"sampling_params={params!r}: expected SamplingParams"
