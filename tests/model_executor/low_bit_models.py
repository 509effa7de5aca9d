"""Tiny models whose sizes are whole groups of the formats of 4 and 8 bits."""

from __future__ import annotations

from tests.model_executor.tiny_models import TinyModel

SIZES = {"hidden_size": 128, "head_dim": 32}
TINY = TinyModel("low-bit", "Llama", {**SIZES, "intermediate_size": 256})
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
QWEN3_MOE = TinyModel("low-bit-qwen3-moe", "Qwen3Moe", {**SIZES, **EXPERTS})
MIXTRAL = TinyModel(
    "low-bit-mixtral",
    "Mixtral",
    {**SIZES, "intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2},
)
SHARED = TinyModel(
    "low-bit-shared-expert",
    "Qwen2Moe",
    {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 256, "mlp_only_layers": [1]},
)
"""An expert that all tokens have, and a layer without experts."""
MOES = [QWEN3_MOE, MIXTRAL, SHARED]
DEEPSEEK = TinyModel(
    "low-bit-deepseek",
    "DeepseekV3",
    {
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 64,
        "head_dim": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
    },
)
"""Captured: a dense layer, then one of experts with one that is shared."""
