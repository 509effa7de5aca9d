"""A decoder split over ranks, each holding what its layers' sharding rules give it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn

import fusewright.model_executor.abacus as abacus
from fusewright import ops
from fusewright.compiler.capture.trace import Traced, trace
from fusewright.compiler.lowering.lower import lower
from fusewright.config import PASSES
from fusewright.engine.worker.source import module_arguments
from fusewright.model_executor.attention import AttentionInputs
from fusewright.model_executor.hf_config import read_spec
from fusewright.model_executor.kv_cache import allocate_kv_caches
from fusewright.model_executor.layers import ShardRule
from fusewright.model_executor.loader import load_model, materialize
from fusewright.model_executor.models.decoder import DecoderModel
from fusewright.model_executor.quant.scheme import QuantKind
from fusewright.model_executor.spec import ModelSpec, quantize_online
from fusewright.passes import PassReport, build_passes, run_passes
from tests.model_executor.paged_steps import PagedSteps, random_tokens

GROUP = "tensor-parallel"
CPU = torch.device("cpu")
KINDS: tuple[QuantKind | None, ...] = (None, "fp8_static", "fp8", "fp8_block")
FUSED = ("fuse_add_norm", "fuse_norm_quant", "fuse_all_reduce_norm")


def whole_spec(quant: QuantKind | None) -> ModelSpec:
    """Four heads and KV heads, so that four ranks have one of each."""
    (folder,) = abacus.__path__
    spec = replace(
        read_spec(folder),
        hidden_size=256,
        intermediate_size=512,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=128,
        sliding_windows=(0, 0),
        tie_word_embeddings=False,
        dtype_name="bfloat16",
    )
    return quantize_online(spec, quant) if quant else spec


@cache
def whole(quant: QuantKind | None) -> DecoderModel:
    """The model on one rank, with weights so wide that every layer shows in the logits."""
    (folder,) = abacus.__path__
    model = load_model(whole_spec(quant), folder, CPU, load_format="dummy")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" in name:
                param.add_(torch.randn(param.shape, generator=generator) * 0.2)
            elif param.dtype == torch.bfloat16:
                param.mul_(3)
        for name, buffer in model.named_buffers():
            if name.endswith("weight_scale"):
                buffer.mul_(3)
    return model


class Sharded(DecoderModel):
    """One rank's part: a sum over the ranks wherever the input of a linear is split, and behind
    the embedding, of which each rank has some rows.  ``first_id`` is that of the first."""

    first_id: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.register_buffer("first_id", torch.zeros(1, dtype=torch.int32))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: AttentionInputs,
        kv_caches: list[Tensor],
    ) -> Tensor:
        """Logits of the rank's part of the vocabulary."""
        row = input_ids - self.first_id
        mine = (row >= 0) & (row < self.embed.weight.shape[0])
        x = self.embed(torch.where(mine, row, 0)) * mine.unsqueeze(-1)
        residual = ops.all_reduce(x, GROUP)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x = layer.attention_norm(residual)  # type: ignore[operator]
            x = layer.attention(  # type: ignore[operator]
                x, positions, attention, kv_cache, self.cos_sin_cache
            )
            residual = residual + ops.all_reduce(x, GROUP)
            y = layer.mlp(layer.mlp_norm(residual))  # type: ignore[operator]
            residual = residual + ops.all_reduce(y, GROUP)
        last = ops.gather_last_token(self.norm(residual), attention.query_start_loc)
        return self.lm_head(last)  # type: ignore[no-any-return]


def sharded(quant: QuantKind | None, rank: int, world: int) -> Sharded:
    """The part of ``whole(quant)`` that ``rank`` holds."""
    source, spec = whole(quant), whole_spec(quant)
    local = replace(
        spec,
        num_heads=spec.num_heads // world,
        num_kv_heads=spec.num_kv_heads // world,
        intermediate_size=spec.intermediate_size // world,
        vocab_size=spec.vocab_size // world,
    )
    model = Sharded(local)
    materialize(model, spec.dtype, CPU)
    model.first_id.fill_(rank * local.vocab_size)
    for (name, target), of_whole in zip(model.named_modules(), source.modules(), strict=True):
        assert name in dict(source.named_modules())
        _copy_part(target, of_whole, rank, world)
    return model.eval()


def _copy_part(target: nn.Module, source: nn.Module, rank: int, world: int) -> None:
    rules: dict[str, ShardRule] = getattr(target, "rules", {})
    rules_of_whole: dict[str, ShardRule] = getattr(source, "rules", {})
    for kind, tensor in [*target.named_parameters(recurse=False), *_buffers(target)]:
        whole_tensor = getattr(source, kind)
        if kind not in rules:
            tensor.copy_(whole_tensor)
            continue
        rule = rules_of_whole[kind]
        for part in rule.parts:
            place = rule.place(part.name, rank, world)
            start = rule.place(part.name, 0, 1).dest_start + place.source_start
            to = tensor.narrow(place.dim, place.dest_start, place.length)
            to.copy_(whole_tensor.narrow(place.dim, start, place.length))


def _buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, b) for name, b in module.named_buffers(recurse=False) if name != "first_id"]


@cache
def graphs(
    quant: QuantKind | None, world: int
) -> tuple[Traced, list[tuple[str, fx.GraphModule, fx.GraphModule]]]:
    """What all ranks run: the trace, and pairs of graphs that must give the same bits."""
    traced = _traced(sharded(quant, 0, world))
    exact = ("cleanup", *FUSED)
    unfused = tuple(name for name in PASSES if name != FUSED[-1])
    fused = {names: copy.deepcopy(traced.gm) for names in (exact, unfused, PASSES)}
    for names, gm in fused.items():
        for report in run_passes(gm, build_passes(names)):
            _check(report, quant)
    lowered = {names: copy.deepcopy(fused[names]) for names in (unfused, PASSES)}
    for names, gm in lowered.items():
        choices = lower(gm, hand_kernels=True, kernels={}, sm=0)
        reduces = {choice for choice in choices if choice.startswith("all_reduce")}
        assert all(choice.endswith("-> native") for choice in reduces)
        assert ("all_reduce -> native" in reduces) == (names is unfused)
    return traced, [
        ("the exact passes", traced.gm, fused[exact]),
        ("this pass beside all others", fused[unfused], fused[PASSES]),
        ("the same, lowered", lowered[unfused], lowered[PASSES]),
    ]


def _check(report: PassReport, quant: QuantKind | None) -> None:
    """Two layers have two sums each, and one behind the embedding; their norms are quantized but
    the last."""
    matches = {"fuse_add_norm": 4, "fuse_norm_quant": 4 if quant else 0, "fuse_all_reduce_norm": 5}
    if report.name in FUSED:
        assert (report.matched, report.missed) == (matches[report.name], []), report


def _traced(model: Sharded) -> Traced:
    sizes = {
        "input_ids": ("num_tokens", (37,)),
        "positions": ("num_tokens", (37,)),
        "slot_mapping": ("num_tokens", (37,)),
        "block_table": ("num_seqs", (3, 4)),
        "seq_lens": ("num_seqs", (3,)),
        "query_start_loc": ("num_seqs_plus_1", (4,)),
    }
    named = {n: torch.zeros(shape, dtype=torch.int32) for n, (_, shape) in sizes.items()}
    caches = allocate_kv_caches(model.spec.cache_groups, 5, 16, CPU)
    named |= {f"kv_cache/{i}": cache for i, cache in enumerate(caches)}
    dynamic = {name: {0: dim} for name, (dim, _) in sizes.items()}
    dynamic |= {f"kv_cache/{i}": {0: "num_blocks"} for i in range(len(caches))}
    return trace(model, module_arguments(named, model.spec), named, dynamic)


def runner(traced: Traced, gm: fx.GraphModule, model: Sharded) -> Callable[..., Tensor]:
    """A forward that runs ``gm`` with the weights of ``model``."""
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def forward(ids: Tensor, positions: Tensor, at: AttentionInputs, caches: Any) -> Tensor:
        values = {f"weights/{name}": value for name, value in weights.items()}
        values |= {"input_ids": ids, "positions": positions, **at.groups[0]._asdict()}
        values |= {**at._asdict(), **{f"kv_cache/{i}": cache for i, cache in enumerate(caches)}}
        args = [
            values[source.name] if source.dim is None else values[source.name].shape[source.dim]
            for source in traced.inputs
        ]
        (logits,) = gm(*args)[:1]
        return logits  # type: ignore[no-any-return]

    return forward


def steps_of(model: DecoderModel, forward: Callable[..., Tensor] | None = None) -> list[Tensor]:
    """Logits of a prefill of two sequences and of two decodes, then the KV caches."""
    steps = PagedSteps(model, random_tokens(9, 5))
    steps.forward = forward or model
    logits = [steps.step(n) for n in ({0: 7, 1: 3}, {0: 1, 1: 1}, {1: 1, 0: 1})]
    return [*logits, *steps.kv_caches]
