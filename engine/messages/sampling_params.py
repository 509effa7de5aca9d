"""``SamplingParams`` says how to choose the tokens of one request, under vLLM's names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...config import UserError

MAX_OUTPUTS = 16384
"""Most outputs ``n`` of one prompt; vLLM has the same limit."""
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_BAD_WORDS = 1024
_MOST_FLOAT32 = 1e38
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling options of one request; checked and normalized once, immutable afterwards.

    ``stop`` and ``stop_token_ids`` become tuples, ``top_k=-1`` becomes 0 and ``seed=-1`` None.
    With ``max_tokens=None`` generation runs until the model's length limit.
    ``logit_bias`` is added to the logits of token ids; ``grammar`` is one of llguidance's, see
    ``frontend/grammar.py``.  ``bad_words`` become a tuple: the output has the tokens of none of
    them one behind the other, see ``InputProcessor.bad_word_ids``.

    Raises:
        UserError: a value has the wrong type or is out of range; the message names it.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    logit_bias: Mapping[int, float] | None = None
    grammar: str | None = None
    bad_words: Sequence[str] | None = ()

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        _require(_is_list(stop), self, "stop", "text or a list of texts")
        _require(_is_list(self.stop_token_ids), self, "stop_token_ids", "a list of token ids")
        words_ok = _is_list(self.bad_words) and not isinstance(self.bad_words, str)
        _require(words_ok, self, "bad_words", "a list of texts")
        lists = {"stop_token_ids": self.stop_token_ids, "bad_words": self.bad_words}
        for name, value in {"stop": stop, **lists}.items():
            object.__setattr__(self, name, () if value is None else tuple(value))
        self._check_types()
        self._check_ranges()
        # Only after the checks: -1 means "off" for these two and nothing for any other field.
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.seed == -1:
            object.__setattr__(self, "seed", None)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @cached_property
    def plain_greedy(self) -> bool:
        """Every token is the likeliest, whatever came before."""
        is_free = self.min_tokens == 0 and not self.logit_bias and self.grammar is None
        is_free = is_free and not self.bad_words
        return self.greedy and not self.has_penalties and is_free

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return self.stop  # type: ignore[return-value]  # normalized in __post_init__

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.stop_token_ids  # type: ignore[return-value]  # normalized in __post_init__

    @property
    def bad_texts(self) -> tuple[str, ...]:
        return self.bad_words  # type: ignore[return-value]  # normalized in __post_init__

    def of_child(self, index: int) -> SamplingParams:
        """The parameters of output ``index`` of ``n``; seeds differ so that the outputs do."""
        seed = None if self.seed is None else (self.seed + index) % 2**63
        of_prompt = self.prompt_logprobs if index == 0 else None
        return replace(self, n=1, seed=seed, prompt_logprobs=of_prompt)

    def _check_types(self) -> None:
        for name in ("n", "top_k", "min_tokens"):
            _require(_is_int(getattr(self, name)), self, name, "an integer of 64 bits")
        for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or _is_int(value), self, name, "an integer of 64 bits, or None")
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            _require(_is_number(getattr(self, name)), self, name, "a finite number of 32 bits")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            _require(isinstance(getattr(self, name), bool), self, name, "True or False")
        grammar_ok = self.grammar is None or (isinstance(self.grammar, str) and self.grammar)
        _require(bool(grammar_ok), self, "grammar", "text that is not empty, or None")
        self._check_bias()
        ids_ok = all(_is_int(i) and i >= 0 for i in self.stop_ids)
        _require(ids_ok, self, "stop_token_ids", "token ids of at least 0")
        texts_ok = all(isinstance(s, str) and s for s in self.stop_strings)
        _require(texts_ok, self, "stop", "strings that are not empty")
        few = len(self.bad_texts) <= MAX_BAD_WORDS
        _require(few, self, "bad_words", f"{MAX_BAD_WORDS} texts at most")
        words_ok = all(isinstance(s, str) and s.strip() for s in self.bad_texts)
        _require(words_ok, self, "bad_words", "texts that are not empty")

    def _check_bias(self) -> None:
        bias = self.logit_bias
        is_map = bias is None or isinstance(bias, Mapping)
        _require(is_map, self, "logit_bias", "token ids with a number each, or None")
        entries = list(bias.items()) if bias else []
        few = len(entries) <= MAX_BIASES
        _require(few, self, "logit_bias", f"{MAX_BIASES} token ids at most")
        ok = all(_is_int(i) and i >= 0 and _is_number(b) and -100 <= b <= 100 for i, b in entries)
        _require(ok, self, "logit_bias", "token ids with a number in [-100, 100] each")

    def _check_ranges(self) -> None:
        _require(1 <= self.n <= MAX_OUTPUTS, self, "n", f"in [1, {MAX_OUTPUTS}]")
        _require(self.temperature >= 0, self, "temperature", "at least 0 (0 is greedy)")
        _require(0 < self.top_p <= 1, self, "top_p", "in (0, 1]")
        _require(self.top_k >= -1, self, "top_k", "at least 1, or 0 or -1 for off")
        _require(0 <= self.min_p <= 1, self, "min_p", "in [0, 1]")
        penalty_ok = 1e-20 <= self.repetition_penalty <= 1e20  # more makes logits infinite
        _require(penalty_ok, self, "repetition_penalty", "between 1e-20 and 1e20")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2 <= getattr(self, name) <= 2, self, name, "in [-2, 2]")
        seed_ok = self.seed is None or self.seed >= -1
        _require(seed_ok, self, "seed", "at least 0, or None or -1 for none")
        _require(self.max_tokens is None or self.max_tokens >= 1, self, "max_tokens", "at least 1")
        most = math.inf if self.max_tokens is None else self.max_tokens
        _require(0 <= self.min_tokens <= most, self, "min_tokens", f"in [0, max_tokens={most}]")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            in_range = value is None or 0 <= value <= MAX_LOGPROBS
            _require(in_range, self, name, f"in [0, {MAX_LOGPROBS}] or None")
        if self.greedy:
            _require(self.n == 1, self, "n", "1 with temperature=0: greedy outputs are all equal")


def _require(ok: bool, params: SamplingParams, name: str, expected: str) -> None:
    if not ok:
        raise UserError(f"SamplingParams: {name}={getattr(params, name)!r}: expected {expected}")


def _is_list(value: object) -> bool:
    return value is None or isinstance(value, Iterable)


def _is_int(value: object) -> bool:
    """Whether it is an integer that a message can carry, of 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_number(value: object) -> bool:
    """Whether it is finite also in the kernels, which take 32 bits."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= _MOST_FLOAT32
