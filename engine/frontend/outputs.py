"""Defines what a caller gets back, in vLLM's shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(slots=True)
class Logprob:
    """Natural-log probability of one token; ``rank`` 1 is the likeliest.

    ``decoded_token`` is its text behind other tokens, and ``token_bytes`` its own bytes, which may
    be a part of a character; None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None
    token_bytes: bytes | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of the ``n`` outputs of a request, everything generated so far.

    ``logprobs[i]`` maps token ids to the log probabilities of output token ``i``: the sampled token
    first, then the likeliest.  ``text_offsets[i]`` is where that token begins in ``text``; it is
    there with ``logprobs`` and a tokenizer.  ``finish_reason`` is "stop", "length", "abort",
    "error" or None (unfinished); ``stop_reason`` the stop string or the id that ended it, None for
    the tokenizer's own end-of-sequence id; ``error`` what went wrong, None unless that is the
    reason, and ``refused`` whether the request itself asked for what cannot be.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    refused: bool = False
    text_offsets: list[int] | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times on ``time.monotonic()``'s clock, in seconds; None until they happen."""

    arrival_s: float
    started_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A request and its outputs so far; ``finished`` when all of them are.

    ``prompt_logprobs[i]``, if they were asked for, maps token ids to the log probabilities of
    prompt token ``i``: the token itself first, then the likeliest; None for the first token.
    ``num_cached_tokens`` of the prompt were in the prefix cache when its first output began.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0

    @property
    def error(self) -> str | None:
        """The error that ended this request in a step; None unless one did."""
        return next((c.error for c in self.outputs if c.error is not None), None)


class Deltas:
    """Cuts the outputs of a request to what each has beyond the one before."""

    def __init__(self) -> None:
        self._before: dict[int, CompletionOutput] = {}

    def of(self, output: RequestOutput) -> RequestOutput:
        completions = [self._cut(each) for each in output.outputs]
        self._before = {each.index: each for each in output.outputs}
        return replace(output, outputs=completions)

    def _cut(self, now: CompletionOutput) -> CompletionOutput:
        before = self._before.get(now.index)
        if before is None:
            return now
        start, offsets = len(before.token_ids), now.text_offsets
        return replace(
            now,
            text=now.text[len(before.text) :],
            token_ids=now.token_ids[start:],
            logprobs=None if now.logprobs is None else now.logprobs[start:],
            text_offsets=None if offsets is None else offsets[start:],
        )
