"""``SamplingParams`` says how to choose the tokens of one request, under vLLM's names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cached_property, wraps
from typing import Any, Self, TypeAlias

from ...config import UserError
from ...config.ports import sampling_fields, unknown
from .token_ids import ThinkingTokens, are_ids, is_int

MAX_OUTPUTS = 16384
"""Most outputs ``n`` of one prompt; vLLM has the same limit."""
MAX_BIASES = 1024
MAX_BAD_WORDS = 1024
MAX_ALLOWED = 1 << 20
_MOST_FLOAT32 = 1e38
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow."""


class RequestOutputKind(Enum):
    """An output of a stream has all text so far, or what is new; or only the last one is given."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The form that an output keeps to: one of these.

    ``json`` is a JSON schema, as an object or as text; ``regex`` and each of ``choice`` match the
    whole output; ``grammar`` is llguidance's form of Lark, or GBNF (rules with ``::=``);
    ``json_object`` is any JSON object.

    Raises:
        UserError: none is given, or several are.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        forms = [value for value in vars(self).values() if value is not None and value is not False]
        if len(forms) != 1:
            raise UserError(
                f"StructuredOutputsParams: {len(forms)} forms are given; expected one of "
                f"{', '.join(vars(self))}"
            )


@dataclass(kw_only=True)
class SamplingParams:
    """Sampling options of one request; checked and normalized when made.

    A field may be assigned later; it is checked when a request is made with it.  A request keeps a
    copy, so that later changes do not reach it.  ``stop``, ``stop_token_ids``, ``bad_words`` and
    ``allowed_token_ids`` become tuples, ``top_k=-1`` becomes 0 and ``seed=-1`` None.  With
    ``max_tokens=None`` generation runs until the model's length limit.

    Attributes:
        n: outputs of one prompt, drawn independently.
        temperature: what logits are divided by; 0 takes the likeliest token.
        top_p: the likeliest tokens that together have this probability are kept.
        top_k: so many of the likeliest tokens are kept; 0: all.
        min_p: tokens are kept that have this share of the likeliest one's probability.
        seed: of this request's random choices; the engine's if unset.
        repetition_penalty: above 1 discourages tokens of the prompt and of the output.
        presence_penalty: subtracted once from the logit of each token that the output has.
        frequency_penalty: subtracted for every time that the output has a token.
        max_tokens: most tokens of an output; None: up to the model's limit.
        min_tokens: least tokens of an output: it does not stop before.
        stop: texts before which an output ends.
        stop_token_ids: tokens at which an output ends.
        ignore_eos: an output goes on behind the end-of-sequence token.
        include_stop_str_in_output: the output has the text of ``stop`` that ended it.
        logprobs, prompt_logprobs: how many of the likeliest tokens; -1: all of the vocabulary.
            ``EngineOptions.max_logprobs`` is the most.
        skip_special_tokens: the text leaves special tokens out.
        logit_bias: numbers in [-100, 100] that are added to the logits of token ids.
        grammar: the form of the output in llguidance's own format.
        bad_words: texts that the output does not have.
        allowed_token_ids: no other tokens are sampled.
        truncate_prompt_tokens: the prompt's last tokens that are kept; -1: as many as the model
            takes.
        detokenize: outputs have text; without it they have token ids alone.
        output_kind: what each output of ``LLM.stream`` and ``AsyncLLM.generate`` has.
        structured_outputs: the form of the output, as JSON schema, expression or grammar.
        thinking_token_budget: tokens of thinking behind which its end is forced; -1: no limit.
        thinking_tokens: the tokens around the thinking, which a budget needs.

    Raises:
        UserError: a value has the wrong type or is out of range, or a field is none of these; the
            message names it.
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
    allowed_token_ids: Sequence[int] | None = None
    truncate_prompt_tokens: int | None = None
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None
    thinking_tokens: ThinkingTokens | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = (self.stop,)
        for name, what in _LISTS.items():
            value = getattr(self, name)
            if value is not _DEFAULTS[name]:
                is_list = isinstance(value, Iterable) and not isinstance(value, str)
                _require(value is None or is_list, self, name, what)
                setattr(self, name, _DEFAULTS[name] if value is None else tuple(value))
        values = self.__dict__
        for name, default in _DEFAULTS.items():
            if (value := values[name]) is not default:
                for is_right, expected in _CHECKS[name]:
                    _require(is_right(value), self, name, expected)
        most = math.inf if self.max_tokens is None else self.max_tokens
        _require(0 <= self.min_tokens <= most, self, "min_tokens", f"in [0, max_tokens={most}]")
        if self.n != 1 and self.greedy:
            _require(False, self, "n", "1 with temperature=0: greedy outputs are all equal")
        if self.stop and not self.detokenize:
            _require(False, self, "stop", "none with detokenize=False: stops are found in the text")
        if self.structured_outputs is not None and self.grammar is not None:
            _require(False, self, "grammar", "None beside structured_outputs: give one of them")
        # Only after the checks: -1 means "off" for these two and nothing for any other field.
        if self.top_k == -1:
            self.top_k = 0
        if self.seed == -1:
            self.seed = None
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        self._check_thinking()
        values.pop(_CHANGED, None)

    def _check_thinking(self) -> None:
        if self.thinking_token_budget is None:
            return
        expected = "None without thinking_tokens, which say where the thinking ends"
        _require(self.thinking_tokens is not None, self, "thinking_token_budget", expected)
        if self.allowed_token_ids is not None and self.thinking_tokens is not None:
            has_end = {*self.thinking_tokens.forced_ids} <= {*self.allowed_token_ids}
            expected = "None, or allowed_token_ids with the end of the thinking"
            _require(has_end, self, "thinking_token_budget", expected)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _DEFAULTS:
            raise unknown(f"SamplingParams: unknown field {name!r}", name, _DEFAULTS)
        self.__dict__[name] = value
        self.__dict__[_CHANGED] = True

    def clone(self) -> Self:
        """A copy, checked again if a field was assigned.

        Raises:
            UserError: as the constructor does.
        """
        if _CHANGED in self.__dict__:
            return replace(self)
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        return copy

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
        is_free = is_free and not self.bad_words and self.allowed_token_ids is None
        is_free = is_free and self.thinking_token_budget is None
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


def _is_number(value: object) -> bool:
    """Whether it is finite also in the kernels, which take 32 bits."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= _MOST_FLOAT32


def _optional(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_right(value)


def _is_bias(value: Any) -> bool:
    return _is_number(value) and -100 <= value <= 100


_Check: TypeAlias = tuple[Callable[[Any], bool], str]
_INT: _Check = (is_int, "an integer of 64 bits")
_INT_OR_NONE: _Check = (_optional(is_int), "an integer of 64 bits, or None")
_NUMBER: _Check = (_is_number, "a finite number of 32 bits")
_BOOL: _Check = (lambda value: isinstance(value, bool), "True or False")
_PENALTY: _Check = (lambda value: -2 <= value <= 2, "in [-2, 2]")
_NUM_LOGPROBS: _Check = (
    _optional(lambda value: -1 <= value < 1 << 31),
    "at least 0, -1 for all, or None",
)
_LISTS = {
    "stop": "text or a list of texts",
    "stop_token_ids": "a list of token ids",
    "bad_words": "a list of texts",
    "allowed_token_ids": "a list of token ids",
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
    "stop_token_ids": ((are_ids, "token ids of at least 0"),),
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
            _optional(lambda bias: are_ids(bias) and all(map(_is_bias, bias.values()))),
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
    "allowed_token_ids": (
        (_optional(lambda ids: 0 < len(ids) <= MAX_ALLOWED), f"1 to {MAX_ALLOWED} token ids"),
        (_optional(are_ids), "token ids of at least 0"),
    ),
    "truncate_prompt_tokens": (
        _INT_OR_NONE,
        (_optional(lambda most: most == -1 or most >= 1), "at least 1, or -1 for all that fit"),
    ),
    "detokenize": (_BOOL,),
    "output_kind": (
        (lambda kind: isinstance(kind, RequestOutputKind), "one of RequestOutputKind"),
    ),
    "thinking_token_budget": (
        _INT_OR_NONE,
        (_optional(lambda most: most >= -1), "at least 0, or None or -1 for no limit"),
    ),
    "thinking_tokens": (
        (_optional(lambda ids: isinstance(ids, ThinkingTokens)), "ThinkingTokens or None"),
    ),
    "structured_outputs": (
        (
            _optional(lambda form: isinstance(form, StructuredOutputsParams)),
            "StructuredOutputsParams or None",
        ),
    ),
}
"""Fields are checked in this order; an error says what the field must be."""
_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
"""Values that need no check: most requests give a few fields."""
_CHANGED = "_changed"
"""Entry of an object's dict that says that a field was assigned and has not been checked."""


def _porting(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that says of vLLM's other fields what becomes of them here."""

    @wraps(init)
    def ported(self: SamplingParams, **keywords: Any) -> None:
        init(
            self,
            **(
                keywords
                if keywords.keys() <= _DEFAULTS.keys()
                else sampling_fields(keywords, _DEFAULTS)
            ),
        )

    return ported


SamplingParams.__init__ = _porting(SamplingParams.__init__)  # type: ignore[method-assign]
