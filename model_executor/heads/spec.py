"""``HeadSpec``: what a draft head has beside what any model has; and the names of heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BEHIND_NORM = -1
"""The place of the hidden states behind the last norm; see ``ModelSpec.kept``."""

EAGLE3_NAMES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
)
"""Architectures of EAGLE-3 heads."""
FIRST_EAGLE = ("LlamaForCausalLMEagle", "EagleLlamaForCausalLM", "EagleSpeculator")
"""Those of EAGLE 1 and 2."""


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """A draft head.

    Attributes:
        form: a key of ``FORMS``.
        target_hidden_size: width of a hidden state of the target.
        kept: the places of the target whose hidden states it reads, as of ``ModelSpec.kept``.
        draft_vocab_size: tokens that it may draft.
        maps_vocabulary: a map says which of the target's tokens these are; else they are all.
        norm_before_residual: the residual stream begins behind the norm of the hidden state.
        layer: its number in the target's checkpoint, of a layer that lies there.
    """

    form: str
    target_hidden_size: int
    kept: tuple[int, ...]
    draft_vocab_size: int
    maps_vocabulary: bool = False
    norm_before_residual: bool = False
    layer: int = 0


def is_head(values: Mapping[str, Any]) -> bool:
    """Whether a config is that of a draft head."""
    names = values.get("architectures")
    known = (*EAGLE3_NAMES, *FIRST_EAGLE)
    return isinstance(names, list) and any(name in known for name in names)
