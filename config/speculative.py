"""Reads ``speculative_config``: who drafts tokens, and how many, under vLLM's names.

``config/vllm/speculative.py`` says what becomes of each of vLLM's fields.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from .errors import UserError
from .option_types import read_object
from .step_fields import MOST_DRAFTS

_log = logging.getLogger(__name__)
DRAFTERS: Mapping[str, str] = {
    "ngram": "",
    "suffix": "",
    "draft_model": "a draft model",
    "eagle3": "an EAGLE-3 head",
    "mtp": "a checkpoint with the layer, else the model's own",
}
"""Method -> whose folder or name ``model`` is; "" where it loads none."""
METHODS = tuple(DRAFTERS)
LOOKUP_METHODS = tuple(method for method, drafter in DRAFTERS.items() if not drafter)
"""Methods that look for drafts in tokens, and load no model."""
_LOADING = tuple(method for method, drafter in DRAFTERS.items() if drafter)
HEAD_METHODS = ("eagle3", "mtp")
"""Methods whose drafter reads hidden states of the model."""
_MOST_LOOKUP = 64
_LOOKUP = 5
"""Tokens of an n-gram if neither bound is given, as in vLLM."""
_SUFFIX = {"num_speculative_tokens": 8, "prompt_lookup_min": 3, "prompt_lookup_max": 24}
"""Defaults of ``suffix``; the last is vLLM's, too."""
_MOST_CACHED = 1 << 24
_NEEDS_MODEL = ("draft_model", "eagle3")
_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'


@dataclass(frozen=True)
class SpeculativeConfig:
    """Who drafts tokens.

    Attributes:
        method: the drafter.
        num_speculative_tokens: most drafts of a request in a step.
        prompt_lookup_max, prompt_lookup_min: ``ngram`` and ``suffix`` look for the longest run of
            so many last tokens that the sequence has had before.
        suffix_cached_tokens: tokens of earlier outputs, the newest, in which ``suffix`` looks too.
        model: folder or name of the draft model or head.
        max_model_len: longest sequence that is drafted for; None: the model's, or what the draft
            model was made for if that is less.
        quantization: of the draft model's weights, as of ``EngineOptions``.
        adaptive: the number of drafts is chosen each step; else it is always the most.
        acceptance: [num_speculative_tokens] probability of each position that its draft counts as
            right if those before it do; empty: drafts are judged by what the model samples.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int = _LOOKUP
    prompt_lookup_min: int = _LOOKUP
    suffix_cached_tokens: int = 1 << 17
    model: str | None = None
    max_model_len: int | None = None
    quantization: str | None = None
    adaptive: bool = True
    acceptance: tuple[float, ...] = ()


_OURS = tuple(field.name for field in fields(SpeculativeConfig))
_RANGES = {
    "num_speculative_tokens": MOST_DRAFTS,
    "prompt_lookup_max": _MOST_LOOKUP,
    "prompt_lookup_min": _MOST_LOOKUP,
    "suffix_decoding_max_tree_depth": _MOST_LOOKUP,
    "suffix_cached_tokens": _MOST_CACHED,
    "suffix_decoding_max_cached_requests": 1 << 31,
    "max_model_len": 1 << 31,
}
_MAY_BE_0 = ("suffix_cached_tokens", "suffix_decoding_max_cached_requests")
_OF_METHOD = {
    "prompt_lookup_max": ("ngram",),
    "prompt_lookup_min": LOOKUP_METHODS,
    "suffix_cached_tokens": ("suffix",),
    "suffix_decoding_max_tree_depth": ("suffix",),
    "suffix_decoding_max_cached_requests": ("suffix",),
    "model": _LOADING,
    "quantization": ("draft_model",),
    "revision": _LOADING,
}
"""Fields that not every method reads, and those that do."""


def read_speculative(text: str | None) -> SpeculativeConfig | None:
    """The config of a JSON object; None if there is none.

    Raises:
        UserError: it is no object, or a field is unknown, missing, out of range, or asks for what
            is not there.
    """
    if text is None:
        return None
    values = read_object("speculative_config", text, _EXAMPLE)
    values = _known({name: value for name, value in values.items() if value is not None})
    method = values["method"] = _method(values)
    if method == "suffix":
        values.setdefault("num_speculative_tokens", _SUFFIX["num_speculative_tokens"])
    for name in ("acceptance", "synthetic_acceptance_rates"):
        if isinstance(values.get(name), list):
            values.setdefault("num_speculative_tokens", len(values[name]))
    if "num_speculative_tokens" not in values:
        raise _wrong("num_speculative_tokens", None, "how many tokens are drafted, such as 4")
    for name, most in _RANGES.items():
        value, least = values.get(name, 1), int(name not in _MAY_BE_0)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise _wrong(name, value, f"an integer in [{least}, {most}]")
    for name, readers in _OF_METHOD.items():
        if name in values and method not in readers:
            raise UserError(
                f"speculative_config: {name}={values[name]!r} is of method {readers[0]}, and the "
                f"method is {method}; leave one of them out"
            )
    _read_lookup(values)
    _read_model(values)
    _read_acceptance(values)
    if not isinstance(values.get("adaptive", True), bool):
        raise _wrong("adaptive", values["adaptive"], "true or false")
    return SpeculativeConfig(**values)


def with_fields(text: str | None, values: dict[str, Any]) -> str:
    """A JSON object with further fields.

    Raises:
        UserError: it is none, or has another value of one of them.
    """
    config = {} if text is None else read_object("speculative_config", text, _EXAMPLE)
    for name, value in values.items():
        if config.setdefault(name, value) != value:
            raise UserError(
                f"speculative_config: {name}={config[name]!r} contradicts {value!r}: give one of "
                "them"
            )
    return json.dumps(config)


def _known(values: dict[str, Any]) -> dict[str, Any]:
    """The fields that are read here; those of vLLM's that mean nothing here are left out.

    Raises:
        UserError: a field is unknown, or asks for what is not there.
    """
    from .vllm.argument import Port
    from .vllm.speculative import SPECULATIVE

    kept: dict[str, Any] = {}
    for name, value in values.items():
        argument = SPECULATIVE.get(name)
        if name in _OURS or (argument is not None and argument.port is Port.SAME):
            kept[name] = value
        elif argument is None:
            raise _wrong(name, value, f"one of the fields {', '.join(_OURS)}")
        elif argument.asks_nothing(value):
            continue
        elif argument.port is Port.REFUSED:
            raise UserError(f"speculative_config: {name}={value!r}: {argument.says}")
        else:
            _log.info("speculative_config: %s=%r has no effect: %s", name, value, argument.says)
    return kept


def _method(values: dict[str, Any]) -> str:
    from .vllm.speculative import NO_METHODS

    method, model = values.get("method"), values.get("model")
    if method is None and model in ("ngram", "[ngram]"):
        del values["model"]
        return "ngram"
    if method is None and model is not None:
        return "draft_model"
    if method in METHODS:
        return str(method)
    if isinstance(method, str) and method.endswith("_mtp"):
        return "mtp"  # vLLM's older names say whose layer it is
    why = NO_METHODS.get(str(method))
    if why is not None:
        raise UserError(f"speculative_config: method={method!r}: {why}")
    raise _wrong("method", method, f"one of {', '.join(METHODS)}")


def _read_lookup(values: dict[str, Any]) -> None:
    """Fill in the bound of the n-grams that is not there, and read vLLM's names of ``suffix``."""
    if values["method"] == "suffix":
        depth = values.pop("suffix_decoding_max_tree_depth", _SUFFIX["prompt_lookup_max"])
        values["prompt_lookup_max"] = depth
        values.setdefault("prompt_lookup_min", min(depth, _SUFFIX["prompt_lookup_min"]))
        if values.pop("suffix_decoding_max_cached_requests", 1) == 0:
            values["suffix_cached_tokens"] = 0
    longest = values.get("prompt_lookup_max", values.get("prompt_lookup_min", _LOOKUP))
    shortest = values.get("prompt_lookup_min", longest)
    if shortest > longest:
        is_suffix = values["method"] == "suffix"
        bound = "suffix_decoding_max_tree_depth" if is_suffix else "prompt_lookup_max"
        raise _wrong("prompt_lookup_min", shortest, f"{bound}={longest} or less")
    values |= {"prompt_lookup_max": longest, "prompt_lookup_min": shortest}


def _read_model(values: dict[str, Any]) -> None:
    """Check the draft model's fields, and make the revision a part of its name."""
    from .ports import at_revision

    for name in ("model", "quantization", "revision"):
        value = values.get(name, "text")
        if not isinstance(value, str) or not value:
            raise _wrong(name, value, "text")
    if values["method"] in _NEEDS_MODEL and "model" not in values:
        drafter = DRAFTERS[values["method"]]
        raise _wrong("model", None, f"the folder or ORG/NAME of {drafter}")
    if (revision := values.pop("revision", None)) is not None:
        if "model" not in values:
            raise UserError(
                f"speculative_config: revision={revision!r} is of the field model, which is not "
                "there: the drafter is a part of the model's own checkpoint; leave it out"
            )
        try:
            values["model"] = at_revision(values["model"], revision)
        except UserError as error:
            raise UserError(f"speculative_config: {error}") from None


def _read_acceptance(values: dict[str, Any]) -> None:
    """Turn vLLM's rates, each of which says how often all drafts up to a position are right, into
    those of the position alone."""
    judged = values.pop("rejection_sample_method", None)
    rates = values.pop("synthetic_acceptance_rates", None)
    if judged not in (None, "standard", "synthetic"):
        raise _wrong("rejection_sample_method", judged, "standard or synthetic")
    if (judged == "synthetic") != (rates is not None):
        raise UserError(
            f"speculative_config: rejection_sample_method={judged!r} and "
            f"synthetic_acceptance_rates={rates!r}: give 'synthetic' and the rates, or neither"
        )
    if rates is None:
        if "acceptance" in values:
            values["acceptance"] = _rates("acceptance", values["acceptance"], values)
        return
    rates = _rates("synthetic_acceptance_rates", rates, values)
    if any(a < b for a, b in pairwise(rates)):
        raise _wrong("synthetic_acceptance_rates", [*rates], "rates that do not rise")
    before = (1.0, *rates)
    values["acceptance"] = tuple(
        rate / above if above else 0.0 for rate, above in zip(rates, before, strict=False)
    )


def _is_share(rate: Any) -> bool:
    return isinstance(rate, int | float) and not isinstance(rate, bool) and 0 <= rate <= 1


def _rates(name: str, rates: Any, values: dict[str, Any]) -> tuple[float, ...]:
    most = values["num_speculative_tokens"]
    if (
        not isinstance(rates, list)
        or len(rates) != most
        or not all(_is_share(rate) for rate in rates)
    ):
        raise _wrong(name, rates, f"{most} numbers in [0, 1], one for each draft")
    return tuple(float(rate) for rate in rates)


def _wrong(name: str, value: Any, expected: str) -> UserError:
    return UserError(f"speculative_config: {name}={value!r}: expected {expected}")


def check_rows(
    config: SpeculativeConfig, max_num_tokens: int | None, sizes: tuple[int, ...]
) -> None:
    """Refuse more drafts than a step has rows for, each of which is a token.

    Args:
        max_num_tokens: most tokens of a step; None: not known yet.
        sizes: the captured numbers of rows; empty: those are chosen by the rows.

    Raises:
        UserError: says how many fit.
    """
    count = config.num_speculative_tokens
    name = f"speculative_config: num_speculative_tokens={count}"
    if max_num_tokens is not None and count + 1 > max_num_tokens:
        raise UserError(
            f"{name}: a request with {count} drafts is {count + 1} rows, and max_num_batched_tokens"
            f"={max_num_tokens}; draft {max_num_tokens - 1} at most, or raise it"
        )
    if sizes and count + 1 > max(sizes):
        raise UserError(
            f"{name}: a request with {count} drafts is {count + 1} rows, and the largest of "
            f"cudagraph_capture_sizes is {max(sizes)}; draft {max(sizes) - 1} at most, or capture "
            "more"
        )
