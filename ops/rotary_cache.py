"""The cos/sin tables of rotary embeddings, with the scalings that models publish.

A model's ``config.json`` becomes one frozen ``RopeParameters``; the table is built once, in
float32, and is an ordinary argument of ``rotary_embedding``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

RopeKind = Literal["default", "linear", "llama3", "yarn"]
ROPE_KINDS: tuple[str, ...] = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeParameters:
    """One model's rotary embedding, under the names of Hugging Face's ``rope_parameters``.

    theta: base of the wavelengths.
    factor: by how much the context was stretched (linear, llama3, yarn).
    original_max_position: context length before stretching (llama3, yarn).
    low_freq_factor, high_freq_factor: the band that llama3 blends over.
    beta_fast, beta_slow: rotations within the original context that bound yarn's ramp.
    attention_factor: multiplies cos and sin under yarn; None derives it from ``factor`` and, when
        both are given, from ``mscale`` and ``mscale_all_dim``.
    truncate: round yarn's ramp outwards to whole dimensions.
    partial_rotary_factor: the share of a head's dimensions that rotate.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
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
        if self.kind in ("llama3", "yarn") and not self.original_max_position:
            raise ValueError(
                f"rope kind {self.kind!r} needs original_max_position, the context length before "
                f"scaling; it is {self.original_max_position}"
            )
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor} must exceed low_freq_factor "
                f"{self.low_freq_factor}"
            )

    def rotary_dim(self, head_dim: int) -> int:
        """How many dimensions of a head rotate.  Raises ValueError when that is odd or zero."""
        dim = int(head_dim * self.partial_rotary_factor)
        if dim < 2 or dim % 2:
            raise ValueError(
                f"head_dim {head_dim} x partial_rotary_factor {self.partial_rotary_factor} gives "
                f"rotary_dim {dim}, expected an even one of 2 or more"
            )
        return dim

    def cos_sin_scale(self) -> float:
        """What multiplies every cosine and sine: yarn's attention temperature, else 1."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _yarn_mscale(self.factor, self.mscale) / _yarn_mscale(
                self.factor, self.mscale_all_dim
            )
        return _yarn_mscale(self.factor, 1.0)


def inverse_frequencies(parameters: RopeParameters, rotary_dim: int) -> Tensor:
    """Radians a position, [rotary_dim / 2] float32 on CPU, after scaling.

    The order of float32 operations is that of Hugging Face: one bit of a frequency, multiplied by a
    large position, shows.
    """
    frequencies = 1.0 / parameters.theta ** _exponents(rotary_dim)
    if parameters.kind == "linear":
        return frequencies / parameters.factor
    if parameters.kind == "llama3":
        return _llama3(parameters, frequencies)
    if parameters.kind == "yarn":
        return _yarn(parameters, frequencies, rotary_dim)
    return frequencies


def build_cos_sin_cache(
    parameters: RopeParameters,
    head_dim: int,
    max_position: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The table ``rotary_embedding`` reads.

    Args:
        parameters: base and scaling.
        head_dim: dimensions of an attention head.
        max_position: number of positions, 1 or more.
        dtype: of the table; it is computed in float32 and the op expects float32.
        device: where the table is put.  It is computed on the CPU, so that the same model has the
            same table on every device.

    Returns:
        [max_position, rotary_dim]: rotary_dim / 2 cosines, then as many sines.
    """
    if max_position < 1:
        raise ValueError(f"max_position is {max_position}, expected 1 or more")
    frequencies = inverse_frequencies(parameters, parameters.rotary_dim(head_dim))
    angles = torch.arange(max_position, dtype=torch.float32)[:, None] * frequencies
    table = torch.cat((angles.cos(), angles.sin()), dim=-1) * parameters.cos_sin_scale()
    return table.to(device=device, dtype=dtype)


def _exponents(rotary_dim: int) -> Tensor:
    return torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim


def _llama3(parameters: RopeParameters, frequencies: Tensor) -> Tensor:
    """Stretch long wavelengths, keep short ones, blend between (Llama 3.1 model code)."""
    assert parameters.original_max_position is not None
    rotations = parameters.original_max_position / (2 * math.pi / frequencies)
    low, high = parameters.low_freq_factor, parameters.high_freq_factor
    keep = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * frequencies / parameters.factor + keep * frequencies


def _yarn(parameters: RopeParameters, frequencies: Tensor, rotary_dim: int) -> Tensor:
    """Ramp from kept to stretched by dimension (Peng et al., 2023, YaRN, section 3.2)."""
    assert parameters.original_max_position is not None
    context = parameters.original_max_position

    def dimension(rotations: float) -> float:
        """Which dimension turns this often within the original context."""
        wavelengths = context / (2 * math.pi * rotations)
        return rotary_dim * math.log(wavelengths) / (2 * math.log(parameters.theta))

    low, high = dimension(parameters.beta_fast), dimension(parameters.beta_slow)
    if parameters.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # a step, without dividing by zero
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)
    keep = 1 - ramp.clamp(0, 1)
    stretched = 1.0 / (parameters.factor * parameters.theta ** _exponents(rotary_dim))
    return stretched * (1 - keep) + frequencies * keep


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
