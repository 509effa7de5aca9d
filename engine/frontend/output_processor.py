"""Turns new tokens into ``RequestOutput``s: text, stop strings, log probabilities, ``n`` outputs.

The loop passes what a step brought to ``apply`` and collects the outputs once a step.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from ..messages.open_outputs import OpenOutputs, output_id, request_and_index
from ..messages.requests import AddRequest, Finished, PromptLogprobs, StepOutputs
from ..messages.sampling_params import SamplingParams
from ..messages.step import Logprobs
from .detokenizer import Detokenizer
from .outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from .tokenizer import Tokenizer

_LogprobRows: TypeAlias = tuple[list[float], list[int], list[list[float]], list[list[int]]]


@dataclass(slots=True, eq=False)
class _Completion:
    """One output in the making; the core knows it as ``request_id``."""

    request_id: str
    index: int
    params: SamplingParams
    detokenizer: Detokenizer | None
    deferred: bool
    """Its text is decoded once, at the end: nobody reads it before, and no stop string ends it."""
    logprobs: list[dict[int, Logprob]] | None
    cumulative_logprob: float | None
    silent: bool
    """Its tokens need no work before its end, neither text nor log probabilities."""
    text_offsets: list[int] | None
    """Where the text of each token begins, if log probabilities are asked for."""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    refused: bool = False
    hidden: int = 0
    """Number of the token, from 1, that ended it and is left out of the text; 0: none."""
    closed: bool = False

    def snapshot(self, *, shared: bool) -> CompletionOutput:
        logprobs, offsets = self.logprobs, self.text_offsets
        return CompletionOutput(
            index=self.index,
            text="" if self.detokenizer is None else self.detokenizer.text,
            token_ids=self.token_ids if shared else list(self.token_ids),
            cumulative_logprob=self.cumulative_logprob,
            logprobs=logprobs if shared or logprobs is None else list(logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
            refused=self.refused,
            text_offsets=offsets if shared or offsets is None else list(offsets),
        )

    def finish(self, finished: Finished, eos_token_id: int | None) -> None:
        """Note why the core has ended the request; its last tokens may still be to come.

        Args:
            eos_token_id: the one of which ``stop_reason`` tells nothing, as in vLLM.
        """
        self.finish_reason, self.stop_reason = finished.reason, finished.stop_id
        if finished.stop_id == eos_token_id and not self.params.ignore_eos:
            self.stop_reason = None
        self.error, self.refused = finished.error, finished.refused
        if finished.reason == "stop" and not self.params.include_stop_str_in_output:
            self.hidden = finished.num_output_tokens

    def close(self) -> None:
        """Complete the text of a request that has finished."""
        self.closed = True
        if self.detokenizer is None:
            return
        ids = self.token_ids if self.deferred else []
        self.detokenizer.finish(ids[:-1] if self.hidden else ids)


@dataclass(slots=True, eq=False)
class _Group:
    """A caller's request: ``n`` outputs of one prompt.  Those that the core has not begun are not
    in ``completions``."""

    request: AddRequest
    prompt: str | None
    final_only: bool
    metrics: RequestMetrics
    num_open: int
    completions: dict[int, _Completion] = field(default_factory=dict)
    touched: dict[int, _Completion] = field(default_factory=dict)
    """Completions that the current step has changed, by index."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0


class OutputProcessor:
    """Follows the unfinished requests of callers; a group is known by the caller's id.

    Args:
        shares_lists: outputs hold the lists that grow, not copies of them, and before a request
            has finished only its completions that have changed: for a caller that looks at each
            output once, before the next step.
    """

    def __init__(self, tokenizer: Tokenizer | None, shares_lists: bool = False) -> None:
        self._tokenizer, self._shares_lists = tokenizer, shares_lists
        self._groups: dict[str, _Group] = {}
        self._open = OpenOutputs[_Group]()
        # The open outputs that have begun.
        self._begun: dict[str, tuple[_Group, _Completion]] = {}
        # The groups that the current step touched, in the order of the batch.
        self._touched: list[_Group] = []
        self.num_prompt_tokens = 0
        """Prompt tokens of all requests whose first token has come."""
        self.num_output_tokens = 0

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._groups

    def open_ids(self) -> list[str]:
        return list(self._groups)

    def clashes(self, request_id: str, n: int) -> bool:
        """Whether the id, or one of those of the ``n`` outputs, is in use."""
        return request_id in self._groups or self._open.clashes(request_id, n)

    def add(
        self, request: AddRequest, prompt: str | None, metrics: RequestMetrics, *, final_only: bool
    ) -> None:
        params, request_id = request.sampling_params, request.request_id
        group = _Group(request, prompt, final_only, metrics, num_open=params.n)
        if params.prompt_logprobs is not None:
            group.prompt_logprobs = [None] * len(request.prompt_token_ids)
        self._groups[request_id] = group
        self._open.add(request_id, group, params.n)
        if params.n == 1:
            self._begun[request_id] = group, self._completion(group, 0)

    def _completion(self, group: _Group, index: int) -> _Completion:
        """An output of a group, from its beginning on."""
        if (begun := group.completions.get(index)) is not None:
            return begun
        request, params = group.request, group.request.sampling_params
        detokenizer = None
        if self._tokenizer is not None and params.detokenize:
            detokenizer = Detokenizer(self._tokenizer, request.prompt_token_ids, params)
        with_logprobs = params.logprobs is not None
        deferred = group.final_only and not params.stop_strings and not with_logprobs
        completion = group.completions[index] = _Completion(
            request_id=output_id(request.request_id, index, params.n),
            index=index,
            params=params,
            detokenizer=detokenizer,
            deferred=deferred,
            logprobs=[] if with_logprobs else None,
            cumulative_logprob=0.0 if with_logprobs else None,
            silent=deferred,
            text_offsets=[] if with_logprobs and detokenizer is not None else None,
        )
        return completion

    def _find(self, name: str) -> tuple[_Group, _Completion] | None:
        """An open output and its group; the first that is heard of an output begins it."""
        begun = self._begun.get(name)
        if begun is None and (group := self._open.get(name)) is not None:
            read = request_and_index(name)
            if read is not None and read[0] == group.request.request_id:
                begun = self._begun[name] = group, self._completion(group, read[1])
        return begun

    def apply(self, brought: StepOutputs) -> list[str]:
        """Take what a step brought.  Returns the ids of the core's requests that a stop string
        ends; the caller then aborts them."""
        stopped: list[str] = []
        for request_id in brought.preempted:
            if (entry := self._find(request_id)) is not None:
                entry[0].metrics.num_preemptions += 1
        for request_id, num_cached in brought.cached_tokens.items():
            entry = self._find(request_id)
            if entry is not None and entry[1].index == 0:
                entry[0].num_cached_tokens = num_cached
        for request_id, started_s in brought.started.items():
            entry = self._find(request_id)
            if entry is not None and entry[0].metrics.started_s is None:
                entry[0].metrics.started_s = started_s
        for scored in brought.scored:
            if (entry := self._find(scored.request_id)) is not None:
                self._add_prompt_logprobs(entry[0], scored)
        for finished in brought.finished:
            if (entry := self._find(finished.request_id)) is not None:
                entry[1].finish(finished, self._usual_eos(entry[0].request))
                self._touch(*entry)
        if brought.tokens is None:
            return stopped
        now, begun = time.monotonic(), self._begun
        self.num_output_tokens += len(brought.tokens.request_ids)
        logprobs = _rows(brought.tokens.logprobs)
        for row, (request_id, token_id) in enumerate(
            zip(brought.tokens.request_ids, brought.tokens.token_ids.tolist(), strict=True)
        ):
            entry = begun.get(request_id) or self._find(request_id)
            if entry is None:
                continue
            group, completion = entry
            if completion.stop_reason.__class__ is str:
                continue  # a token before, of the same step, completed a stop string
            completion.token_ids.append(token_id)
            if group.metrics.first_token_s is None:
                group.metrics.first_token_s = now
                self.num_prompt_tokens += len(group.request.prompt_token_ids)
            if completion.silent:
                continue
            if not group.touched:  # as ``_touch``, which would cost a call a token
                self._touched.append(group)
            group.touched[completion.index] = completion
            if completion.logprobs is not None:
                self._append_logprobs(completion, token_id, logprobs, row)
            if self._stops(completion, token_id):
                stopped.append(request_id)
        return stopped

    def _usual_eos(self, request: AddRequest) -> int | None:
        """The tokenizer's own end-of-sequence id; without one, the model's if it has but one."""
        own = None if self._tokenizer is None else self._tokenizer.eos_token_id
        ids = request.eos_token_ids
        return next(iter(ids)) if own is None and len(ids) == 1 else own

    def _touch(self, group: _Group, completion: _Completion) -> None:
        if not group.touched:
            self._touched.append(group)
        group.touched[completion.index] = completion

    def _stops(self, completion: _Completion, token_id: int) -> bool:
        """Add a token to the text; returns whether it completes a stop string.  The token that
        reached ``max_tokens`` may do so too."""
        if completion.detokenizer is None or completion.deferred:
            return False
        if len(completion.token_ids) == completion.hidden:
            return False
        stop = completion.detokenizer.push(token_id)
        if stop is None:
            return False
        completion.finish_reason, completion.stop_reason = "stop", stop
        return True

    def collect(self) -> list[RequestOutput]:
        """Outputs of the requests that this step touched.  Call it after those that ended are
        finished."""
        outputs: list[RequestOutput] = []
        shared = self._shares_lists
        for group in self._touched:
            if not group.touched:
                continue  # aborted, behind a step that an interrupt cut short
            self._close_finished(group)
            if group.num_open == 0 or not group.final_only:
                changed = shared and group.num_open > 0
                every = group.touched.values() if changed else self._all(group)
                outputs.append(_output(group, every, shared))
            group.touched.clear()
        self._touched.clear()
        return outputs

    def _all(self, group: _Group) -> list[_Completion]:
        """All outputs of a group in order, begun or not."""
        n = group.request.sampling_params.n
        return [self._completion(group, index) for index in range(n)]

    def abort(self, request_id: str) -> RequestOutput:
        """Stop following a request that the core generates no more; returns its outputs."""
        group = self._groups[request_id]
        for completion in self._all(group):
            group.touched[completion.index] = completion
            completion.finish_reason = completion.finish_reason or "abort"
        self._close_finished(group)
        group.touched.clear()
        return _output(group, self._all(group), shared=False)

    def drop(self, request_id: str) -> None:
        """Stop following a request that the core generates no more."""
        group = self._groups.pop(request_id)
        group.touched.clear()
        self._open.close(request_id)
        for completion in group.completions.values():
            self._begun.pop(completion.request_id, None)

    def _close_finished(self, group: _Group) -> None:
        for completion in group.touched.values():
            if completion.closed or completion.finish_reason is None:
                continue
            completion.close()
            group.num_open -= 1
            self._open.close(completion.request_id)
            self._begun.pop(completion.request_id, None)
        if group.num_open == 0:
            group.metrics.finished_s = time.monotonic()
            del self._groups[group.request.request_id]

    def _append_logprobs(
        self, completion: _Completion, token_id: int, logprobs: _LogprobRows | None, row: int
    ) -> None:
        if logprobs is None or completion.logprobs is None or completion.cumulative_logprob is None:
            raise RuntimeError(f"request {completion.request_id!r}: no logprobs came back")
        count = completion.params.logprobs or 0
        completion.logprobs.append(self._entry(token_id, logprobs, row, count))
        completion.cumulative_logprob += logprobs[0][row]
        if completion.text_offsets is not None and completion.detokenizer is not None:
            completion.text_offsets.append(completion.detokenizer.num_characters)

    def _add_prompt_logprobs(self, group: _Group, scored: PromptLogprobs) -> None:
        logprobs, entries = _rows(scored.logprobs), group.prompt_logprobs
        if logprobs is None or entries is None:
            raise RuntimeError(f"request {scored.request_id!r}: logprobs came that nobody wants")
        count = group.request.sampling_params.prompt_logprobs or 0
        for row in range(len(logprobs[0])):
            position = scored.start + row
            token_id = group.request.prompt_token_ids[position]
            entries[position] = self._entry(token_id, logprobs, row, count)

    def _entry(
        self, token_id: int, logprobs: _LogprobRows, row: int, count: int
    ) -> dict[int, Logprob]:
        """The token's own log probability, then those of the ``count`` likeliest."""
        chosen, token_ranks, top, top_ids = logprobs
        entry = {token_id: self._logprob(token_id, chosen[row], token_ranks[row])}
        best = zip(top_ids[row][:count], top[row][:count], strict=True)
        for rank, (likely, logprob) in enumerate(best, start=1):
            if likely not in entry:
                entry[likely] = self._logprob(likely, logprob, rank)
        return entry

    def _logprob(self, token_id: int, logprob: float, rank: int) -> Logprob:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return Logprob(logprob, rank, None)
        return Logprob(
            logprob, rank, tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)
        )


def _output(group: _Group, completions: Iterable[_Completion], shared: bool) -> RequestOutput:
    return RequestOutput(
        request_id=group.request.request_id,
        prompt=group.prompt,
        prompt_token_ids=group.request.prompt_token_ids,
        outputs=[completion.snapshot(shared=shared) for completion in completions],
        finished=group.num_open == 0,
        metrics=group.metrics,
        prompt_logprobs=group.prompt_logprobs,
        num_cached_tokens=group.num_cached_tokens,
    )


def _rows(logprobs: Logprobs | None) -> _LogprobRows | None:
    if logprobs is None:
        return None
    return (
        logprobs.chosen.tolist(),
        logprobs.token_ranks.tolist(),
        logprobs.top.tolist(),
        logprobs.top_ids.tolist(),
    )
