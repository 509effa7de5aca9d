"""``HeadSpec``: what a draft head has beside what any model has."""

from __future__ import annotations

from dataclasses import dataclass

BEHIND_NORM = -1
"""The place of the hidden states behind the last norm; see ``ModelSpec.kept``."""


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
