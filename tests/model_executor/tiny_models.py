"""Tiny random models of every supported kind, as transformers makes and saves them.

They share dimensions wherever the feature under test allows, so that compiled kernels are shared.
Weights are drawn so wide that logits span several units and a wrong feature moves them far beyond
any tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

MAX_POSITIONS = 512
TRAINED_POSITIONS = 32  # of rope scalings: tests reach far beyond


@dataclass(frozen=True)
class TinyModel:
    """One configuration; ``config()`` and ``model()`` make fresh transformers objects."""

    name: str
    family: str
    options: dict[str, Any]

    def config(self) -> PretrainedConfig:
        common = {
            "architectures": [f"{self.family}ForCausalLM"],
            "vocab_size": 128,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": MAX_POSITIONS,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
        }
        return getattr(transformers, f"{self.family}Config")(**common | self.options)

    def model(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """The transformers model with its random weights, the same on every call."""
        model = getattr(transformers, f"{self.family}ForCausalLM")(self.config())
        generator = torch.Generator().manual_seed(sum(map(ord, self.name)))
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(_random(name, param.shape, generator))
        return model.to(dtype).eval()

    def save(self, folder: Path, *, max_shard_size: str | int = "5GB") -> PreTrainedModel:
        """Write a Hugging Face folder; returns the model that was saved."""
        model = self.model()
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        return model


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.2 * values
    if name.endswith("bias"):
        return 0.3 * values
    if "embed_tokens" in name:
        return 0.5 * values
    return values * 1.5 / shape[-1] ** 0.5


def _rope(rope_type: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **options}}


TINY_MODELS = [
    TinyModel("llama_gqa", "Llama", {}),
    TinyModel("llama_mqa", "Llama", {"num_key_value_heads": 1}),
    TinyModel("llama_mha_tied", "Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    TinyModel("llama_bias", "Llama", {"attention_bias": True, "mlp_bias": True}),
    TinyModel("llama_rope_linear", "Llama", _rope("linear", factor=4.0)),
    TinyModel(
        "llama_rope_llama3",
        "Llama",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=TRAINED_POSITIONS,
        ),
    ),
    TinyModel(
        "llama_rope_yarn",
        "Llama",
        _rope("yarn", factor=16.0, original_max_position_embeddings=TRAINED_POSITIONS),
    ),
    TinyModel("mistral_window", "Mistral", {"sliding_window": 8}),
    TinyModel("mistral_head_dim", "Mistral", {"sliding_window": None, "head_dim": 32}),
    TinyModel("qwen2_bias_tied", "Qwen2", {"tie_word_embeddings": True}),
    TinyModel(
        "qwen2_window",
        "Qwen2",
        # Three groups of KV caches: two layers with a window for one without.
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
        },
    ),
    TinyModel("qwen3_qk_norm", "Qwen3", {}),
    TinyModel("qwen3_head_dim_tied", "Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
]
MOE_MODELS = [
    TinyModel("mixtral", "Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    TinyModel(
        "qwen2_moe",
        "Qwen2Moe",
        # A dense layer between two with experts, of which one is shared and gated.
        {
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 96,
        },
    ),
    TinyModel(
        "qwen3_moe",
        "Qwen3Moe",
        {
            "num_experts": 16,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
    ),
]
TINY_MODELS += MOE_MODELS
BY_NAME = {tiny.name: tiny for tiny in TINY_MODELS}
