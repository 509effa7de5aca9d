"""Unmodified models whose rotary embedding, or gated activation, is another than Llama's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusewright.compiler.dynamo_backend import fusewright, reports
from tests.compiler.tiny_transformers import fresh_dynamo, tiny_model

GPTJ = {"n_embd": 64, "n_layer": 1, "n_head": 4, "rotary_dim": 8, "n_positions": 64}
DEEPSEEK = {
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "first_k_dense_replace": 1,
}
LLAMA_4 = {"intermediate_size_mlp": 96, "num_local_experts": 2, "interleave_moe_layer_step": 2}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
MODERN_BERT = {"cls_token_id": 1, "sep_token_id": 2}
GEMMA_4 = {
    "layer_types": ["full_attention"],
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "hidden_size_per_layer_input": 0,
}
# Sites of norms, also of those without a weight, and of gated activations.
MODELS: list[tuple[str, dict[str, Any], int, int]] = [
    ("Glm", {}, 3, 1),
    ("Cohere", {}, 2, 1),
    ("GPTJ", GPTJ, 0, 0),
    ("DeepseekV2", DEEPSEEK, 4, 1),
    ("DeepseekV3", DEEPSEEK, 4, 1),
    ("Llama4Text", LLAMA_4, 5, 1),
    ("GptOss", GPT_OSS, 3, 1),
    ("Olmo2", {}, 5, 1),
    ("Ernie4_5", {}, 3, 1),
    ("Gemma4Text", GEMMA_4, 8, 1),
    ("ModernBert", MODERN_BERT, 0, 0),
]
CLASSES = {
    "Llama4Text": "Llama4ForCausalLM",
    "Gemma4Text": "Gemma4ForCausalLM",
    "ModernBert": "ModernBertModel",
}


fresh = pytest.fixture(autouse=True)(fresh_dynamo)


def tiny(name: str, more: dict[str, Any]) -> Any:
    return tiny_model(f"{name}Config", CLASSES.get(name, f"{name}ForCausalLM"), more)


@pytest.mark.product(6)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize(
    ("name", "more", "norms", "acts"), MODELS, ids=[name for name, *_ in MODELS]
)
def test_its_rotation_is_fused_and_its_outputs_stay(
    name: str, more: dict[str, Any], norms: int, acts: int
) -> None:
    model = tiny(name, more)
    prompt = torch.randint(3, 128, (2, 9))
    want = model(prompt)[0].float()
    run = torch.compile(model, backend=fusewright, options={"rest": "eager"})
    assert (run(prompt)[0].float() - want).abs().max() < 0.02 * want.abs().max()
    (report,) = reports()
    found = {one.name: one for one in report.passes}
    assert report.matched("canonicalize_rope") == 2
    assert report.matched("canonicalize_norm") == norms
    assert report.matched("fuse_act") == acts
    missed = [site.reason for one in found.values() for site in one.missed]
    assert not missed
