"""``SamplingParams`` says how to choose the tokens of one request, under vLLM's names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, TypeAlias

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
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, what in _LISTS.items():
            value = getattr(self, name)
            if value is not _DEFAULTS[name]:
                is_list = isinstance(value, Iterable) and not isinstance(value, str)
                _require(value is None or is_list, self, name, what)
                object.__setattr__(self, name, () if value is None else tuple(value))
        for name, value in vars(self).items():
            if value is not _DEFAULTS[name]:
                for is_right, expected in _CHECKS[name]:
                    _require(is_right(value), self, name, expected)
        most = math.inf if self.max_tokens is None else self.max_tokens
        _require(0 <= self.min_tokens <= most, self, "min_tokens", f"in [0, max_tokens={most}]")
        if self.n != 1 and self.greedy:
            _require(False, self, "n", "1 with temperature=0: greedy outputs are all equal")
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


def _require(ok: bool, params: SamplingParams, name: str, expected: str) -> None:
    if not ok:
        raise UserError(f"SamplingParams: {name}={getattr(params, name)!r}: expected {expected}")


def _is_int(value: object) -> bool:
    """Whether it is an integer that a message can carry, of 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_number(value: object) -> bool:
    """Whether it is finite also in the kernels, which take 32 bits."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= _MOST_FLOAT32


def _optional(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_right(value)


def _are_ids(values: Iterable[Any]) -> bool:
    return all(_is_int(value) and value >= 0 for value in values)


def _is_bias(value: Any) -> bool:
    return _is_number(value) and -100 <= value <= 100


_Check: TypeAlias = tuple[Callable[[Any], bool], str]
_INT: _Check = (_is_int, "an integer of 64 bits")
_INT_OR_NONE: _Check = (_optional(_is_int), "an integer of 64 bits, or None")
_NUMBER: _Check = (_is_number, "a finite number of 32 bits")
_BOOL: _Check = (lambda value: isinstance(value, bool), "True or False")
_PENALTY: _Check = (lambda value: -2 <= value <= 2, "in [-2, 2]")
_NUM_LOGPROBS: _Check = (
    _optional(lambda value: 0 <= value <= MAX_LOGPROBS),
    f"in [0, {MAX_LOGPROBS}] or None",
)
_LISTS = {
    "stop": "text or a list of texts",
    "stop_token_ids": "a list of token ids",
    "bad_words": "a list of texts",
}
_CHECKS: dict[str, tuple[_Check, ...]] = {
    "n": (_INT, (lambda n: 1 <= n <= MAX_OUTPUTS, f"in [1, {MAX_OUTPUTS}]")),
    "temperature": (_NUMBER, (lambda value: value >= 0, "at least 0 (0 is greedy)")),
    "top_p": (_NUMBER, (lambda share: 0 < share <= 1, "in (0, 1]")),
    "top_k": (_INT, (lambda k: k >= -1, "at least 1, or 0 or -1 for off")),
    "min_p": (_NUMBER, (lambda share: 0 <= share <= 1, "in [0, 1]")),
    "seed": (
        _INT_OR_NONE,
        (_optional(lambda seed: seed >= -1), "at least 0, or None or -1 for none"),
    ),
    "repetition_penalty": (
        _NUMBER,
        (lambda value: 1e-20 <= value <= 1e20, "between 1e-20 and 1e20"),  # else logits overflow
    ),
    "presence_penalty": (_NUMBER, _PENALTY),
    "frequency_penalty": (_NUMBER, _PENALTY),
    "max_tokens": (_INT_OR_NONE, (_optional(lambda most: most >= 1), "at least 1")),
    "min_tokens": (_INT,),
    "stop": (
        (lambda texts: all(isinstance(s, str) and s for s in texts), "strings that are not empty"),
    ),
    "stop_token_ids": ((_are_ids, "token ids of at least 0"),),
    "ignore_eos": (_BOOL,),
    "include_stop_str_in_output": (_BOOL,),
    "logprobs": (_INT_OR_NONE, _NUM_LOGPROBS),
    "prompt_logprobs": (_INT_OR_NONE, _NUM_LOGPROBS),
    "skip_special_tokens": (_BOOL,),
    "logit_bias": (
        (
            _optional(lambda bias: isinstance(bias, Mapping)),
            "token ids with a number each, or None",
        ),
        (lambda bias: len(bias or ()) <= MAX_BIASES, f"{MAX_BIASES} token ids at most"),
        (
            _optional(lambda bias: _are_ids(bias) and all(map(_is_bias, bias.values()))),
            "token ids with a number in [-100, 100] each",
        ),
    ),
    "grammar": (
        (
            _optional(lambda text: isinstance(text, str) and text != ""),
            "text that is not empty, or None",
        ),
    ),
    "bad_words": (
        (lambda words: len(words) <= MAX_BAD_WORDS, f"{MAX_BAD_WORDS} texts at most"),
        (
            lambda words: all(isinstance(s, str) and s.strip() for s in words),
            "texts that are not empty",
        ),
    ),
}
"""Fields are checked in this order; an error says what the field must be."""
_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
"""Values that need no check: most requests give a few fields."""
