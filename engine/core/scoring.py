"""Log probabilities of a prompt: each of its tokens but the last is a row of its own, so that the
model gives logits behind it.

The rows of one request follow each other and read the keys that the same step stores.  Its last
prompt token comes in a step behind them, since a slot keeps one sampled token a step.
"""

from __future__ import annotations

from itertools import groupby

from ..messages.requests import PromptLogprobs
from ..messages.step import NO_TARGET, StepResult
from .batch import ScheduledRequest, ScheduledStep
from .request import Request


def bounded_end(request: Request, start: int, end: int, most_rows: int) -> int:
    """Shorten a chunk ``start:end`` of a prompt whose log probabilities are asked for: scored and
    unscored tokens never share a chunk, and a chunk has at most ``most_rows`` unscored tokens."""
    if start < request.num_scored_tokens:
        return min(end, request.num_scored_tokens)
    last = len(request.prompt_token_ids) - 1
    return min(end, last, start + most_rows) if start < last else end


def rows_of(entry: ScheduledRequest) -> list[ScheduledRequest]:
    """The rows of a part of a request; one unless it is to be scored."""
    request, start, end = entry.request, entry.start, entry.start + entry.num_tokens
    if start < request.num_scored_tokens or end >= len(request.prompt_token_ids):
        return [entry]
    targets = request.prompt_token_ids[start + 1 : end + 1]
    return [
        ScheduledRequest(request, position, 1, 0, target)
        for position, target in enumerate(targets, start)
    ]


def add_rows(
    entry: ScheduledRequest, decodes: list[ScheduledRequest], prefills: list[ScheduledRequest]
) -> int:
    """Append a part of a request to the rows of its kind; returns how many it has beyond one."""
    if entry.request.is_scored:
        rows = rows_of(entry)
        if rows[0] is not entry:
            decodes += rows
            return len(rows) - 1
    (decodes if entry.num_tokens == 1 else prefills).append(entry)
    return 0


def scored_by(step: ScheduledStep, result: StepResult) -> list[PromptLogprobs]:
    """The log probabilities that a step brought, of requests that have not finished."""
    rows = [row for row, entry in enumerate(step.scheduled) if entry.target != NO_TARGET]
    scored = []
    for _, group in groupby(rows, lambda row: id(step.scheduled[row].request)):
        same = list(group)
        first, last = step.scheduled[same[0]], step.scheduled[same[-1]]
        request = first.request
        if request.is_finished or result.logprobs is None:
            continue
        request.num_scored_tokens = max(request.num_scored_tokens, last.start + 1)
        logprobs = result.logprobs.of(same)
        scored.append(PromptLogprobs(request.request_id, first.start + 1, logprobs))
    return scored
