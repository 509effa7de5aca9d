"""EAGLE-3 heads with random weights, and what they draft by plain torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from fusewright.model_executor.hf_config import model_folder

HIDDEN, HEADS, HEAD_DIM, INNER, VOCAB, DRAFT_VOCAB, EPS = 256, 2, 64, 96, 272, 40, 1e-5
KEPT = (1, 3, 5)


def config_of(**changes: Any) -> dict[str, Any]:
    """The config of a head for abacus."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": EPS,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "max_position_embeddings": 512,
        "eagle_aux_hidden_state_layer_ids": list(KEPT),
    } | changes


def random_weights(seed: int = 0) -> dict[str, Tensor]:
    """By the names of published heads; norms differ from one so that none can be left out."""
    gen = torch.Generator().manual_seed(seed)
    layer, size = "midlayer.", HEADS * HEAD_DIM
    shapes = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        f"{layer}self_attn.q_proj.weight": (size, 2 * HIDDEN),
        f"{layer}self_attn.k_proj.weight": (HEAD_DIM, 2 * HIDDEN),
        f"{layer}self_attn.v_proj.weight": (HEAD_DIM, 2 * HIDDEN),
        f"{layer}self_attn.o_proj.weight": (HIDDEN, size),
        f"{layer}mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{layer}mlp.up_proj.weight": (INNER, HIDDEN),
        f"{layer}mlp.down_proj.weight": (HIDDEN, INNER),
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
    }
    weights = {
        name: torch.randn(shape, generator=gen) * shape[1] ** -0.5 for name, shape in shapes.items()
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    for name in (*(f"{layer}{norm}.weight" for norm in norms), "norm.weight"):
        weights[name] = 1 + 0.3 * torch.randn(HIDDEN, generator=gen)
    tokens = torch.randperm(VOCAB, generator=gen)[:DRAFT_VOCAB].sort().values
    weights["d2t"] = tokens - torch.arange(DRAFT_VOCAB)
    weights["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, tokens, True)
    return weights


def save_head(folder: Path, weights: dict[str, Tensor], config: dict[str, Any]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return str(folder)


class Reference:
    """A head over the library's implementation of abacus, in float32, without a cache."""

    def __init__(self, weights: dict[str, Tensor], *, norm_before_residual: bool = False) -> None:
        folder = model_folder("abacus")
        self.target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
        self.weights, self.before = weights, norm_before_residual
        self.kept: dict[int, Tensor] = {}
        layers = self.target.model.layers
        for place in KEPT:
            module = self.target.model.norm if place == len(layers) else layers[place]
            module.register_forward_pre_hook(
                lambda module, args, place=place: self.kept.update({place: args[0][0]})
            )

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights.get(f"midlayer.{name}.weight", self.weights.get(f"{name}.weight"))
        return F.rms_norm(x, (HIDDEN,), weight, EPS)

    def layer(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """[rows, hidden] of both -> the residual stream behind the layer."""
        normed = self.norm(hidden, "hidden_norm")
        x = torch.cat((self.norm(embedded, "input_layernorm"), normed), -1)
        q, k, v = (
            F.linear(x, self.weights[f"midlayer.self_attn.{part}_proj.weight"])
            .unflatten(-1, (-1, HEAD_DIM))
            .transpose(0, 1)
            for part in "qkv"
        )
        angles = torch.arange(len(x))[:, None] * 10_000.0 ** -(
            torch.arange(0, HEAD_DIM, 2) / HEAD_DIM
        ).repeat(2)
        q, k = (
            part * angles.cos() + torch.cat((-part[..., 32:], part[..., :32]), -1) * angles.sin()
            for part in (q, k)
        )
        y = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), is_causal=True)
        y = F.linear(y.transpose(0, 1).flatten(1), self.weights["midlayer.self_attn.o_proj.weight"])
        x = (normed if self.before else hidden) + y
        gate, up, down = (
            self.weights[f"midlayer.mlp.{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        h = self.norm(x, "post_attention_layernorm")
        return x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """The likeliest drafts behind known ``tokens``."""
        self.target(torch.tensor([tokens[:-1]]))
        kept = torch.cat([self.kept[place] for place in KEPT], -1)
        hidden = F.linear(kept, self.weights["fc.weight"])
        ids, drafts = list(tokens[1:]), list[int]()
        for _ in range(count):
            out = self.layer(self.embedding[ids].float(), hidden)[-1:]
            logits = F.linear(self.norm(out, "norm"), self.weights["lm_head.weight"])
            number = int(logits.argmax())
            drafts.append(number + int(self.weights["d2t"][number]))
            ids.append(drafts[-1])
            hidden = torch.cat((hidden, out))
        return drafts
