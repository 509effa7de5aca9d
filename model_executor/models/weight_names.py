"""Checkpoint tensor names -> our parameters.  ``{}`` stands for the layer's number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Target(NamedTuple):
    """The module that holds a checkpoint tensor, and its part when the parameter is fused."""

    module: str
    part: str = ""


DENSE_DECODER: Mapping[str, Target] = {
    "model.embed_tokens": Target("embed"),
    "model.layers.{}.input_layernorm": Target("layers.{}.attention_norm"),
    "model.layers.{}.self_attn.q_proj": Target("layers.{}.attention.qkv", "q"),
    "model.layers.{}.self_attn.k_proj": Target("layers.{}.attention.qkv", "k"),
    "model.layers.{}.self_attn.v_proj": Target("layers.{}.attention.qkv", "v"),
    "model.layers.{}.self_attn.o_proj": Target("layers.{}.attention.o"),
    "model.layers.{}.self_attn.q_norm": Target("layers.{}.attention.q_norm"),
    "model.layers.{}.self_attn.k_norm": Target("layers.{}.attention.k_norm"),
    "model.layers.{}.post_attention_layernorm": Target("layers.{}.mlp_norm"),
    "model.layers.{}.mlp.gate_proj": Target("layers.{}.mlp.gate_up", "gate"),
    "model.layers.{}.mlp.up_proj": Target("layers.{}.mlp.gate_up", "up"),
    "model.layers.{}.mlp.down_proj": Target("layers.{}.mlp.down"),
    "model.norm": Target("norm"),
    "lm_head": Target("lm_head"),
}
"""Names without their last component, ``weight`` or ``bias``."""


def checkpoint_names(
    weights: Mapping[str, Target], num_layers: int
) -> Iterator[tuple[str, Target]]:
    """Every name with its target, layer numbers filled in."""
    for name, target in weights.items():
        for layer in range(num_layers if "{}" in name else 1):
            yield name.format(layer), Target(target.module.format(layer), target.part)
