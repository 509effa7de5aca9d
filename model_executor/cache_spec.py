"""Describes what each layer keeps of earlier tokens, and which layers share block ids.

A ``KVCacheSpec`` describes one layer's cache.  Layers of equal spec form groups of equally many
layers; a group has a block table of its own, and every block id stands for one block in each of its
layers.  Groups take their blocks from one pool, so the blocks of all layers have the same size in
bytes, that of the largest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd, prod
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
        window: the most tokens that a query sees, itself included; 0: all.  That of a layer with
            chunks is a chunk.
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


_WIDEST_PIECE = 128


def hidden_cache_spec(hidden_size: int, dtype_name: str) -> KVCacheSpec:
    """The cache of one hidden state a token, for draft heads.  A state is stored by the kernels of
    keys and values: its first half lies where a key would, its second half where a value would,
    so its size must be even.
    """
    half = hidden_size // 2
    width = gcd(half, _WIDEST_PIECE)
    return KVCacheSpec(KV_PAIRS, half // width, (width,), dtype_name)


@dataclass(frozen=True)
class LayerGroup:
    """Layers of equal spec that share a block table."""

    spec: KVCacheSpec
    layers: tuple[int, ...]


_MOST_GROUPS_OF_A_SPEC = 8


def stage_layers(num_layers: int, num_stages: int) -> list[range]:
    """The layers of each stage, whose numbers differ by one at most."""
    ends = [number * num_layers // num_stages for number in range(num_stages + 1)]
    return list(map(range, ends, ends[1:]))


def group_layers(specs: Sequence[KVCacheSpec], num_stages: int = 1) -> tuple[LayerGroup, ...]:
    """Divide a model's layers into groups, each of as many layers as the rarest spec has, or of
    fewer in the last of a spec, as in vLLM's hybrid KV cache manager.  Groups of equal size waste
    nothing of a block, whichever group takes it.  An eighth of the layers is the least, since a
    step carries a block table for each group.

    Args:
        specs: of every layer.
        num_stages: of the pipeline.  The ranks of a stage have KV caches of its layers alone, so
            layers are counted by stage, and a group has layers of all stages that still have some
            of its spec.
    """
    by_spec: dict[KVCacheSpec, list[list[int]]] = {}
    stages = stage_layers(len(specs), num_stages)
    for number, stage in enumerate(stages):
        for layer in stage:
            by_spec.setdefault(specs[layer], [[] for _ in stages])[number].append(layer)
    most = {spec: max(map(len, found)) for spec, found in by_spec.items()}
    size = max(min(most.values()), -(-max(map(len, stages)) // _MOST_GROUPS_OF_A_SPEC))
    return tuple(
        LayerGroup(spec, tuple(n for layers in found for n in layers[first : first + size]))
        for spec, found in by_spec.items()
        for first in range(0, most[spec], size)
    )


def torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype
