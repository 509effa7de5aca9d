"""A model's rotary embedding as data: what models read from a config and ``ops`` make tables of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]
ROPE_KINDS: tuple[str, ...] = get_args(RopeKind)
STRETCHED_KINDS = ("llama3", "yarn", "longrope")
"""Kinds that are defined by the context length before stretching."""


@dataclass(frozen=True)
class RopeParameters:
    """One model's rotary embedding, under the names of Hugging Face's ``rope_parameters``.

    theta: base of the wavelengths.
    factor: by how much the context was stretched (linear, llama3, yarn, longrope); proportional
        divides its frequencies by it; dynamic has the frequencies of default as far as it serves.
    original_max_position: context length before stretching (llama3, yarn, longrope).
    low_freq_factor, high_freq_factor: the band that llama3 blends over.
    beta_fast, beta_slow: rotations within the original context that bound yarn's ramp.
    short_factor: divides each frequency under longrope, within the original context.
    attention_factor: multiplies cos and sin under yarn and longrope.  None derives it from
        ``factor`` and, under yarn when both are given, ``mscale`` and ``mscale_all_dim``, under
        longrope the original context.
    truncate: round yarn's ramp outwards to whole dimensions.
    partial_rotary_factor: the share of a head's dimensions that rotate.  Under proportional the
        rest have the frequency 0, and the others those of a whole head.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    short_factor: tuple[float, ...] = ()
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            known = ", ".join(ROPE_KINDS)
            raise ValueError(f"rope kind {self.kind!r} is not supported; supported: {known}")
        if self.theta <= 1:
            raise ValueError(f"rope theta is {self.theta}, expected more than 1")
        if self.factor < 1:
            raise ValueError(f"rope factor is {self.factor}, expected 1 or more")
        if not 0 < self.partial_rotary_factor <= 1:
            raise ValueError(
                f"partial_rotary_factor is {self.partial_rotary_factor}, expected in (0, 1]"
            )
        if self.kind in STRETCHED_KINDS and not self.original_max_position:
            raise ValueError(
                f"rope kind {self.kind!r} needs original_max_position, the context length before "
                f"scaling; it is {self.original_max_position}"
            )
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor} must exceed low_freq_factor "
                f"{self.low_freq_factor}"
            )
        if self.kind == "longrope" and not self.short_factor:
            raise ValueError("rope kind 'longrope' needs short_factor, a number for each frequency")

    def rotary_dim(self, head_dim: int) -> int:
        """The number of rotating dimensions of a head.  Raises ValueError if it is odd or zero."""
        whole = self.kind == "proportional"
        dim = head_dim if whole else int(head_dim * self.partial_rotary_factor)
        if dim < 2 or dim % 2:
            raise ValueError(
                f"head_dim {head_dim} x partial_rotary_factor {self.partial_rotary_factor} gives "
                f"rotary_dim {dim}, expected an even one of 2 or more"
            )
        return dim

    def cos_sin_scale(self) -> float:
        """The factor of every cosine and sine: the attention temperature of yarn and longrope,
        else 1."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "longrope":
            assert self.original_max_position is not None
            if self.factor <= 1:
                return 1.0
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position))
        if self.mscale and self.mscale_all_dim:
            return _yarn_mscale(self.factor, self.mscale) / _yarn_mscale(
                self.factor, self.mscale_all_dim
            )
        return _yarn_mscale(self.factor, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
