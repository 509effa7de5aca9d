"""What sampling needs to know of the requests in a batch's rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor


@dataclass(frozen=True)
class RowParameters:
    """Sampling parameters of a batch on the device, one row a sequence; the last four are of
    ``DraftSampler``, [num_seqs, n] but for ``alone``."""

    temperature: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    seeds: Tensor
    penalty_slots: Tensor | None
    repetition_penalty: Tensor
    frequency_penalty: Tensor
    presence_penalty: Tensor
    token_ids: Tensor | None = None
    biases: Tensor | None = None
    min_lens: Tensor | None = None
    alone: Tensor | None = None


@dataclass
class Rows:
    """The sampling that the requests of a batch ask for.

    ``requests`` [num_seqs] of ``REQUEST``.  ``draws``: not all of them the likeliest token.
    ``num_logprobs``: the most that one wants, or -1.
    """

    requests: npt.NDArray[Any]
    samples: npt.NDArray[np.bool_]
    draws: bool
    has_min_tokens: bool
    has_bias: bool
    has_allowed: bool
    num_logprobs: int
    parameters: RowParameters | None = None
    of_drafts: dict[str, RowParameters] = field(default_factory=dict)


REQUEST = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("seed", np.int64),
        ("has_penalties", np.bool_),
        ("likeliest", np.bool_),  # is asked for, but where it is banned
        ("plain", np.bool_),  # nothing but the likeliest token, whatever came before
        ("num_logprobs", np.int64),  # -1: none are wanted
        ("num_prompt_logprobs", np.int64),  # of the likeliest, in rows that have a target
        ("has_min_tokens", np.bool_),
        ("has_bias", np.bool_),
        ("has_allowed", np.bool_),
        ("min_len", np.int64),  # of prompt and output; shorter sequences must not end
    ],
    align=True,
)
"""The facts about the request in a slot that sampling needs."""
