"""Defines what the sampling ops share: cleaned logits, their order, rows that have no token, and
stateless Gumbel noise.

The noise is a pure function of (seed, position, vocabulary index), written with integer operations
that PyTorch (int64, masked to 32 bits) and Triton (uint32) carry out identically; only the two
logarithms at its end may differ between them, in the last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Below this, temperature means greedy: 1 / temperature would overflow on ordinary logits.
GREEDY_TEMPERATURE = 1e-5
FLOAT32_MAX = 3.4028234663852886e38
# In place of a token id: the row has none.
NOT_A_NUMBER = -1  # a logit is NaN or, where a token is drawn, +inf
NOTHING_LEFT = -2  # no logit is above -inf
_MASK = 0xFFFFFFFF


def clean_logits(logits: Tensor) -> Tensor:
    """Logits as float32 in which NaN is -inf (it never wins) and +inf the largest finite value."""
    values = logits.float()
    return torch.where(values.isnan(), -torch.inf, values).clamp(max=FLOAT32_MAX)


def largest_of_rows(values: Tensor) -> Tensor:
    """Index of each row's largest value, the lowest of equals, as int32; ``NOT_A_NUMBER`` where one
    is NaN, ``NOTHING_LEFT`` where all are -inf."""
    best, index = values.max(dim=-1)  # NaN is its maximum
    token_ids = torch.where(best == -torch.inf, NOTHING_LEFT, index)
    return torch.where(best.isnan(), NOT_A_NUMBER, token_ids).int()


def ordered_bits(values: Tensor) -> Tensor:
    """Map float32 without NaN to int64 in [-2**31, 2**31) such that order is kept."""
    bits = (values + 0.0).view(torch.int32).long()  # + 0.0: -0 and 0 are one value
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _mix(h: Tensor) -> Tensor:
    """A bijective 32-bit mixer with low bias (C. Wellons, "lowbias32", 2018)."""
    h = h ^ (h >> 16)
    h = (h * 0x7FEB352D) & _MASK
    h = h ^ (h >> 15)
    h = (h * (0x846CA68B - (1 << 32))) & _MASK  # congruent, and the product fits int64
    return h ^ (h >> 16)


def _row_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """64 bits of state a row from its int64 seed and int32 position, as two 32-bit halves."""
    low, high = seeds & _MASK, (seeds >> 32) & _MASK
    position = positions.long() & _MASK
    key0 = _mix(_mix(_mix(low ^ 0x9E3779B9) ^ high) ^ position)
    key1 = _mix(_mix((_mix(high ^ 0x85EBCA6B) + low) & _MASK) ^ (_MASK - position))
    return key0, key1


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise, a pure function of (seed, position, index).

    Args:
        seeds: [num_seqs] int64.
        positions: [num_seqs] int32 or int64.
        vocab: number of columns.

    Returns:
        [num_seqs, vocab] float32, finite, between -2.9 and 22.9.
    """
    key0, key1 = _row_keys(seeds, positions)
    index = torch.arange(vocab, dtype=torch.int64, device=seeds.device)
    h = _mix((_mix(index ^ key0[:, None]) + key1[:, None]) & _MASK)
    # Large noise, which decides, is small w: keep all 32 bits there instead of computing 1 - w.
    w = torch.clamp((h.float() + 0.5) * 2.0**-32, max=1.0 - 2.0**-24)
    series = w * (1.0 + w * (0.5 + w * (1.0 / 3.0 + w * 0.25)))
    exponential = torch.where(w < 1.0 / 64.0, series, -torch.log(1.0 - w))
    return -torch.log(exponential)


def chance(seeds: Tensor, positions: Tensor) -> Tensor:
    """[num_seqs] float32, evenly from 0 to below 1: a pure function of (seed, position), both
    int32."""
    mixed = _mix(_mix((seeds.long() & _MASK) ^ 0x9E3779B9) ^ (positions.long() & _MASK))
    return (mixed >> 8).float() * 2.0**-24
