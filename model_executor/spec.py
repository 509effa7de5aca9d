"""``ModelSpec``: everything that tells one dense decoder from another, checked and frozen.

``hf_config`` makes it from a Hugging Face folder; modules, loader and KV cache read nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..config import outside_key
from ..ops.rotary_cache import RopeParameters


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model.

    ``max_position_embeddings`` counts the positions that rope scaling reaches;
    ``sliding_windows`` has one entry a layer, tokens including the current one, 0 for none.
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
    bos_token_id: int | None = field(
        metadata=outside_key("prompts are made outside of the program")
    )
    eos_token_ids: tuple[int, ...] = field(
        metadata=outside_key("stopping is decided outside of the program")
    )
