"""Makes the cos/sin tables of rotary embeddings, with the scalings that models publish.

A model's ``RopeParameters`` become one table, built once, in float32, which is an ordinary argument
of ``rotary_embedding``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...config.rope import RopeParameters


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
    if parameters.kind == "longrope":
        return _longrope(parameters, rotary_dim)
    if parameters.kind == "proportional":
        return _proportional(parameters, frequencies)
    return frequencies


def build_cos_sin_cache(parameters: RopeParameters, head_dim: int, max_position: int) -> Tensor:
    """The table ``rotary_embedding`` reads, computed on the CPU, so that the same model has the
    same table on every device.

    Args:
        parameters: base and scaling.
        head_dim: dimensions of an attention head.
        max_position: number of positions, 1 or more.

    Returns:
        [max_position, rotary_dim] float32: rotary_dim / 2 cosines, then as many sines.
    """
    if max_position < 1:
        raise ValueError(f"max_position is {max_position}, expected 1 or more")
    frequencies = inverse_frequencies(parameters, parameters.rotary_dim(head_dim))
    angles = torch.arange(max_position, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * parameters.cos_sin_scale()


def _longrope(parameters: RopeParameters, rotary_dim: int) -> Tensor:
    """A factor of its own for each frequency (Ding et al., 2024, LongRoPE)."""
    if len(parameters.short_factor) != rotary_dim // 2:
        raise ValueError(
            f"longrope's short_factor has {len(parameters.short_factor)} numbers, expected "
            f"{rotary_dim // 2}, half of rotary_dim {rotary_dim}"
        )
    factors = torch.tensor(parameters.short_factor, dtype=torch.float32)
    return 1.0 / (factors * parameters.theta ** _exponents(rotary_dim))


def _proportional(parameters: RopeParameters, frequencies: Tensor) -> Tensor:
    """The higher frequencies of a whole head; its other dimensions do not rotate."""
    num_rotating = int(parameters.partial_rotary_factor * len(frequencies))
    rotates = torch.arange(len(frequencies)) < num_rotating
    return torch.where(rotates, frequencies, 0.0) / parameters.factor


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
        """The dimension that turns this often within the original context."""
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
