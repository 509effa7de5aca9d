"""The one decoder block: Llama, Mistral, Mixtral and Qwen differ by ``ModelSpec`` alone.

Residual adds and activations are written plainly; passes raise them to fused ops.  Sizes that
depend on the batch are never read, so that one trace serves every batch.

Shape suffixes: T tokens, H query heads, G KV heads, D head_dim.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch
from torch import Tensor, nn

from ... import ops
from ...ops.attention.rotary_cache import build_cos_sin_cache
from ..attention import AttentionInputs
from ..heads.spec import BEHIND_NORM
from ..layers import Embedding, Linear, LMHead, RMSNorm, qkv_linear, row_linear
from ..spec import ModelSpec
from .moe import GatedMLP, MoE


class Attention(nn.Module):
    """Grouped-query attention over the paged KV cache (Ainslie et al., 2023)."""

    kv_scale: Tensor | None

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        world = spec.tensor_parallel_size
        self.sizes = [n * spec.head_dim for n in (spec.local_heads, *[spec.local_kv_heads] * 2)]
        self.scale = spec.head_dim**-0.5
        self.sliding_window = spec.sliding_windows[layer]
        self.cache_group = spec.cache_group(layer)
        self.qkv = qkv_linear(
            spec.hidden_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            bias=spec.qkv_bias,
            quant=spec.quant_of(layer, "attention.qkv"),
            world=world,
        )
        self.o = row_linear(
            spec.num_heads * spec.head_dim,
            spec.hidden_size,
            bias=spec.o_bias,
            units=spec.num_heads,
            quant=spec.quant_of(layer, "attention.o"),
            world=world,
        )
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else None
        # [2, num_kv_heads]: of keys and of values; ones unless the checkpoint knows better.
        kv_scale = torch.ones(2, spec.local_kv_heads) if spec.fp8_kv_cache else None
        self.register_buffer("kv_scale", kv_scale)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        inputs: AttentionInputs,
        kv_cache: Tensor,
        cos_sin_cache: Tensor,
    ) -> Tensor:
        """[num_tokens, hidden_size] of the heads' outputs, ahead of ``o``."""
        q_THD, k_TGD, v_TGD = (
            part.view(-1, size // self.head_dim, self.head_dim)
            for part, size in zip(self.qkv(x).split(self.sizes, dim=-1), self.sizes, strict=True)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_THD, k_TGD = self.q_norm(q_THD), self.k_norm(k_TGD)
        q_THD, k_TGD = ops.rotary_embedding(positions, q_THD, k_TGD, cos_sin_cache)
        cache = inputs.groups[self.cache_group]
        ops.kv_store(k_TGD, v_TGD, kv_cache, cache.slot_mapping, self.kv_scale)
        out_THD = torch.empty_like(q_THD)
        ops.paged_attention(
            q_THD,
            kv_cache,
            cache.block_table,
            inputs.seq_lens,
            inputs.query_start_loc,
            out_THD,
            self.scale,
            self.sliding_window,
            0.0,
            self.kv_scale,
        )
        return out_THD.view(-1, self.sizes[0])


def keep_hidden(x: Tensor, spec: ModelSpec, place: int, inputs: AttentionInputs) -> None:
    """Store the hidden states [num_tokens, hidden_size] of a place, if a draft head reads them,
    where the layers that keep all tokens store theirs."""
    if place not in spec.kept or spec.whole_group is None:
        return
    cache = inputs.hidden_caches[spec.kept.index(place)]
    low, high = x.view(-1, 2, *cache.shape[3:]).unbind(1)
    slots = inputs.groups[spec.whole_group].slot_mapping
    ops.kv_store(low, high, cache, slots)


def feed_forward(spec: ModelSpec, layer: int) -> nn.Module:
    """A layer's experts, or its dense feed-forward."""
    if spec.moe and spec.moe.layers[layer]:
        return MoE(spec, spec.moe, layer)
    return GatedMLP(
        spec.hidden_size,
        spec.intermediate_size,
        bias=spec.mlp_bias,
        quants=(spec.quant_of(layer, "mlp.gate_up"), spec.quant_of(layer, "mlp.down")),
        world=spec.tensor_parallel_size,
    )


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.spec, self.number = spec, layer
        self.attention_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.attention = Attention(spec, layer)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = feed_forward(spec, layer)

    def forward(
        self,
        residual: Tensor,
        positions: Tensor,
        inputs: AttentionInputs,
        kv_cache: Tensor,
        cos_sin_cache: Tensor,
    ) -> Tensor:
        x = self.attention_norm(residual)
        return self.mix(residual, x, positions, inputs, kv_cache, cos_sin_cache)

    def mix(
        self,
        residual: Tensor,
        x: Tensor,
        positions: Tensor,
        inputs: AttentionInputs,
        kv_cache: Tensor,
        cos_sin_cache: Tensor,
    ) -> Tensor:
        """The layer behind its first norm, which has made ``x``."""
        x = self.attention(x, positions, inputs, kv_cache, cos_sin_cache)
        # Here no chain of linear layers is cut: they run from attention to attention.
        keep_hidden(residual, self.spec, self.number, inputs)
        residual = residual + self.attention.o(x)
        x = self.mlp_norm(residual)
        if isinstance(self.mlp, MoE):
            y = self.mlp(x, inputs.groups[self.attention.cache_group].slot_mapping)
        else:
            y = self.mlp(x)
        return residual + y  # type: ignore[no-any-return]


def distinct_layers(spec: ModelSpec) -> tuple[ModelSpec, tuple[int, ...]]:
    """A model with one layer of each kind, in order of first use; and for each layer of ``spec``,
    the layer of that model which differs from it in weights alone.  Layers of different cache
    groups differ, since they read other block tables; so do layers whose input is kept."""
    every, quant = range(spec.num_layers), spec.quant
    quants = [(quant.unquantized[i], quant.others[i:][:1]) if quant else () for i in every]
    numbers = [spec.cache_group(layer) for layer in range(spec.num_layers)]
    num_groups = len(spec.cache_groups)
    experts = spec.moe.layers if spec.moe else (False,) * spec.num_layers
    kept = [layer if layer in spec.kept else None for layer in every]
    layers = list(zip(spec.sliding_windows, quants, numbers, experts, kept, strict=True))
    kinds = list(dict.fromkeys(layers))
    windows, _, groups, experts, _ = zip(*kinds, strict=True)
    moved = {layer: kinds.index(kind) for layer, kind in enumerate(layers)}
    moved |= {spec.num_layers: len(kinds), BEHIND_NORM: BEHIND_NORM}
    short = replace(
        spec,
        num_layers=len(kinds),
        sliding_windows=windows,
        layers_of_groups=tuple(
            tuple(i for i, group in enumerate(groups) if group == number)
            for number in range(num_groups)
        ),
        quant=quant.of_layers(map(layers.index, kinds)) if quant else None,
        moe=replace(spec.moe, layers=experts) if spec.moe else None,
        kept=tuple(moved[place] for place in spec.kept),
    )
    return short, tuple(kinds.index(layer) for layer in layers)


class DecoderModel(nn.Module):
    """A causal language model, or one pipeline stage of it.  Made on the meta device: see
    ``loader.load_model``."""

    cos_sin_cache: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        world = spec.tensor_parallel_size
        vocab_size, hidden = spec.vocab_size, spec.hidden_size
        self.embed = Embedding(vocab_size, hidden, world) if spec.has_embedding else None
        self.layers = nn.ModuleList(DecoderLayer(spec, i) for i in range(spec.num_layers))
        for number, name in product(
            range(spec.num_layers), spec.quant.gathered if spec.quant else ()
        ):
            linear = dict(self.layers[number].named_modules()).get(name)
            if isinstance(linear, Linear) and linear.quant is not None:
                linear.gather_input()
        self.norm = RMSNorm(hidden, spec.rms_norm_eps) if spec.has_head else None
        tied = self.embed if spec.tie_word_embeddings else None
        self.lm_head = LMHead(vocab_size, hidden, tied, world) if spec.has_head else None
        # Computed, not loaded; float32 whatever the model's dtype, as positions need the bits.
        cache = build_cos_sin_cache(spec.rope, spec.head_dim, spec.max_position_embeddings)
        self.register_buffer("cos_sin_cache", cache, persistent=False)

    def gathered(self) -> list[Tensor]:
        """The tensors of which a step reads a few rows alone; ``lm_head`` reads all of a shared
        embedding."""
        shared = self.spec.tie_word_embeddings and self.spec.has_head
        embedding = [] if self.embed is None or shared else [self.embed.weight]
        return [self.cos_sin_cache, *embedding]

    def forward(
        self,
        inputs: Tensor,
        positions: Tensor,
        attention: AttentionInputs,
        kv_caches: list[Tensor],
    ) -> Tensor:
        """One step over a ragged batch.

        Args:
            inputs: token ids, [num_tokens] int32; where another stage has the embedding, what the
                stage before gives.
            positions: [num_tokens] int32.
            attention: lengths and blocks of every sequence.
            kv_caches: one a layer, [num_blocks, 2, block_size, num_kv_heads, head_dim]; written.

        Returns:
            Logits of each sequence's last token, [num_seqs, vocab_size] in the model's dtype; where
            another stage has the head, the residual stream, [num_tokens, hidden_size].
        """
        residual = inputs if self.embed is None else self.embed(inputs)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            residual = layer(residual, positions, attention, kv_cache, self.cos_sin_cache)
        if self.norm is None or self.lm_head is None:
            return residual
        hidden = self.norm(residual)
        keep_hidden(residual, self.spec, len(self.layers), attention)
        keep_hidden(hidden, self.spec, BEHIND_NORM, attention)
        last = ops.gather_last_token(hidden, attention.query_start_loc)
        return self.lm_head(last)  # type: ignore[no-any-return]
