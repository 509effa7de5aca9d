"""The paged KV caches of all layers: their size in bytes and their memory."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from .cache_spec import KVCacheSpec, LayerGroup


def kv_cache_bytes_per_block(groups: Sequence[LayerGroup], block_size: int) -> int:
    """Bytes that one block id takes, in all layers of the group that holds it."""
    return _num_tensors(groups) * _layer_bytes(groups, block_size)


def allocate_kv_caches(
    groups: Sequence[LayerGroup], num_blocks: int, block_size: int, device: torch.device | str
) -> list[Tensor]:
    """One cache a layer, [num_blocks, *block shape of its spec].  Layers of different groups share
    memory, since a block id belongs to one group at a time.

    Zeroed: a kernel may read whole blocks and mask by length afterwards, where a NaN left in
    fresh memory survives as 0 * NaN.
    """
    num_bytes = _layer_bytes(groups, block_size)
    memory = [
        _zeros(num_blocks * num_bytes, device).view(num_blocks, num_bytes)
        for _ in range(_num_tensors(groups))
    ]
    caches: dict[int, Tensor] = {}
    for group in groups:
        spec = group.spec
        shape = (num_blocks, *spec.block_shape(block_size))
        for layer, blocks in zip(group.layers, memory, strict=False):
            content = blocks[:, : spec.block_bytes(block_size)]
            caches[layer] = content.view(spec.dtype).view(shape)
    return [caches[layer] for layer in sorted(caches)]


def allocate_hidden_caches(
    spec: KVCacheSpec, count: int, num_blocks: int, block_size: int, device: torch.device | str
) -> list[Tensor]:
    """``count`` caches of hidden states, [num_blocks, *block shape of ``spec``] each."""
    group = LayerGroup(spec, (0,))
    return [
        cache
        for _ in range(count)
        for cache in allocate_kv_caches([group], num_blocks, block_size, device)
    ]


def _zeros(num_bytes: int, device: torch.device | str) -> Tensor:
    """Zeroed bytes.  A CPU's lie in pages that become memory when they are first written, as most
    of its gigabyte of blocks never is: to write 200 MB of zeros takes 0.1 s of every start.

    Raises:
        MemoryError: a CPU's address space has no room for them.
    """
    if torch.device(device).type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{num_bytes} bytes: {error}") from error
    return torch.frombuffer(pages, dtype=torch.uint8)


def _num_tensors(groups: Sequence[LayerGroup]) -> int:
    return max(len(group.layers) for group in groups)


def _layer_bytes(groups: Sequence[LayerGroup], block_size: int) -> int:
    """Bytes of a block in one layer: of the kind that needs most, and so that every block begins at
    a multiple of 16, as any dtype and vector load needs."""
    most = max(group.spec.block_bytes(block_size) for group in groups)
    return -(-most // 16) * 16
