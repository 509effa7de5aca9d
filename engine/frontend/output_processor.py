"""Turns new tokens into ``RequestOutput``s: text, stop strings, log probabilities, ``n`` outputs.

The loop passes every new token to ``append`` and collects the outputs once a step.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..core.request import Request
from ..core.scheduler import NewToken
from .detokenizer import Detokenizer
from .outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from .tokenizer import Tokenizer


@dataclass(slots=True, eq=False)
class _Completion:
    """One output in the making; ``request`` generates its tokens."""

    request: Request
    detokenizer: Detokenizer | None
    deferred: bool
    """Its text is decoded once, at the end: nobody reads it before, and no stop string ends it."""
    logprobs: list[dict[int, Logprob]] | None
    cumulative_logprob: float | None
    silent: bool
    """Its tokens need no work before its end, neither text nor log probabilities."""
    closed: bool = False

    def snapshot(self, index: int) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text="" if self.detokenizer is None else self.detokenizer.text,
            token_ids=list(self.request.output_token_ids),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=None if self.logprobs is None else list(self.logprobs),
            finish_reason=self.request.finish_reason,
            stop_reason=self.request.stop_reason,
            error=self.request.error,
        )

    def close(self) -> None:
        """Complete the text of a request that has finished."""
        self.closed = True
        if self.detokenizer is None:
            return
        ids = self.request.output_token_ids if self.deferred else []
        self.detokenizer.finish(ids[:-1] if _hides_last(self.request) else ids)


@dataclass(slots=True, eq=False)
class _Group:
    """A caller's request: ``n`` outputs of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    final_only: bool
    metrics: RequestMetrics
    completions: list[_Completion] = field(default_factory=list)
    num_open: int = 0

    def snapshot(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[c.snapshot(i) for i, c in enumerate(self.completions)],
            finished=self.num_open == 0,
            metrics=self.metrics,
        )


class OutputProcessor:
    """Follows the unfinished requests of callers; a group is known by the caller's id."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._groups: dict[str, _Group] = {}
        self._of_request: dict[str, tuple[_Group, _Completion]] = {}
        # The groups that the current step touched, in the order of the batch.
        self._touched: dict[str, _Group] = {}
        self.num_prompt_tokens = 0
        """Prompt tokens of all requests whose first token has come."""
        self.num_output_tokens = 0

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._groups

    def open_ids(self) -> list[str]:
        """Ids of all unfinished requests."""
        return list(self._groups)

    def add(self, request_id: str, requests: list[Request], *, final_only: bool) -> None:
        """Follow the requests that generate the outputs of ``request_id``."""
        first = requests[0]
        metrics = RequestMetrics(arrival_s=time.monotonic())
        group = _Group(request_id, first.prompt, first.prompt_token_ids, final_only, metrics)
        for request in requests:
            params = request.sampling_params
            detokenizer = None
            if self._tokenizer is not None:
                detokenizer = Detokenizer(self._tokenizer, request.prompt_token_ids, params)
            with_logprobs = params.logprobs is not None
            deferred = final_only and not params.stop_strings
            completion = _Completion(
                request=request,
                detokenizer=detokenizer,
                deferred=deferred,
                logprobs=[] if with_logprobs else None,
                cumulative_logprob=0.0 if with_logprobs else None,
                silent=deferred and not with_logprobs,
            )
            group.completions.append(completion)
            self._of_request[request.request_id] = (group, completion)
        group.num_open = len(requests)
        self._groups[request_id] = group

    def append(self, token: NewToken) -> str | None:
        """Take one new token.  Returns the stop string that it completes, if any; the caller then
        finishes the request."""
        group, completion = self._of_request[token.request.request_id]
        if group.metrics.first_token_s is None:
            group.metrics.first_token_s = time.monotonic()
            self.num_prompt_tokens += len(group.prompt_token_ids)
        if completion.silent and not token.request.is_finished:
            return None
        self._touched[group.request_id] = group
        if completion.logprobs is not None:
            self._append_logprobs(completion, token)
        if completion.detokenizer is None or completion.deferred:
            return None
        if _hides_last(token.request):
            return None
        return completion.detokenizer.push(token.token_id)

    def touch(self, requests: Iterable[Request]) -> None:
        """Have ``collect`` return an output of these requests, although no token came."""
        for request in requests:
            group, _ = self._of_request[request.request_id]
            self._touched[group.request_id] = group

    def collect(self) -> list[RequestOutput]:
        """Outputs of the requests that this step touched.  Call it after those that ended are
        finished."""
        outputs: list[RequestOutput] = []
        for group in self._touched.values():
            self._close_finished(group)
            if group.num_open == 0 or not group.final_only:
                outputs.append(group.snapshot())
        self._touched.clear()
        return outputs

    def request_ids(self, request_id: str) -> list[str]:
        """Ids of the scheduler's requests that generate a caller's request."""
        return [c.request.request_id for c in self._groups[request_id].completions]

    def abort(self, request_id: str) -> RequestOutput:
        """Stop following a request whose outputs are all finished or aborted; returns them."""
        group = self._groups[request_id]
        self._touched.pop(request_id, None)  # left by a step that an interrupt cut short
        self._close_finished(group)
        return group.snapshot()

    def _close_finished(self, group: _Group) -> None:
        for completion in group.completions:
            request = completion.request
            if completion.closed or not request.is_finished:
                continue
            completion.close()
            group.num_open -= 1
            group.metrics.num_preemptions += request.num_preemptions
            del self._of_request[request.request_id]
        if group.num_open == 0:
            group.metrics.finished_s = time.monotonic()
            del self._groups[group.request_id]

    def _append_logprobs(self, completion: _Completion, token: NewToken) -> None:
        logprobs = token.logprobs
        if logprobs is None or completion.logprobs is None or completion.cumulative_logprob is None:
            raise RuntimeError(f"request {token.request.request_id!r}: no logprobs came back")
        entry = {
            token.token_id: Logprob(logprobs.logprob, logprobs.rank, self._text(token.token_id))
        }
        for rank, (token_id, logprob) in enumerate(logprobs.top, start=1):
            entry.setdefault(token_id, Logprob(logprob, rank, self._text(token_id)))
        completion.logprobs.append(entry)
        completion.cumulative_logprob += logprobs.logprob

    def _text(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token_id)


def _hides_last(request: Request) -> bool:
    """Whether the last token is left out of the text: it ended the request and is not asked for."""
    return request.ended_by_token and not request.sampling_params.include_stop_str_in_output
