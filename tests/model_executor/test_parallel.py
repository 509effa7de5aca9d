"""What the ranks hold of a model is the model: weights, scales and biases, read slice by slice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fusewright.config import UserError
from fusewright.model_executor.hf_config import read_spec
from fusewright.model_executor.layers import ShardRule
from fusewright.model_executor.loader import load_model
from fusewright.model_executor.models.decoder import DecoderModel
from fusewright.model_executor.parallel import check_parallel
from fusewright.model_executor.spec import ModelSpec, quantize_online
from tests.model_executor.quant_checkpoints import BY_NAME as DIALECTS
from tests.model_executor.quant_checkpoints import TINY, save
from tests.model_executor.tiny_models import BY_NAME

WIDE = replace(TINY, options=TINY.options | {"head_dim": 128})
"""A KV head is a block of scales."""


NAMES = ["llama_bias", "llama_mha_tied", "qwen2_bias_tied", "qwen2_moe", "mixtral"]


def ranks_of(spec: ModelSpec, folder: Path, world: int, load_format: str) -> list[DecoderModel]:
    spec = replace(spec, tensor_parallel_size=world)
    return [
        load_model(spec, folder, "cpu", load_format=load_format, rank=rank) for rank in range(world)
    ]


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of one module, bits as integers where torch compares no floats."""
    found = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return {n: t.view(torch.uint8) if t.dtype.itemsize == 1 else t for n, t in found}


def check_together(whole: DecoderModel, ranks: list[DecoderModel]) -> None:
    """Every part of every tensor of ``whole`` is where the rules say, on every rank."""
    for name, module in whole.named_modules():
        rules: dict[str, ShardRule] = getattr(module, "rules", {})
        for kind, expected in tensors_of(module).items():
            held = [tensors_of(rank.get_submodule(name))[kind] for rank in ranks]
            if kind not in rules:
                assert all(torch.equal(part, expected[..., : part.shape[-1]]) for part in held)
                continue
            rule = rules[kind]
            if rule.once:
                assert torch.equal(held[0], expected) and not any(h.any() for h in held[1:])
                continue
            dim = rule.dim + (expected.dim() == 3)  # behind the experts
            for part in rule.parts:
                start = rule.place(part.name, 0, 1).dest_start
                for rank, tensor in enumerate(held):
                    at = rule.place(part.name, rank, len(ranks))
                    ours = tensor.narrow(dim, at.dest_start, at.length)
                    theirs = expected.narrow(dim, start + at.source_start, at.length)
                    assert torch.equal(ours, theirs), f"{name}.{kind} of rank {rank}"


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_hold_the_model_together(
    name: str, world: int, load_format: str, tmp_path: Path
) -> None:
    """With four ranks, two hold the same one of the two KV heads of ``llama_bias``."""
    BY_NAME[name].save(tmp_path)
    spec = read_spec(tmp_path)
    ranks = ranks_of(spec, tmp_path, world, load_format)
    check_together(load_model(spec, tmp_path, "cpu", load_format=load_format), ranks)
    assert [int(rank.embed.first_id or 0) for rank in ranks] == [
        128 // world * rank for rank in range(world)
    ]
    for rank in ranks:
        assert (rank.lm_head.weight is rank.embed.weight) == spec.tie_word_embeddings
        kv_heads = rank.spec.cache_groups[0].spec.num_kv_heads
        assert kv_heads == max(1, spec.num_kv_heads // world)


@pytest.mark.parametrize("name", DIALECTS)
def test_ranks_hold_the_scales_of_what_they_hold(name: str, tmp_path: Path) -> None:
    save(DIALECTS[name], tmp_path, tiny=WIDE)
    spec = replace(read_spec(tmp_path), fp8_kv_cache=True)
    check_together(load_model(spec, tmp_path, "cpu"), ranks_of(spec, tmp_path, 2, "auto"))


def test_a_rank_reads_its_slices_alone(tmp_path: Path) -> None:
    BY_NAME["llama_gqa"].save(tmp_path)
    spec = read_spec(tmp_path)
    totals: list[int] = []

    @contextmanager
    def bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
        counted: list[int] = []
        yield counted.append
        assert sum(counted) == total
        totals.append(total)

    for world in (1, 2, 4):
        load_model(
            replace(spec, tensor_parallel_size=world), tmp_path, "cpu", progress=bar, rank=world - 1
        )
    norms, kv = 5 * 64 * 4, 2 * 2 * 16 * 64 * 4  # of one KV head, in two layers
    whole = totals[0] - norms - 2 * kv
    assert totals == [norms + 2 * kv + whole, norms + kv + whole // 2, norms + kv + whole // 4]


@pytest.mark.parametrize(
    ("changes", "world", "message"),
    [
        ({}, 3, "num_attention_heads=4 is no multiple of it; this model spreads over 1, 2, 4$"),
        ({"intermediate_size": 126}, 4, "intermediate_size=126 is no multiple.* over 1, 2$"),
        ({"vocab_size": 127}, 2, "vocab_size=127 is no multiple of it; .* over 1$"),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, "num_key_value_heads=3 is neither.* over 1$"),
    ],
)
def test_sizes_that_do_not_spread_are_named_with_those_that_do(
    changes: dict[str, int], world: int, message: str, tmp_path: Path
) -> None:
    BY_NAME["llama_gqa"].config().save_pretrained(tmp_path)
    spec = replace(read_spec(tmp_path), **changes)
    with pytest.raises(UserError, match=f"^tensor_parallel_size={world}: .*{message}"):
        check_parallel(spec, world)


def test_blocks_of_scales_are_not_cut(tmp_path: Path) -> None:
    save(DIALECTS["fp8 block"], tmp_path, tiny=WIDE)
    spec = read_spec(tmp_path)
    check_parallel(spec, 2)
    with pytest.raises(UserError, match="a rank would hold 64 features of mlp"):
        check_parallel(spec, 4)
    # Weights that are quantized here have blocks of their own on each rank, or none.
    local = replace(spec, quant=None, tensor_parallel_size=4)
    check_parallel(quantize_online(local, "fp8_block"), 4)
