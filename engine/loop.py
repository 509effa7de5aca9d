"""The engine loop: schedule, launch, and read the step before while this one runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..config import UserError
from .batch import Batch, PendingStep, Runner
from .inputs import InputProcessor, Prompt
from .output_processor import OutputProcessor
from .outputs import RequestOutput
from .request import Request, RequestStatus
from .sampling_params import SamplingParams
from .scheduler import NewToken, Scheduler


class EngineLoop:
    """Requests in, outputs out, one step a call; not thread-safe.

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
        self._in_flight: tuple[Batch, PendingStep] | None = None
        self._num_added = 0
        self.on_tokens: Callable[[list[NewToken]], None] | None = None
        """Told of the tokens of every step, as soon as the host knows them."""

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

        ``final_only``: one output when finished, none before; cheaper.  ``priority``: lower runs
        first, under ``scheduling_policy="priority"``.

        Raises:
            UserError: the prompt is bad, the id is in use, or the KV cache is too small for it.
        """
        params = params or SamplingParams()
        made_up = request_id is None
        while request_id is None or (made_up and request_id in self._outputs):
            request_id = f"request-{self._num_added}"
            self._num_added += 1
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
        if request_id in self._outputs or any(r.request_id in self.scheduler for r in requests):
            raise UserError(f"request_id {request_id!r} is in use: ids must be unique")
        for request in requests:
            self.scheduler.add(request)
        self._outputs.add(request_id, requests, final_only=final_only)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Launch the next step and return what the last one brought: outputs with new tokens.

        The list is empty while the first step is in flight.
        """
        batch = self.scheduler.schedule()
        launched = None if batch is None else (batch, self.runner.launch(batch))
        done = self._in_flight
        if self.async_scheduling:
            self._in_flight = launched
        else:
            done = launched
        if done is None:
            if launched is None and self.has_unfinished():
                raise RuntimeError(f"{self.scheduler.num_unfinished} requests, but none can run")
            return []
        return self._finish_step(*done)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Stop a request at once; returns what it has, or None when no such request is there."""
        if request_id not in self._outputs:
            return None
        for child in self._outputs.request_ids(request_id):
            self.scheduler.abort(child)
        return self._outputs.abort(request_id)

    def report(self) -> dict[str, Any]:
        """Facts and counters of this engine as plain data."""
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

    def _finish_step(self, batch: Batch, pending: PendingStep) -> list[RequestOutput]:
        tokens = self.scheduler.update(batch, pending.result())
        if self.on_tokens is not None:
            self.on_tokens(tokens)
        for token in tokens:
            stop = self._outputs.append(token)
            if stop is not None:
                self.scheduler.finish(token.request, RequestStatus.FINISHED_STOPPED, stop)
        return self._outputs.collect()
