"""How many prompt tokens a step computes beside decodes.

A step that computes a part of a prompt is a longer gap between two tokens for every request that
decodes in it.  A step of few tokens takes the time in which the device reads the weights; from
some number of tokens on, its time grows with them.  So a step with as many tokens as take twice
the time of the weights, or with twice as many tokens as decodes, lasts about twice as long as its
decodes alone.  While much waits, chunks grow with it, since small ones would cost throughput, and
what fills a step has all of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .request import Request

_SHARE = 8
"""Beyond its limit, a step takes in this part of what waits at most."""


@dataclass(frozen=True)
class StepLimits:
    """The most that a step, and a request in it, may have.

    Args:
        max_num_seqs: most requests that run at the same time, and the number of slots.
        max_num_batched_tokens: most query tokens of one step.
        max_model_len: most prompt and output tokens of one request.
        enable_chunked_prefill: a prompt may be computed over several steps.
        long_prefill_token_threshold: most tokens of one prompt in a step, so that others get their
            share; 0: as many as fit.
        max_num_mixed_tokens: most tokens of a step with decodes, while few decode and few wait; 0:
            ``max_num_batched_tokens``.
        max_step_s: longest time of a step with decodes, in seconds, as far as prompts decide; 0: no
            bound.  See ``StepPace``.
        max_num_rows: most rows of a step, with those of drafts and of scored prompts, which are
            several of a request; 0: ``max_num_seqs``.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_num_mixed_tokens: int = 0
    max_step_s: float = 0.0
    max_num_rows: int = 0

    def __post_init__(self) -> None:
        numbers = self.max_num_seqs, self.max_num_batched_tokens, self.max_model_len
        if min(numbers) < 1:
            raise ValueError(f"sequences, tokens and length {numbers}: expected at least 1 each")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} < max_model_len="
                f"{self.max_model_len}: whole prompts would not fit a step"
            )

    @property
    def most_rows(self) -> int:
        """The most rows of a step."""
        return self.max_num_rows or self.max_num_seqs

    @property
    def longest_chunk(self) -> int:
        """The most tokens of one prompt in a step."""
        return min(self.max_num_batched_tokens, self.long_prefill_token_threshold or 1 << 60)

    def room(self, running: Iterable[Request], num_queued_tokens: int) -> int:
        """Most prompt tokens of the next step: all that it holds if nothing decodes in it, or if
        so many wait.  Counts alone decide, so that the same requests in the same steps are split
        alike.

        Args:
            running: requests that have been started.
            num_queued_tokens: prompt tokens of those that have not, in the prefix cache or not.
        """
        if not self.max_num_mixed_tokens:
            return self.max_num_batched_tokens
        num_decodes, num_waiting = 0, num_queued_tokens
        for request in running:
            num_tokens = request.num_tokens
            left = num_tokens - request.num_computed_tokens
            if left > 1:
                num_waiting += left
            elif num_tokens < request.max_total_tokens:  # else its last token is in flight
                num_decodes += left
        if num_decodes == 0 or num_waiting >= self.max_num_batched_tokens:
            return self.max_num_batched_tokens
        # The room for twice the decodes is as large as they are.
        limit = max(self.max_num_mixed_tokens - num_decodes, num_decodes)
        return max(limit, num_waiting // _SHARE)
