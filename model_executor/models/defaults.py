"""What a field of ``config.json`` is where the file leaves it out: the default of the family's own
configuration class in transformers 5.23.

None: there is no number; the reader says what it stands for.  Fields that a family does not have
are not read for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DENSE: Mapping[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
LLAMA: Mapping[str, Any] = {
    **_DENSE,
    "vocab_size": 32_000,
    "intermediate_size": 11_008,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
}
MISTRAL: Mapping[str, Any] = {
    **_DENSE,
    "vocab_size": 32_000,
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
MIXTRAL: Mapping[str, Any] = {
    **MISTRAL,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN2: Mapping[str, Any] = {
    **_DENSE,
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
QWEN3: Mapping[str, Any] = {**QWEN2, "head_dim": 128, "attention_bias": False}
_QWEN_MOE: Mapping[str, Any] = {
    **_DENSE,
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": False,
}
QWEN2_MOE: Mapping[str, Any] = {
    **_QWEN_MOE,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_window_layers": 28,
    "layer_types": None,
    "qkv_bias": True,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
QWEN3_MOE: Mapping[str, Any] = {
    **_QWEN_MOE,
    "intermediate_size": 6144,
    "num_key_value_heads": 4,
    "attention_bias": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
