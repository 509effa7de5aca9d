"""``Request`` is what the scheduler knows about one request on its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from ..grammar.matchers import Matcher
from ..messages.open_outputs import output_id
from ..messages.requests import Finished
from ..messages.sampling_params import SamplingParams
from .kv_blocks import SequenceBlocks
from .thinking import Thinking


class RequestStatus(IntEnum):
    """Where a request is; everything from ``FINISHED_STOPPED`` on is final."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
}


_NOTHING_LEFT = -2
_WHY_NO_TOKEN = {
    -1: "logits are NaN or infinite at output token {}: check the weights (a damaged checkpoint "
    "has NaN) and dtype (float16 overflows where bfloat16 does not)",
    _NOTHING_LEFT: "all logits are -inf at output token {}: no token is left to choose from; lower "
    "min_tokens or ban fewer stop_token_ids or bad_words, else check the weights",
}
"""Error messages by what a sampling op gives in place of a token id, see ``ops.argmax``."""
_NOTHING_PERMITTED = (
    "no token is left at output token {}: bad_words forbid all that the grammar permits there; "
    "change one of them"
)


@dataclass(slots=True, eq=False)
class Request:
    """State of one request; the scheduler alone changes it.

    Token positions count prompt and output together.  ``num_computed_tokens`` advances when a step
    is scheduled, not when it ends, so up to ``num_in_flight`` sampled tokens are not yet in
    ``output_token_ids``: their values exist only on the device.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_total_tokens: int
    """Prompt and output together end here: by max_tokens or by max_model_len."""
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    """Lower runs first, where the scheduler heeds it."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    bad_word_ids: list[list[int]] = field(default_factory=list)
    """Sequences of token ids that must not appear in the output."""
    outputs: tuple[int, int] | None = None
    """The first index and the one behind the last of the outputs that are asked for; None: all.  A
    request for several waits in ``WaitingQueue``, which gives one of its own for each output."""
    call: str = ""
    """The call whose outputs share a place in the line; "": it was asked for alone."""
    siblings: Siblings | None = None
    """The outputs that this one was asked for with; None if it was asked for alone."""

    arrival: int = -1
    """Number of this output among all that have come; without a seed its noise depends on it."""
    place: int = -1
    """Place in the line of what waits; all of a call have one, which the queue knows."""
    slot: int = -1
    """The worker's row, 0..max_num_seqs-1, while RUNNING; otherwise -1."""
    blocks: SequenceBlocks = field(default_factory=SequenceBlocks)
    block_keys: list[bytes] = field(default_factory=list)
    """Keys of its full blocks, as far as they were needed; they stay valid when it is preempted."""
    num_cached_blocks: int = 0
    """Number of blocks of each table, from the first on, that others may find."""
    num_scored_tokens: int = 0
    """Number of leading prompt tokens whose log probabilities have been computed."""
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    num_drafts: int = 0
    """Drafts that the steps in flight try; none of them counts as a token in flight."""
    drafts_on_device: bool = False
    """Whether the device makes its drafts, and places its next rows behind those that are right."""
    lacks_drafts: bool = False
    """Whether the device had none for it when it was last seen: then it seldom has some now."""
    placed_from: int = 0
    """Position from which on the device follows it in its slot: the number of its tokens when it
    was given that."""
    why_no_drafts: str | None = None
    """Why it never has drafts, or ""; None: see ``drafts.why_none``."""
    status: RequestStatus = RequestStatus.WAITING
    stop_id: int | None = None
    """The stop id that ended the request; None for end-of-sequence."""
    matcher: Matcher | None = None
    """Its state within its grammar, which says what may come next; None without one."""
    thinking: Thinking | None = field(init=False, default=None)
    """Follows its thinking; None without a budget."""
    needs_last_token: bool = field(init=False)
    """Whether the next step needs its last token: for a grammar, or for bad words of several."""
    error: str | None = None
    """Why the request failed; None unless it did."""
    is_refused: bool = False
    """Whether it failed because of what it asks for, and not because of the engine."""

    def __post_init__(self) -> None:
        words = self.bad_word_ids
        several = bool(words) and any(len(word) > 1 for word in words)
        self.needs_last_token = several or self.matcher is not None
        budget, tokens = (
            self.sampling_params.thinking_token_budget,
            self.sampling_params.thinking_tokens,
        )
        if budget is not None and tokens is not None:
            self.thinking = Thinking(tokens, budget)

    @property
    def num_known_tokens(self) -> int:
        """Number of tokens whose values the CPU has: prompt and outputs."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Number of known and in-flight tokens."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + self.num_in_flight

    @property
    def is_scored(self) -> bool:
        """Whether the log probabilities of its prompt are asked for and have not all come."""
        wanted = self.sampling_params.prompt_logprobs is not None
        return wanted and self.num_scored_tokens < len(self.prompt_token_ids) - 1

    @property
    def waits(self) -> bool:
        """Whether its next token cannot be sampled yet: how many of its drafts are right or the
        last token is not known to whom must know it, or its mask is not made."""
        if self.thinking is not None and self.thinking.waits(
            len(self.output_token_ids), self.num_in_flight
        ):
            return True
        if self.num_drafts and not self.drafts_on_device:
            return True
        return self.needs_last_token and (
            self.num_in_flight > 0 or not (self.matcher is None or self.matcher.is_ready)
        )

    @property
    def needs_host(self) -> bool:
        """Whether the host must know its tokens before it decides what may be sampled next."""
        return self.needs_last_token or self.thinking is not None

    @property
    def is_finished(self) -> bool:
        return self.status >= RequestStatus.FINISHED_STOPPED

    @property
    def finish_reason(self) -> str:
        return _FINISH_REASONS[self.status]

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end the request; a sampler must not choose them before ``min_tokens``."""
        eos = frozenset() if self.sampling_params.ignore_eos else self.eos_token_ids
        return eos.union(self.sampling_params.stop_ids)

    def tokens(self, start: int, end: int) -> list[int]:
        """Known token ids at positions ``start`` to ``end``; fewer when the last is in flight."""
        num_prompt = len(self.prompt_token_ids)
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        head = self.prompt_token_ids[start:end]
        return head + self.output_token_ids[: end - num_prompt] if end > num_prompt else head

    def banned_ids(self, drafts: Sequence[int] = ()) -> list[int]:
        """Tokens that would complete a bad word behind the output so far and ``drafts``."""
        output = [*self.output_token_ids, *drafts] if drafts else self.output_token_ids
        return [
            word[-1]
            for word in self.bad_word_ids
            if len(word) == 1 or output[1 - len(word) :] == word[:-1]
        ]

    def forced_id(self) -> int | None:
        """The token that is forced as the last of those in flight, or None."""
        if self.thinking is None:
            return None
        index = len(self.output_token_ids) + self.num_in_flight - 1
        return self.thinking.forced(self.output_token_ids, index)

    def fail_without_token(self, code: int) -> None:
        """Note why the logits gave no token: ``code``, see ``ops.argmax``."""
        why, params = _WHY_NO_TOKEN[code], self.sampling_params
        if code == _NOTHING_LEFT:
            self.is_refused = bool(self.matcher or self.bad_word_ids or params.min_tokens)
            why = _NOTHING_PERMITTED if self.matcher and self.bad_word_ids else why
        self.error = why.format(len(self.output_token_ids) + 1)

    def finished(self) -> Finished:
        return Finished(
            request_id=self.request_id,
            reason=self.finish_reason,
            num_output_tokens=len(self.output_token_ids),
            stop_id=self.stop_id,
            error=self.error,
            refused=self.is_refused,
        )

    def status_after_last_token(self) -> RequestStatus:
        """The status that the newest output token leads to.  Also sets ``stop_id``, and asks for
        the mask of the next token if there is one to come."""
        params = self.sampling_params
        token_id = self.output_token_ids[-1]
        # Nothing can follow the end of a grammar, whatever else is asked.
        is_eos = token_id in self.eos_token_ids
        ends = (is_eos and not params.ignore_eos) or token_id in params.stop_ids
        if (is_eos and self.matcher is not None) or (
            ends and len(self.output_token_ids) >= params.min_tokens
        ):
            self.stop_id = token_id
            return RequestStatus.FINISHED_STOPPED
        if self.num_known_tokens >= self.max_total_tokens:
            return RequestStatus.FINISHED_LENGTH
        if self.matcher is not None:
            self.matcher.take(token_id)
        if self.thinking is not None:
            self.thinking.take(self.output_token_ids)
        return self.status


@dataclass(slots=True, eq=False)
class Siblings:
    """The outputs of a request for several.  They begin in order; each is a request of its own."""

    request: Request
    next_index: int
    end: int
    """The last index plus one."""
    open: dict[str, Request] = field(default_factory=dict)
    """Outputs that have begun and have not ended, by id."""
    _params: SamplingParams | None = None

    @classmethod
    def of(cls, request: Request) -> Siblings:
        """All outputs that a request asks for."""
        first, end = request.outputs or (0, request.sampling_params.n)
        return cls(request, first, end)

    @property
    def num_left(self) -> int:
        return self.end - self.next_index

    def begin(self) -> Request:
        whole, index = self.request, self.next_index
        request = Request(
            request_id=output_id(whole.request_id, index, whole.sampling_params.n),
            prompt_token_ids=whole.prompt_token_ids,
            sampling_params=self._params_of(index),
            max_total_tokens=whole.max_total_tokens,
            eos_token_ids=whole.eos_token_ids,
            priority=whole.priority,
            cache_salt=whole.cache_salt,
            bad_word_ids=whole.bad_word_ids,
            call=whole.call,
            siblings=self,
            arrival=whole.arrival,
            matcher=None if whole.matcher is None else whole.matcher.copy(),
        )
        self.next_index += 1
        whole.arrival += 1
        self.open[request.request_id] = request
        return request

    def _params_of(self, index: int) -> SamplingParams:
        """Without a seed, all but those of the first output are equal."""
        params = self.request.sampling_params
        if index == 0 or params.seed is not None:
            return params.of_child(index)
        self._params = self._params or params.of_child(index)
        return self._params
