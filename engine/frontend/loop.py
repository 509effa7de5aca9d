"""The engine loop is the frontend's part of a step: it checks prompts, drives the core, and turns
the tokens that come back into outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from time import monotonic, perf_counter
from typing import Any

from ...config import EngineDeadError, UserError
from ..messages.requests import AbortRequests, AddRequest, Core, NewTokens
from ..messages.sampling_params import RequestOutputKind, SamplingParams
from .engine_log import StatsLog
from .inputs import InputProcessor, Prompt
from .output_processor import OutputProcessor
from .outputs import RequestMetrics, RequestOutput


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A caller's request that may be queued."""

    request: AddRequest
    prompt: str | None
    final_only: bool

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_outputs(self) -> int:
        return self.request.sampling_params.n


_ANY_THREAD = nullcontext()


class EngineLoop:
    """Runs requests, one step a call.  One thread at a time may call it, see ``driver.py``.

    Args:
        core, inputs: the parts it drives.
        eos_token_ids: ids that end generation, see ``find_eos_token_ids``.
        shares_lists: see ``OutputProcessor``.
    """

    def __init__(
        self,
        *,
        core: Core,
        inputs: InputProcessor,
        eos_token_ids: frozenset[int],
        shares_lists: bool = False,
    ) -> None:
        self.core = core
        self.inputs = inputs
        self.eos_token_ids = eos_token_ids
        self._outputs = OutputProcessor(inputs.tokenizer, shares_lists)
        self._closed: Exception | None = None
        self._numbers = count()
        self.stepped_s = 0.0
        """The time at which the last step ended, by ``perf_counter``."""
        self.stats: StatsLog | None = StatsLog(core.stats, self._outputs)
        """Logs throughput and the use of the KV cache; None logs nothing."""
        self.driver: Callable[[], object] = lambda: None
        """The driver that callers share, see ``driver_of``; weak, since it holds the engine."""
        self.on_tokens: Callable[[NewTokens], None] | None = None
        """Called with the tokens of every step, as soon as the host knows them."""

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        **how: Any,
    ) -> str:
        """Queue a prompt; returns the request's id (made up when None).

        ``how``: ``final_only`` and ``priority``, as of ``check_request``.

        Raises:
            UserError: the prompt is bad, the id is in use, or the KV cache is too small for it.
        """
        checked = self.check_request(prompt, params, request_id, **how)
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
        call: str = "",
    ) -> CheckedRequest:
        """Check a prompt and encode it: the first half of ``add_request``, without the queueing.

        With ``final_only`` there is one output, when the request has finished, which is cheaper.
        A lower ``priority`` runs first, under ``scheduling_policy="priority"``.  Requests of the
        same ``call`` wait as one.

        Raises:
            UserError: the prompt is bad, the KV cache is too small for it, or it has a priority
                where requests run by arrival.
        """
        params = self.inputs.default_params() if params is None else params
        if not isinstance(params, SamplingParams):
            raise UserError(_not_params(params))
        params = self.inputs.settle(params)
        if request_id is not None and not isinstance(request_id, str):
            raise UserError(f"request_id={request_id!r}: expected text")
        is_int = isinstance(priority, int) and not isinstance(priority, bool)
        if not is_int or not -(2**63) <= priority < 2**63:
            raise UserError(f"priority={priority!r}: expected an integer of 64 bits")
        made_up = request_id is None
        while request_id is None or (made_up and request_id in self._outputs):
            request_id = f"request-{next(self._numbers)}"
        token_ids, text = self.inputs.prepare(prompt, params)
        salt, bad_word_ids = self.inputs.cache_salt(prompt), self.inputs.bad_word_ids(params)
        request = AddRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=params,
            max_total_tokens=self.inputs.max_total_tokens(len(token_ids), params),
            eos_token_ids=self.eos_token_ids,
            priority=priority,
            cache_salt=salt,
            bad_word_ids=bad_word_ids,
            call=call,
        )
        self.core.check_size(request)
        return CheckedRequest(request, text, final_only)

    def output_kind(self, params: SamplingParams | None) -> RequestOutputKind:
        """The kind of a stream's outputs, which the parameters of its request name."""
        params = self.inputs.default_params() if params is None else params
        return getattr(params, "output_kind", RequestOutputKind.CUMULATIVE)

    def queue(self, checked: CheckedRequest) -> None:
        """Queue a checked request: the second half of ``add_request``.

        Raises:
            UserError: the id is in use.
        """
        if self._outputs.clashes(checked.request_id, checked.num_outputs):
            raise UserError(f"request_id {checked.request_id!r} is in use: ids must be unique")
        metrics = RequestMetrics(arrival_s=monotonic())  # before another process can begin
        self.core.add(checked.request)
        self._outputs.add(checked.request, checked.prompt, metrics, final_only=checked.final_only)

    def step(self) -> list[RequestOutput]:
        """Launch the next step and return the outputs with new tokens that the last one brought.

        The list is empty while the first step is in flight.  When a step fails, its requests end
        with ``finish_reason`` "error", and the others are served on.

        Raises:
            EngineDeadError: the device is lost; every later call raises it too.
        """
        start = perf_counter()
        brought = self.core.step()
        try:
            if self.on_tokens is not None and brought.tokens is not None:
                self.on_tokens(brought.tokens)
        finally:
            if stopped := self._outputs.apply(brought):
                self.core.abort(AbortRequests(stopped))
        outputs = self._outputs.collect()
        self.stepped_s = perf_counter()
        if self.stats is not None:
            self.stats.add_step(self.stepped_s - start)
        return outputs

    def abort(self, request_id: str) -> RequestOutput | None:
        """Stop a request at once.  Returns its output so far, or None if the id is unknown."""
        if request_id not in self._outputs:
            return None
        self.core.abort(AbortRequests([request_id]))
        return self._outputs.abort(request_id)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Stop requests at once; nobody wants their outputs.  Ids that are unknown are ignored."""
        known = [each for each in request_ids if each in self._outputs]
        if known:
            self.core.abort(AbortRequests(known))
        for request_id in known:
            self._outputs.drop(request_id)

    def report(self) -> dict[str, Any]:
        """Return facts and counters of this engine as plain data."""
        stats = self.core.stats()
        return {
            "num_kv_blocks": stats.num_kv_blocks,
            "num_preemptions": stats.num_preemptions,
            "prefix_cache": {
                "enabled": stats.prefix_caching,
                "queried_tokens": stats.num_prefix_tokens,
                "hit_tokens": stats.num_prefix_hits,
            },
            "drafts": stats.drafts.report() if stats.drafts else None,
        }

    def has_unfinished(self) -> bool:
        return self.core.num_unfinished > 0

    def __contains__(self, request_id: object) -> bool:
        """Whether a caller's request is unfinished."""
        return request_id in self._outputs

    def on_device(self) -> AbstractContextManager[object]:
        """The context that a thread must be in while it steps."""
        return _ANY_THREAD

    def close(self) -> Exception:
        """Abort all requests and release the worker.  Returns the error that every later call
        raises.  An engine whose device is lost stays as it is."""
        error = self.core.close()
        if not isinstance(error, EngineDeadError):
            self._closed = error
            for request_id in self._outputs.open_ids():
                self._outputs.drop(request_id)
        return error

    def check_open(self, call: str) -> None:
        """Raise a ``UserError`` that names the call if the engine is closed."""
        if self._closed is not None:
            raise UserError(f"{call}: {self._closed}")


def _not_params(params: object) -> str:
    if isinstance(params, Mapping):
        return "sampling_params is a dict: expected SamplingParams; write SamplingParams(**params)"
    return f"sampling_params={params!r}: expected SamplingParams"
