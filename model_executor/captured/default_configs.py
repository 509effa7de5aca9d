"""Configurations of model types without a folder: the library's defaults, completed where they
leave out what a model of that type is built and run with.

What is served never comes from here: a folder has its own configuration.
"""

from __future__ import annotations

from typing import Any

_MROPE = {"rope_theta": 1e7, "rope_type": "default", "mrope_section": [11, 11, 10]}
_INDEXER = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "rope_parameters": {"partial_rotary_factor": 0.25} | _MROPE,
}
_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
_ONE_FULL_IN_FOUR = ["full_attention"] + ["sliding_attention"] * 3
_MULTIPLIERS = {
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
}
_EVERY_FOURTH = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]

COMPLETIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "num_hidden_layers": 4,
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": None},
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "granite": _MULTIPLIERS,
    "granite_swa": _MULTIPLIERS,
    "granitemoe": _MULTIPLIERS,
    "granitemoe_swa": _MULTIPLIERS,
    "granitemoehybrid": {"layer_types": _EVERY_FOURTH * 8} | _MULTIPLIERS,
    "granitemoeshared": _MULTIPLIERS,
    "laguna": {"layer_types": _ONE_FULL_IN_FOUR * 10},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "mellum": {"layer_types": _ONE_FULL_IN_FOUR * 7},
    "minimax_m3_vl_text": {"layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57},
    "qwen3_5": {"text_config": {"rope_parameters": _MROPE}},
    "qwen3_5_text": {"rope_parameters": _MROPE},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "xmod": {"default_language": "en_XX"},
}
"""Model type -> values of fields that its class leaves out, or that its defaults make do nothing,
as checkpoints have them."""


def default_config(model_type: str) -> Any:
    """A complete ``PretrainedConfig`` of a model type; of a class that can be an encoder, too, it
    is that of a decoder.

    Raises:
        KeyError: the library has no such type.
        Exception: whatever the class raises that has no valid default.
    """
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    config = config_class(**COMPLETIONS.get(model_type, {}))
    missing: dict[str, Any] = {}
    if getattr(config, "is_decoder", None) is False:
        missing["is_decoder"] = True
    if vars(config).get("head_dim", 0) is None:
        missing["head_dim"] = config.hidden_size // config.num_attention_heads
    if vars(config).get("num_key_value_heads", 0) is None:
        missing["num_key_value_heads"] = config.num_attention_heads
    return config_class(**COMPLETIONS.get(model_type, {}), **missing) if missing else config
