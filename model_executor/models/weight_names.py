"""Checkpoint tensor names -> our parameters.  ``{}`` stands for the layer's number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple


class ModulePart(NamedTuple):
    """The module that holds a checkpoint tensor, and its part when the parameter is fused."""

    module: str
    part: str = ""


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


def checkpoint_names(
    weights: Mapping[str, ModulePart], num_layers: int
) -> Iterator[tuple[str, ModulePart]]:
    """Every name with its target, layer numbers filled in."""
    for name, target in weights.items():
        for layer in range(num_layers if "{}" in name else 1):
            yield name.format(layer), ModulePart(target.module.format(layer), target.part)
