"""The sampling that a body asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....engine.messages.sampling_params import SamplingParams
from ..intake.errors import ApiError
from ..intake.protocol import Generation
from .form import grammar_of

_SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "max_tokens", "min_tokens", "stop"),
    *("stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
    "bad_words",
)
"""Fields of a body that are fields of ``SamplingParams``."""


def sampling_params(body: Generation, defaults: Mapping[str, Any], **more: Any) -> SamplingParams:
    """The sampling that a body asks for; ``more`` wins.

    Args:
        defaults: of fields that the body leaves out, see ``default_sampling``.  One of them wins
            over a ``max_tokens`` of None, which is without a limit.

    Raises:
        UserError: a value is out of range.
    """
    if "max_tokens" in more and more["max_tokens"] is None and "max_tokens" in defaults:
        del more["max_tokens"]
    grammar = more.pop("grammar", None) or grammar_of(body)
    more |= {"grammar": grammar, "logit_bias": _bias(body.logit_bias)}
    given = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    return SamplingParams(**{**defaults, **given, **more})


def _bias(given: dict[str, float] | None) -> dict[int, float] | None:
    """``logit_bias``, whose keys are token ids as JSON has them: text.

    Raises:
        ApiError: a key is no number.
    """
    try:
        return {int(name): value for name, value in given.items()} if given else None
    except ValueError:
        message = "logit_bias: expected token ids as keys"
        raise ApiError(400, message, param="logit_bias") from None
