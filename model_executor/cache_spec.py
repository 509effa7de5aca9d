"""Describes what each layer keeps of earlier tokens, and which layers share block ids.

A ``KVCacheSpec`` describes one layer's cache.  Layers of equal spec form groups of equally many
layers; a group has a block table of its own, and every block id stands for one block in each of its
layers.  Groups take their blocks from one pool, so the blocks of all layers have the same size in
bytes, that of the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CacheKind:
    """How a layer lays out a block.

    Attributes:
        block_shape: (spec, tokens a block) -> shape of one block in one layer.
        per_sequence: a block holds a state of fixed size for its whole sequence, not tokens.
    """

    name: str
    block_shape: Callable[[KVCacheSpec, int], tuple[int, ...]]
    per_sequence: bool = False


@dataclass(frozen=True)
class KVCacheSpec:
    """The cache of one layer.

    Attributes:
        head_dims: widths of what is stored for a head; their meaning is the kind's.
        window: tokens that a query sees, itself included; 0: all.
    """

    kind: CacheKind
    num_kv_heads: int
    head_dims: tuple[int, ...]
    dtype_name: str
    window: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.dtype_name)

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        return self.kind.block_shape(self, block_size)

    def block_bytes(self, block_size: int) -> int:
        """Bytes that a block's content takes in one layer."""
        return prod(self.block_shape(block_size)) * self.dtype.itemsize


KV_PAIRS = CacheKind(
    "kv", lambda spec, block_size: (2, block_size, spec.num_kv_heads, *spec.head_dims)
)
"""[2, block_size, num_kv_heads, head_dim]; index 0: K, V."""


@dataclass(frozen=True)
class LayerGroup:
    """Layers of equal spec that share a block table."""

    spec: KVCacheSpec
    layers: tuple[int, ...]


_MOST_GROUPS_OF_A_SPEC = 8


def group_layers(specs: Sequence[KVCacheSpec]) -> tuple[LayerGroup, ...]:
    """Divide a model's layers into groups, each of as many layers as the rarest spec has, or of
    fewer in the last of a spec, as in vLLM's hybrid KV cache manager.  Groups of equal size waste
    nothing of a block, whichever group takes it.  An eighth of the layers is the least, since a
    step carries a block table for each group."""
    by_spec: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        by_spec.setdefault(spec, []).append(layer)
    size = max(min(map(len, by_spec.values())), -(-len(specs) // _MOST_GROUPS_OF_A_SPEC))
    return tuple(
        LayerGroup(spec, tuple(layers[first : first + size]))
        for spec, layers in by_spec.items()
        for first in range(0, len(layers), size)
    )


def torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype
