"""The frontend sends the core requests and aborts; the core sends ``StepOutputs`` back."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from ...config import UserError
from .cache_group import CacheGroup
from .draft_stats import DraftStats
from .sampling_params import SamplingParams
from .step import Ints, Logprobs


class AddRequest(Struct, frozen=True):
    """A checked request for ``n`` outputs of one prompt, or some of them; ``output_id`` has their
    ids.

    Attributes:
        max_total_tokens: prompt and output together end here.
        eos_token_ids: ids that end the output, unless ``ignore_eos``.
        priority: lower runs first, where the scheduler heeds it.
        cache_salt: it shares cached prefixes only with requests of the same salt.
        bad_word_ids: the tokens of each of these must not come one behind the other.
        outputs: the first index and the one behind the last of those that are asked for; None: all.
        call: requests of one call wait as one; "": it was asked for alone.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_total_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    cache_salt: str | None = None
    bad_word_ids: list[list[int]] = []
    outputs: tuple[int, int] | None = None
    call: str = ""

    @property
    def indices(self) -> range:
        """The indices of the outputs that it is for."""
        return range(*self.outputs) if self.outputs else range(self.sampling_params.n)


class RequestLimits(Struct, frozen=True):
    """What decides whether a request can ever run: a frontend in another process asks this instead
    of the core.

    Attributes:
        longest_chunk: most tokens of one request in a step.
        heed_priority: requests may have a priority.
        vocab_size: columns of the logits.
    """

    num_blocks: int
    block_size: int
    groups: list[CacheGroup]
    longest_chunk: int
    heed_priority: bool
    vocab_size: int = 1 << 31

    def check(self, request: AddRequest) -> None:
        """Raise ``UserError`` if the KV cache could never hold the request, it has a priority where
        requests run by arrival, or it names a token that the logits do not have: that would fail
        the step of all that run with it."""
        self.check_token_ids(request)
        if request.priority != 0 and not self.heed_priority:
            raise UserError(
                f"priority={request.priority}: requests run by arrival; start with "
                "scheduling_policy='priority'"
            )
        self.check_size(len(request.prompt_token_ids), request.max_total_tokens)

    def check_token_ids(self, request: AddRequest) -> None:
        """Raise ``UserError`` if what a request bans, prefers or ends with is no token of the
        model, or it asks for more log probabilities than there are tokens.  The prompt is checked
        where it is encoded."""
        params = request.sampling_params
        named = {
            "eos_token_ids": request.eos_token_ids,
            "stop_token_ids": params.stop_ids,
            "logit_bias": params.logit_bias or (),
            "allowed_token_ids": params.allowed_token_ids or (),
            "thinking_tokens": params.thinking_tokens and params.thinking_tokens.all_ids,
            "bad_words": [token_id for word in request.bad_word_ids for token_id in word],
        }
        for name, ids in named.items():
            if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
                wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
                raise UserError(
                    f"{name} has {wrong}: outside the vocabulary, 0..{self.vocab_size - 1}"
                )
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.vocab_size:
                raise UserError(
                    f"{name}={getattr(params, name)}: expected {self.vocab_size} at most, the size "
                    "of the vocabulary"
                )

    def check_size(self, num_prompt: int, max_total: int) -> None:
        """Raise ``UserError`` if the KV cache could never hold so many tokens of prompt and of
        prompt and output together."""
        # The last token is sampled but never computed, so it needs no room in the cache.
        chunk, size = self.longest_chunk, self.block_size
        needed = sum([group.most_blocks(max_total - 1, chunk, size) for group in self.groups])
        if needed > self.num_blocks:
            has_windows = any(group.window for group in self.groups)
            raise UserError(
                f"KV cache too small for one request: {num_prompt} prompt + "
                f"{max_total - num_prompt} output tokens need {needed} blocks of "
                f"{self.block_size}, it has {self.num_blocks}; lower max_tokens"
                f"{' or max_num_batched_tokens' if has_windows else ''} or "
                "enlarge the cache (kv_cache_memory_bytes, num_gpu_blocks_override)"
            )


class AbortRequests(Struct, frozen=True):
    """What to end at once: the ids of requests, whose outputs all end, or of outputs that have
    begun.  The core says nothing of them any more."""

    request_ids: list[str]


class NewTokens(Struct, frozen=True):
    """``request_ids[i]`` has got ``token_ids[i]``; ``logprobs`` if one of them wants them."""

    request_ids: list[str]
    token_ids: Ints
    logprobs: Logprobs | None = None


class Finished(Struct, frozen=True):
    """A request that the core has ended.

    Attributes:
        reason: "stop", "length" or "error".
        num_output_tokens: how many it has been given.
        stop_id: the one of ``stop_token_ids`` or of the end-of-sequence ids that ended it.
        error: what went wrong; None unless that is the reason.
        refused: what the request asks for is why it went wrong.
    """

    request_id: str
    reason: str
    num_output_tokens: int
    stop_id: int | None = None
    error: str | None = None
    refused: bool = False


class PromptLogprobs(Struct, frozen=True):
    """Log probabilities of tokens of a prompt, from the token at position ``start`` on.  After a
    preemption some may come again."""

    request_id: str
    start: int
    logprobs: Logprobs


class StepOutputs(Struct, frozen=True):
    """The outcome of a step of the core: tokens, unless none was waited for, the requests that
    ended, those that will be computed anew, log probabilities of prompts, and for requests that
    began behind a cached prefix, its tokens.  ``started`` has the time by ``time.monotonic()`` of
    those that began."""

    tokens: NewTokens | None
    finished: list[Finished]
    preempted: list[str]
    scored: list[PromptLogprobs] = []
    cached_tokens: dict[str, int] = {}
    started: dict[str, float] = {}

    @property
    def is_empty(self) -> bool:
        return self.tokens is None and not (
            self.finished or self.preempted or self.scored or self.cached_tokens or self.started
        )


class CoreStats(Struct, frozen=True):
    """The state of the scheduler and of its KV cache, and counts since the start.  ``num_held`` has
    the blocks of each group that requests hold, ``peak_held`` the most that they ever held.
    ``phase_s``, ``idle_s``, ``busy_s`` and ``read_bytes`` are of ``StepClock``, ``chunk_sizes`` and
    ``num_over_bound`` of ``StepPace``."""

    num_running: int
    num_waiting: int
    num_kv_blocks: int
    num_free_kv_blocks: int
    num_held: list[int]
    peak_held: list[int]
    num_preemptions: int
    prefix_caching: bool
    num_prefix_tokens: int
    num_prefix_hits: int
    phase_s: dict[str, float]
    idle_s: float
    busy_s: dict[str, float]
    read_bytes: dict[str, float]
    chunk_sizes: dict[int, int]
    num_over_bound: int
    drafts: DraftStats | None = None
    """None: nobody drafts."""


class Core(Protocol):
    """The calls that the frontend makes, on one thread at a time but for ``check_size``."""

    def check_size(self, request: AddRequest) -> None:
        """Raises ``UserError`` as ``RequestLimits.check`` does."""

    def add(self, request: AddRequest) -> None:
        """Queues a request; raises ``UserError`` if its id is in use."""

    def abort(self, request: AbortRequests) -> None:
        """Ends requests or outputs; ids that are unknown are ignored."""

    def step(self) -> StepOutputs:
        """Launches the next step and waits for the one before."""

    def stats(self) -> CoreStats: ...

    @property
    def num_unfinished(self) -> int: ...

    @property
    def is_busy(self) -> bool:
        """Whether requests run, or enough wait to fill a step."""

    def close(self) -> Exception:
        """Aborts all requests and releases the worker.  Returns the error that every later call
        raises."""
