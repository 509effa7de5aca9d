"""Checkpoint tensor names -> our parameters.  ``{}`` stands for the layer's number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..sharding import ModulePart as ModulePart

DENSE_DECODER: Mapping[str, ModulePart] = {
    "model.embed_tokens": ModulePart("embed"),
    "model.layers.{}.input_layernorm": ModulePart("layers.{}.attention_norm"),
    "model.layers.{}.self_attn.q_proj": ModulePart("layers.{}.attention.qkv", "q"),
    "model.layers.{}.self_attn.k_proj": ModulePart("layers.{}.attention.qkv", "k"),
    "model.layers.{}.self_attn.v_proj": ModulePart("layers.{}.attention.qkv", "v"),
    "model.layers.{}.self_attn.o_proj": ModulePart("layers.{}.attention.o"),
    "model.layers.{}.self_attn.q_norm": ModulePart("layers.{}.attention.q_norm"),
    "model.layers.{}.self_attn.k_norm": ModulePart("layers.{}.attention.k_norm"),
    "model.layers.{}.post_attention_layernorm": ModulePart("layers.{}.mlp_norm"),
    "model.layers.{}.mlp.gate_proj": ModulePart("layers.{}.mlp.gate_up", "gate"),
    "model.layers.{}.mlp.up_proj": ModulePart("layers.{}.mlp.gate_up", "up"),
    "model.layers.{}.mlp.down_proj": ModulePart("layers.{}.mlp.down"),
    "model.norm": ModulePart("norm"),
    "lm_head": ModulePart("lm_head"),
}
"""Names without their last component, ``weight`` or ``bias``."""

_QWEN_MOE: Mapping[str, ModulePart] = {
    **DENSE_DECODER,
    "model.layers.{}.mlp.gate": ModulePart("layers.{}.mlp.router"),
    "model.layers.{}.mlp.shared_expert.gate_proj": ModulePart(
        "layers.{}.mlp.shared.gate_up", "gate"
    ),
    "model.layers.{}.mlp.shared_expert.up_proj": ModulePart("layers.{}.mlp.shared.gate_up", "up"),
    "model.layers.{}.mlp.shared_expert.down_proj": ModulePart("layers.{}.mlp.shared.down"),
    "model.layers.{}.mlp.shared_expert_gate": ModulePart("layers.{}.mlp.shared_gate"),
}
QWEN_MOE: Mapping[str, ModulePart] = {
    **_QWEN_MOE,
    "model.layers.{}.mlp.experts.{}.gate_proj": ModulePart("layers.{}.mlp.experts.gate_up", "gate"),
    "model.layers.{}.mlp.experts.{}.up_proj": ModulePart("layers.{}.mlp.experts.gate_up", "up"),
    "model.layers.{}.mlp.experts.{}.down_proj": ModulePart("layers.{}.mlp.experts.down"),
}
"""A second ``{}`` stands for the expert's number."""
MIXTRAL: Mapping[str, ModulePart] = {
    **DENSE_DECODER,
    "model.layers.{}.block_sparse_moe.gate": ModulePart("layers.{}.mlp.router"),
    "model.layers.{}.block_sparse_moe.experts.{}.w1": ModulePart(
        "layers.{}.mlp.experts.gate_up", "gate"
    ),
    "model.layers.{}.block_sparse_moe.experts.{}.w3": ModulePart(
        "layers.{}.mlp.experts.gate_up", "up"
    ),
    "model.layers.{}.block_sparse_moe.experts.{}.w2": ModulePart("layers.{}.mlp.experts.down"),
}
FUSED_EXPERTS: Mapping[str, ModulePart] = {
    **_QWEN_MOE,
    "model.layers.{}.mlp.experts.gate_up_proj": ModulePart("layers.{}.mlp.experts.gate_up"),
    "model.layers.{}.mlp.experts.down_proj": ModulePart("layers.{}.mlp.experts.down"),
}
"""As transformers 5 holds any of these models in memory, and writes them when asked to: one tensor
for all experts, whose name has no last component."""


def checkpoint_names(
    weights: Mapping[str, ModulePart], num_layers: int, num_experts: int = 0, first_layer: int = 0
) -> Iterator[tuple[str, ModulePart]]:
    """Every name with its target, numbers of layers and experts filled in.  Checkpoints count the
    layers from ``first_layer`` on."""
    for name, target in weights.items():
        for layer in range(num_layers if "{}" in name else 1):
            module, number = target.module.format(layer), first_layer + layer
            if name.count("{}") < 2:
                yield name.format(number), ModulePart(module, target.part)
                continue
            for expert in range(num_experts):
                yield name.format(number, expert), ModulePart(module, target.part, expert)
