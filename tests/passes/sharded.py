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
from fusewright.compiler.capture.trace import Traced, trace
from fusewright.compiler.lowering.lower import lower
from fusewright.config import PASSES
from fusewright.engine.worker.source import module_arguments
from fusewright.model_executor.attention import AttentionInputs
from fusewright.model_executor.hf_config import read_spec
from fusewright.model_executor.kv_cache import allocate_kv_caches
from fusewright.model_executor.layers import ShardRule
from fusewright.model_executor.loader import load_model, materialize, set_rank
from fusewright.model_executor.models.decoder import DecoderModel
from fusewright.model_executor.parallel import TensorParallelRank
from fusewright.model_executor.quant.scheme import QuantKind
from fusewright.model_executor.spec import ModelSpec, quantize_online
from fusewright.passes import PassReport, build_passes, run_passes
from tests.model_executor.paged_steps import PagedSteps, random_tokens

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


def sharded(quant: QuantKind | None, rank: int, world: int) -> DecoderModel:
    """The part of ``whole(quant)`` that ``rank`` holds."""
    source, spec = whole(quant), whole_spec(quant)
    model = DecoderModel(replace(spec, tensor_parallel_size=world))
    materialize(model, spec.dtype, CPU)
    tp = TensorParallelRank(rank, world)
    for (name, target), of_whole in zip(model.named_modules(), source.modules(), strict=True):
        assert name in dict(source.named_modules())
        _copy_part(target, of_whole, tp)
    set_rank(model, tp)
    return model.eval()


def _copy_part(target: nn.Module, source: nn.Module, tp: TensorParallelRank) -> None:
    rules: dict[str, ShardRule] = getattr(target, "rules", {})
    tensors = [*target.named_parameters(recurse=False), *target.named_buffers(recurse=False)]
    for kind, tensor in tensors:
        whole_tensor = getattr(source, kind)
        if whole_tensor is None:
            continue  # the first id, which one rank has no need of
        if kind not in rules:
            tensor.copy_(whole_tensor)
            continue
        rule = rules[kind]
        for part in rule.parts:
            place = rule.place(part.name, tp.rank, tp.world)
            start = rule.place(part.name, 0, 1).dest_start + place.source_start
            to = tensor.narrow(place.dim, place.dest_start, place.length)
            to.copy_(whole_tensor.narrow(place.dim, start, place.length))


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
        assert all("-> native" in choice for choice in reduces)
        alone = any(choice.startswith("all_reduce -> ") for choice in reduces)
        assert alone == (names is unfused)
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


def _traced(model: DecoderModel) -> Traced:
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


def runner(traced: Traced, gm: fx.GraphModule, model: DecoderModel) -> Callable[..., Tensor]:
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
