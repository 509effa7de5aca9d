"""The paged KV cache of every layer: its size in bytes and its memory."""

from __future__ import annotations

import torch
from torch import Tensor

from .spec import ModelSpec


def kv_cache_bytes_per_block(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block of ``block_size`` tokens takes over all layers."""
    per_token = 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize
    return spec.num_layers * block_size * per_token


def kv_cache_shape(spec: ModelSpec, num_blocks: int, block_size: int) -> tuple[int, ...]:
    """One layer's: [num_blocks, 2, block_size, num_kv_heads, head_dim]; index 1: K, V."""
    return (num_blocks, 2, block_size, spec.num_kv_heads, spec.head_dim)


def allocate_kv_caches(
    spec: ModelSpec,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> list[Tensor]:
    """One cache a layer, of ``kv_cache_shape``.

    Zeroed: a kernel may read whole blocks and mask by length afterwards, where a NaN left in
    fresh memory survives as 0 * NaN.
    """
    shape = kv_cache_shape(spec, num_blocks, block_size)
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.num_layers)]
