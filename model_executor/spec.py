"""``ModelSpec``: everything that tells one dense decoder from another, checked and frozen.

``hf_config`` makes it from a Hugging Face folder, options then set ``dtype``, ``quant`` and
``fp8_kv_cache``; modules, loader and KV cache read nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..config import UserError
from ..ops.rotary_cache import RopeParameters
from .quant.scheme import BLOCK, FP8, LINEARS, QuantKind, QuantScheme


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model.

    ``max_position_embeddings`` counts the positions that rope scaling reaches;
    ``sliding_windows`` has one entry a layer, tokens including the current one, 0 for none;
    ``dtype`` is that of activations and of weights that ``quant`` leaves as they are.
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
    dtype: torch.dtype
    quant: QuantScheme | None = None
    fp8_kv_cache: bool = False

    @property
    def kv_cache_dtype(self) -> torch.dtype:
        return FP8 if self.fp8_kv_cache else self.dtype

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
    left = tuple(n for n in LINEARS if kind == "fp8_block" and spec.in_features(n) % BLOCK)
    if left == LINEARS:
        raise UserError(
            f"quantization={kind}: no linear layer of the model reads a multiple of {BLOCK} "
            "features; use fp8"
        )
    return replace(spec, quant=QuantScheme(kind, (left,) * spec.num_layers, online=True))
