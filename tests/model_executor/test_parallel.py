"""What the ranks hold of a model is the model: weights, scales and biases, read slice by slice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fusewright.config import UserError
from fusewright.model_executor.experts import ExpertLinear
from fusewright.model_executor.hf_config import read_spec
from fusewright.model_executor.layers import ShardRule
from fusewright.model_executor.loader import load_model
from fusewright.model_executor.models.decoder import DecoderModel
from fusewright.model_executor.parallel import check_parallel
from fusewright.model_executor.quant.scheme import QuantKind
from fusewright.model_executor.spec import ModelSpec, quantize_online
from tests.model_executor.quant_checkpoints import BY_NAME as DIALECTS, TINY, save
from tests.model_executor.tiny_models import BY_NAME

WIDE = replace(TINY, options=TINY.options | {"head_dim": 128})
"""A KV head is a block of scales."""


NAMES = ["llama_bias", "llama_mha_tied", "qwen2_bias_tied", "qwen2_moe", "mixtral"]


def ranks_of(
    spec: ModelSpec, folder: Path, world: int, load_format: str, *, whole_experts: bool = False
) -> list[DecoderModel]:
    spec = replace(spec, tensor_parallel_size=world, expert_parallel=whole_experts)
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
            of_experts = isinstance(module, ExpertLinear) and kind != "input_scale"
            if of_experts and ranks[0].spec.expert_parallel:
                assert torch.equal(torch.cat(held), expected), f"{name}.{kind}"
                continue
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


@pytest.mark.product
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


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_ranks_hold_whole_experts_together(load_format: str, tmp_path: Path) -> None:
    BY_NAME["qwen2_moe"].save(tmp_path)
    spec = read_spec(tmp_path)
    ranks = ranks_of(spec, tmp_path, 2, load_format, whole_experts=True)
    check_together(load_model(spec, tmp_path, "cpu", load_format=load_format), ranks)


EXPERTS_OF_BLOCKS = {"hidden_size": 128, "moe_intermediate_size": 128}
"""Sizes with which four ranks could not each have whole blocks of every expert."""


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("kind", ["fp8", "fp8_block"])
def test_whole_experts_are_quantized_as_on_one_rank(
    kind: QuantKind, original: bool, tmp_path: Path
) -> None:
    """``original``: a tensor an expert, else one for all of them."""
    tiny = BY_NAME["qwen3_moe"]
    model = replace(tiny, options=tiny.options | EXPERTS_OF_BLOCKS).model()
    model.save_pretrained(tmp_path, save_original_format=original)
    spec = read_spec(tmp_path)
    one = load_model(quantize_online(spec, kind), tmp_path, "cpu").layers[1].mlp
    spec = replace(spec, tensor_parallel_size=4, expert_parallel=True)
    ranks = [
        load_model(quantize_online(spec, kind), tmp_path, "cpu", rank=i).layers[1].mlp
        for i in range(4)
    ]
    for layer in ("experts.gate_up", "experts.down"):
        held = [tensors_of(rank.get_submodule(layer)) for rank in ranks]
        for name, expected in tensors_of(one.get_submodule(layer)).items():
            assert torch.equal(torch.cat([tensors[name] for tensors in held]), expected), name
    x = torch.randn((9, 128), generator=torch.Generator().manual_seed(1))
    summed = sum(rank._combined(x, torch.arange(9)) for rank in ranks)
    torch.testing.assert_close(summed, one._combined(x, torch.arange(9)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("static", [True, False])
def test_ranks_read_the_scales_of_their_experts(static: bool, tmp_path: Path) -> None:
    """The scale of an input is that of all experts, also of those that another rank has."""
    tiny = BY_NAME["qwen3_moe"]
    replace(tiny, options=tiny.options | EXPERTS_OF_BLOCKS).save(tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = load_file(file)
    for number, name in enumerate(sorted(n for n in tensors if ".experts." in n)):
        tensors[name] = tensors[name].clamp(-448, 448).to(torch.float8_e4m3fn)
        scale = torch.tensor([[1.0 + number]])
        tensors[f"{name}_scale" if static else f"{name}_scale_inv"] = scale
        if static:
            tensors[f"{name.removesuffix('weight')}input_scale"] = scale / 7
    save_file(tensors, file)
    left = ["lm_head", "self_attn", *[f"model.layers.{i}.mlp.gate" for i in (0, 1)]]
    how = {"activation_scheme": "static"} if static else {"weight_block_size": [128, 128]}
    section = {"quant_method": "fp8", "modules_to_not_convert": left, **how}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": section}))
    spec = read_spec(tmp_path)
    one, ranks = (
        load_model(spec, tmp_path, "cpu"),
        ranks_of(spec, tmp_path, 2, "auto", whole_experts=True),
    )
    check_together(one, ranks)
    check_parallel(spec, 4, expert_parallel=True)
    if not static:
        with pytest.raises(UserError, match=r"a rank would hold 32 features of mlp\.experts"):
            check_parallel(spec, 4)


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
@pytest.mark.parametrize("name", ["llama_mha_tied", "qwen2_window", "qwen2_moe"])
def test_stages_hold_the_model_together(name: str, load_format: str, tmp_path: Path) -> None:
    """Each rank of a stage holds of its layers what the rank of one stage does."""
    BY_NAME[name].save(tmp_path)
    spec = replace(read_spec(tmp_path), tensor_parallel_size=2)
    stages = spec.num_layers
    cut = replace(spec, pipeline_parallel_size=stages)
    for tp_rank in (0, 1):
        whole = load_model(spec, tmp_path, "cpu", load_format=load_format, rank=tp_rank)
        expected = dict(whole.named_parameters(remove_duplicate=False))
        found: set[str] = set()
        for stage in range(stages):
            rank = 2 * stage + tp_rank
            model = load_model(cut, tmp_path, "cpu", load_format=load_format, rank=rank)
            for local, param in model.named_parameters(remove_duplicate=False):
                name = local.replace("layers.0", f"layers.{stage}")
                assert torch.equal(param, expected[name]), f"{name} of rank {rank}"
                found.add(name)
        assert found == expected.keys()


@pytest.mark.parametrize("dialect", ["fp8 block", "compressed channel"])
def test_a_stage_checks_the_tensors_that_another_one_reads(dialect: str, tmp_path: Path) -> None:
    save(DIALECTS[dialect], tmp_path, tiny=WIDE)
    spec = replace(read_spec(tmp_path), pipeline_parallel_size=2)
    read: list[int] = []

    @contextmanager
    def bar(label: str, total: int) -> Iterator[Callable[[int], None]]:
        read.append(total)
        yield lambda count: None

    ranks = [load_model(spec, tmp_path, "cpu", progress=bar, rank=rank) for rank in range(2)]
    weights = [sum(p.nbytes for p in rank.parameters()) for rank in ranks]
    assert read[0] < sum(read) and [rank.spec.num_layers for rank in ranks] == [1, 1]
    assert sum(weights) == sum(
        p.nbytes
        for p in load_model(replace(spec, pipeline_parallel_size=1), tmp_path, "cpu").parameters()
    )
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    (scale,) = (other for other in tensors if other.startswith(f"{name}_scale"))
    for damaged, message in (
        ({n: t for n, t in tensors.items() if n != name}, f"lacks weight {name}"),
        ({n: t for n, t in tensors.items() if n != scale}, f"has no scale for {name}"),
        ({**tensors, name: tensors[name][:-1]}, f"tensor {name} .* has shape"),
        ({**tensors, "model.layers.2.x": torch.zeros(1)}, r"has weight model\.layers\.2\.x"),
    ):
        save_file({n: t.contiguous() for n, t in damaged.items()}, file)
        with pytest.raises(UserError, match=message):
            load_model(spec, tmp_path, "cpu", rank=0)


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
    BY_NAME["qwen3_moe"].save(tmp_path)
    spec = replace(read_spec(tmp_path), tensor_parallel_size=2, expert_parallel=True)
    model = load_model(spec, tmp_path, "cpu", progress=bar, rank=1)
    assert totals[-1] == sum(param.nbytes for param in model.parameters())
    assert len(model.layers[0].mlp.experts.down.weight) == 8


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


def test_experts_that_do_not_spread_are_named_with_the_sizes_that_do(tmp_path: Path) -> None:
    BY_NAME["qwen2_moe"].config().save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    check_parallel(spec, 2, expert_parallel=True)
    with pytest.raises(
        UserError,
        match=r"^tensor_parallel_size=4: num_experts=6 is no multiple of it; .* over 1, 2$",
    ):
        check_parallel(spec, 4, expert_parallel=True)
    with pytest.raises(UserError, match=r"^enable_expert_parallel with .*=1: one rank holds all"):
        check_parallel(spec, 1, expert_parallel=True)
    with pytest.raises(UserError, match=r"^enable_expert_parallel: the model has no experts"):
        check_parallel(replace(spec, moe=None), 2, expert_parallel=True)


def test_blocks_of_scales_are_not_cut(tmp_path: Path) -> None:
    save(DIALECTS["fp8 block"], tmp_path, tiny=WIDE)
    spec = read_spec(tmp_path)
    check_parallel(spec, 2)
    with pytest.raises(UserError, match="a rank would hold 64 features of mlp"):
        check_parallel(spec, 4)
    # Weights that are quantized here have blocks of their own on each rank, or none.
    local = replace(spec, quant=None, tensor_parallel_size=4)
    check_parallel(quantize_online(local, "fp8_block"), 4)
