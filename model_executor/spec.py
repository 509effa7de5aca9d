"""``ModelSpec``: everything that tells one dense decoder from another, checked and frozen.

``hf_config`` makes it from a Hugging Face folder, options then set ``dtype_name``, ``quant``
and ``fp8_kv_cache``; modules, loader and KV cache read nothing else.  It is made without torch, so
that a bad config is refused before torch is imported, which takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ..config import UserError
from ..config.rope import RopeParameters
from .cache_spec import KV_PAIRS, KVCacheSpec, LayerGroup, group_layers, torch_dtype
from .quant.scheme import BLOCK, FORMATS, LINEARS, QuantKind, QuantScheme

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model.

    ``max_position_embeddings`` counts the positions that rope scaling reaches;
    ``sliding_windows`` has one entry a layer, tokens including the current one, 0 for none;
    ``dtype_name`` is the ``dtype`` of activations and of weights that ``quant`` leaves as they
    are; ``group_of_layer`` has the cache group of each layer, if not as ``group_layers`` would.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeParameters
    hidden_act: str
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int, ...]
    dtype_name: str
    quant: QuantScheme | None = None
    fp8_kv_cache: bool = False
    group_of_layer: tuple[int, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.dtype_name)

    @cached_property
    def cache_groups(self) -> tuple[LayerGroup, ...]:
        """Layers by the KV cache that they share."""
        dtype_name = "float8_e4m3fn" if self.fp8_kv_cache else self.dtype_name
        specs = [
            KVCacheSpec(KV_PAIRS, self.num_kv_heads, (self.head_dim,), dtype_name, window)
            for window in self.sliding_windows
        ]
        if not self.group_of_layer:
            return group_layers(specs)
        found: dict[int, list[int]] = {group: [] for group in sorted(set(self.group_of_layer))}
        for layer, group in enumerate(self.group_of_layer):
            found[group].append(layer)
        return tuple(LayerGroup(specs[layers[0]], tuple(layers)) for layers in found.values())

    def cache_group(self, layer: int) -> int:
        """Number of the group that a layer belongs to."""
        return next(i for i, group in enumerate(self.cache_groups) if layer in group.layers)

    def quant_of(self, layer: int, linear: str) -> QuantKind | None:
        """How one of ``quant.scheme.LINEARS`` is quantized; None: not at all."""
        return self.quant.kind_of(layer, linear) if self.quant else None

    def in_features(self, linear: str) -> int:
        """Columns of the weight of one of ``LINEARS``."""
        heads = self.num_heads * self.head_dim
        columns = (self.hidden_size, heads, self.hidden_size, self.intermediate_size)
        return dict(zip(LINEARS, columns, strict=True))[linear]


def quantize_online(spec: ModelSpec, kind: QuantKind) -> ModelSpec:
    """``spec`` with weights that are quantized while they are loaded: all of ``LINEARS``, but by
    blocks only those that whole blocks read.

    Raises:
        UserError: there are none.
    """
    check_online_kind(spec, kind)
    left = _left_by_blocks(spec, kind)
    return replace(spec, quant=QuantScheme(kind, (left,) * spec.num_layers, online=True))


def check_online_kind(spec: ModelSpec, kind: str) -> None:
    """Refuse a kind of quantization that fits none of the ``LINEARS``.

    Raises:
        UserError: names another kind.
    """
    if _left_by_blocks(spec, kind) == LINEARS:
        raise UserError(
            f"quantization={kind}: no linear layer of the model reads a multiple of {BLOCK} "
            "features; use fp8"
        )


def _left_by_blocks(spec: ModelSpec, kind: str) -> tuple[str, ...]:
    """The ``LINEARS`` that no whole blocks read."""
    columns = FORMATS[kind].columns
    return tuple(n for n in LINEARS if columns and spec.in_features(n) % columns)
