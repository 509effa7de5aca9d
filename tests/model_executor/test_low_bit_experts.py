"""Experts of 4 and 8 bits: every dialect is read to the numbers that it stands for, on one rank and
on two, and what cannot be read is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fusewright.config import UserError
from fusewright.config.weight_format import STORED_FORMATS
from fusewright.model_executor.hf_config import read_spec
from fusewright.model_executor.loader import load_model
from fusewright.model_executor.parallel import check_parallel
from fusewright.ops.linear.formats import dequantize
from tests.model_executor import stored_formats
from tests.model_executor.low_bit_checkpoints import (
    BY_NAME,
    OF_EXPERTS,
    Dialect,
    gptq,
    save,
)
from tests.model_executor.low_bit_models import MIXTRAL, MOES, QWEN3_MOE, SHARED
from tests.model_executor.test_experts import edit
from tests.model_executor.test_parallel import check_together, ranks_of
from tests.model_executor.tiny_models import TinyModel

KINDS = ("weight", "weight_scale", "weight_zero")
every_model = pytest.mark.parametrize("tiny", MOES, ids=lambda tiny: tiny.name)
every_dialect = pytest.mark.parametrize("dialect", OF_EXPERTS, ids=lambda dialect: dialect.name)
EXPERT = "model.layers.1.mlp.experts.3"


def numbers_of(share: Any) -> Tensor:
    """The numbers that the weight of a layer, or an expert, stands for."""
    return dequantize(share.quant, *(getattr(share, kind, None) for kind in KINDS))


def check_numbers(model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Every expert, and what is beside the experts, holds the numbers of the checkpoint."""
    of_experts = [name for name in saved if ".mlp.experts." in name]
    assert of_experts
    for name in of_experts:
        ours = name.removeprefix("model.").removesuffix("_proj")
        shares: Any = model.get_submodule(ours)
        held = torch.stack([numbers_of(share) for share in shares.shares()])
        torch.testing.assert_close(held, saved[name], atol=1e-6, rtol=1e-5, msg=name)
    router = saved["model.layers.0.mlp.gate.weight"]
    assert torch.equal(model.get_submodule("layers.0.mlp.router").weight, router)


@pytest.mark.product(8)
@every_model
@every_dialect
def test_experts_hold_the_numbers_of_every_dialect(
    dialect: Dialect, tiny: TinyModel, tmp_path: Path
) -> None:
    saved = save(dialect, tmp_path, tiny).state_dict()
    check_numbers(load_model(read_spec(tmp_path), tmp_path, "cpu"), saved)


def test_a_shared_expert_is_quantized_beside_the_others(tmp_path: Path) -> None:
    saved = save(BY_NAME["AutoAWQ 64"], tmp_path, SHARED).state_dict()
    model = load_model(read_spec(tmp_path), tmp_path, "cpu")
    for name, layer, parts in (
        ("gate_up", "layers.0.mlp.shared.gate_up", ("gate_proj", "up_proj")),
        ("down", "layers.0.mlp.shared.down", ("down_proj",)),
    ):
        of_parts = [saved[f"model.layers.0.mlp.shared_expert.{part}.weight"] for part in parts]
        held = numbers_of(model.get_submodule(layer))
        torch.testing.assert_close(held, torch.cat(of_parts), atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.product(8)
@pytest.mark.parametrize("whole", [False, True], ids=["cut", "whole"])
@every_model
@every_dialect
def test_ranks_hold_the_experts_of_every_dialect_together(
    dialect: Dialect, tiny: TinyModel, whole: bool, tmp_path: Path
) -> None:
    save(dialect, tmp_path, tiny)
    spec = read_spec(tmp_path)
    if STORED_FORMATS[dialect.kind].step(1) > 64:
        # 128 columns of o and down are one group of both ranks; whole experts do not help o.
        with pytest.raises(UserError, match="128 share an element of weight_scale"):
            check_parallel(spec, 2, expert_parallel=whole)
        return
    check_parallel(spec, 2, expert_parallel=whole)
    model = load_model(spec, tmp_path, "cpu")
    check_together(model, ranks_of(spec, tmp_path, 2, "auto", whole_experts=whole))


@pytest.mark.parametrize("name", ["GPTQ v1 int4 g32 act-order", "GPTQ v2 int4 g64 zero act-order"])
@pytest.mark.parametrize("impl", ["auto", "transformers"])
def test_an_order_that_is_none_is_read(name: str, impl: str, tmp_path: Path) -> None:
    """``desc_act`` with columns of groups side by side; the engine gathers nothing for experts."""
    saved = save(in_order(BY_NAME[name]), tmp_path, QWEN3_MOE).state_dict()
    spec = read_spec(tmp_path, impl)
    assert spec.quant is not None and not [n for n in spec.quant.gathered if "experts" in n]
    model = load_model(spec, tmp_path, "cpu")
    if impl == "auto":
        check_numbers(model, saved)
        check_parallel(spec, 1)
    for module in model.modules():
        assert getattr(module, "x_order", None) is None or "experts" not in str(module)


def in_order(dialect: Dialect) -> Dialect:
    """A dialect of act-order whose columns are as they were."""
    group = STORED_FORMATS[dialect.kind].scale.unit[1]

    def store(weight: Tensor, name: str) -> Any:
        symmetric, version = "zero" not in dialect.kind, 2 if "v2" in dialect.name else 1
        return gptq(weight, 4, group, sym=symmetric, version=version)

    return replace(dialect, store=store)


@pytest.mark.parametrize("impl", ["auto", "transformers"])
def test_an_order_of_an_expert_is_refused(impl: str, tmp_path: Path) -> None:
    save(BY_NAME["GPTQ v1 int4 g32 act-order"], tmp_path, QWEN3_MOE)
    expected = r"experts\.\d\.\w+\.g_idx in .* sorts columns of an expert .*; use .* desc_act=false"
    with pytest.raises(UserError, match=expected):
        load_model(read_spec(tmp_path, impl), tmp_path, "cpu")


@pytest.mark.parametrize(
    ("dialect", "tiny", "section"),
    [
        ("AutoAWQ 64", MIXTRAL, {"modules_to_not_convert": ["gate"]}),
        ("pack-quantized int4 g128", QWEN3_MOE, {"ignore": ["lm_head", "re:.*mlp.gate$"]}),
        ("ModelOpt int4", QWEN3_MOE, {"ignore": ["lm_head", "model.layers.*.mlp.gate"]}),
        ("GPTQ v1 int4 g128", SHARED, {"dynamic": {"-:.*mlp.gate$": {}, "-:.*_gate$": {}}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("impl", ["auto", "transformers"])
def test_routers_that_a_config_leaves_out_are_as_they_were(
    dialect: str, tiny: TinyModel, section: dict[str, Any], impl: str, tmp_path: Path
) -> None:
    saved = save(BY_NAME[dialect], tmp_path, tiny, **section).state_dict()
    model = load_model(read_spec(tmp_path, impl), tmp_path, "cpu")
    if impl == "auto":
        check_numbers(model, saved)


def test_experts_that_a_config_leaves_out_stay_in_16_bits(tmp_path: Path) -> None:
    """All of a layer, by GPTQModel's rules; not some of them."""
    left = lambda name: name.startswith("model.layers.1.mlp.experts.")  # noqa: E731
    section = {"dynamic": {r"-:model\.layers\.1\.mlp\.experts\.": {}}}
    saved = save_but(left, BY_NAME["GPTQ v1 int4 g128"], tmp_path, **section)
    model = load_model(read_spec(tmp_path), tmp_path, "cpu")
    down: Any = model.get_submodule("layers.1.mlp.experts.down")
    assert down.quant is None and torch.equal(down.weight, saved[f"{EXPERT[:-2]}.down_proj"])
    assert model.get_submodule("layers.0.mlp.experts.down").quant is not None


def save_but(
    left: Callable[[str], bool], dialect: Dialect, folder: Path, **section: Any
) -> dict[str, Tensor]:
    """A Qwen3-MoE of which some modules are not quantized; returns its numbers."""

    def store(weight: Tensor, name: str) -> Any:
        return ({"weight": weight}, weight) if left(name) else dialect.store(weight, name)

    return dict(save(replace(dialect, store=store), folder, QWEN3_MOE, **section).state_dict())


def _popped(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


def _set(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({name: tensor})


AWQ, PACKED = "AutoAWQ 32", "pack-quantized int4 g128"


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        (AWQ, _popped(f"{EXPERT}.up_proj.scales"), f"the checkpoint lacks {EXPERT}.up_proj.scales"),
        (AWQ, _popped(f"{EXPERT}.up_proj.qzeros"), f"the checkpoint lacks {EXPERT}.up_proj.qzeros"),
        (
            AWQ,
            _set(f"{EXPERT}.down_proj.scales", torch.full((4, 128), torch.nan)),
            f"tensor {EXPERT}.down_proj.scales",
        ),
        (
            AWQ,
            _set(f"{EXPERT}.down_proj.scales", torch.ones(2, 128)),
            "has shape [2, 128], expected [4, 128] for a weight [128, 128]",
        ),
        (
            AWQ,
            _set("model.layers.1.mlp.experts.4.up_proj.qweight", torch.zeros(128, 16).int()),
            "the checkpoint has weight model.layers.1.mlp.experts.4.up_proj.qweight, unknown",
        ),
        (
            AWQ,
            _set(f"{EXPERT}.down_proj.pre_quant_scale", torch.ones(128)),
            "scales the input of the layer, for which there is no op",
        ),
        (
            PACKED,
            _popped(f"{EXPERT}.gate_proj.weight_scale"),
            f"the checkpoint lacks {EXPERT}.gate_proj.weight_scale",
        ),
        (
            PACKED,
            _set(f"{EXPERT}.gate_proj.weight_scale", torch.zeros(128, 1)),
            f"tensor {EXPERT}.gate_proj.weight_scale",
        ),
        (
            AWQ,
            _set("model.layers.0.mlp.experts.gate_up_proj", torch.zeros(4, 256, 128)),
            "gate_up_proj holds the weights of all experts, as they are in 16 bits, but",
        ),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_wrong_with_an_expert_is_named(
    name: str,
    change: Callable[[dict[str, Tensor]], Any],
    expected: str,
    rank: int,
    tmp_path: Path,
) -> None:
    """By every rank, also of experts that another one has, but for what only their numbers say."""
    dialect = BY_NAME[name]
    save(dialect, tmp_path, QWEN3_MOE)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    spec = read_spec(tmp_path)
    if STORED_FORMATS[dialect.kind].step(1) <= 64:
        spec = replace(spec, tensor_parallel_size=2, expert_parallel=True)
    elif rank:
        return
    if expected.startswith("tensor") and not rank and spec.expert_parallel:
        load_model(spec, tmp_path, "cpu", rank=rank)
        return
    with pytest.raises(UserError, match=re.escape(expected)):
        load_model(spec, tmp_path, "cpu", rank=rank)


@pytest.mark.parametrize(
    ("name", "sizes", "expected"),
    [
        (
            "ModelOpt NVFP4",
            {},
            "mlp.experts.gate_up would be 'nvfp4', which kernels of experts do not read: scales",
        ),
        (
            "int-quantized W8A8 dynamic",
            {},
            "mlp.experts.gate_up would be 'w8a8_int8', which kernels of experts do not read: x is ",
        ),
        (
            "AutoAWQ 64",
            {"moe_intermediate_size": 96},
            "weight_scale of mlp.experts.down would have 96 columns, of which 64 share an element",
        ),
    ],
)
def test_formats_that_experts_cannot_have_are_named(
    name: str, sizes: dict[str, int], expected: str, tmp_path: Path
) -> None:
    save(BY_NAME[name], tmp_path, QWEN3_MOE)
    edit(tmp_path, **sizes)
    for impl in ("auto", *(["transformers"] if not sizes else [])):
        with pytest.raises(UserError) as caught:
            read_spec(tmp_path, impl)
        assert expected.partition(" ")[2] in str(caught.value)
        assert "use another format (experts: int4, int8, MXFP4 or FP8)" in str(caught.value)


def test_experts_of_several_formats_are_named_by_a_few(tmp_path: Path) -> None:
    section = {"modules_to_not_convert": [f"experts.{number}.down_proj" for number in (0, 1, 2)]}
    save(BY_NAME["AutoAWQ 64"], tmp_path, QWEN3_MOE, **section)
    with pytest.raises(UserError, match=r"expected all or none of .*3\.down_proj, which are one"):
        read_spec(tmp_path)


def test_rules_that_change_bits_are_refused(tmp_path: Path) -> None:
    section = {"dynamic": {"-:.*gate$": {}, r"+:.*\.0\.down_proj": {"bits": 8}}}
    save(BY_NAME["GPTQ v1 int4 g128"], tmp_path, QWEN3_MOE, **section)
    with pytest.raises(UserError, match="expected rules that leave modules out"):
        read_spec(tmp_path)


def test_groups_that_ranks_would_cut_are_named(tmp_path: Path) -> None:
    """Whole experts are not cut, but their neighbours of all ranks are."""
    wide = replace(MIXTRAL, options=MIXTRAL.options | {"intermediate_size": 192})
    save(BY_NAME["AutoAWQ 64"], tmp_path, wide)
    spec = read_spec(tmp_path)
    with pytest.raises(UserError, match=r"mlp\.experts\.down would have 96 columns, of which 64"):
        check_parallel(spec, 2)
    check_parallel(spec, 2, expert_parallel=True)
    ranks = ranks_of(spec, tmp_path, 2, "auto", whole_experts=True)
    check_together(load_model(spec, tmp_path, "cpu"), ranks)


def test_experts_in_a_format_from_outside_are_read(tmp_path: Path) -> None:
    """One of bytes is read; words of 32 bits are not what the experts' kernels read."""
    with stored_formats.admitted():
        int8, int4 = stored_formats.INT8.name, stored_formats.INT4.name
        saved = stored_formats.save(int8, tmp_path / "int8", tiny=QWEN3_MOE).state_dict()
        spec = read_spec(tmp_path / "int8")
        check_numbers(load_model(spec, tmp_path / "int8", "cpu"), saved)
        stored_formats.save(int4, tmp_path / "int4", tiny=QWEN3_MOE)
        with pytest.raises(UserError, match="experts do not read: zero points are packed"):
            read_spec(tmp_path / "int4")


@pytest.mark.product(2)
@pytest.mark.parametrize("tiny", [QWEN3_MOE, MIXTRAL], ids=lambda tiny: tiny.name)
@pytest.mark.parametrize("name", ["AutoAWQ 32", "GPTQ v2 int4 g64 zero", "mxfp4-pack-quantized"])
def test_ranks_of_a_captured_model_hold_experts_together(
    name: str, tiny: TinyModel, tmp_path: Path
) -> None:
    save(BY_NAME[name], tmp_path, tiny)
    whole = load_model(read_spec(tmp_path, "transformers"), tmp_path, "cpu")
    spec = read_spec(tmp_path, "transformers", ranks=2)
    check_parallel(spec, 2)
    spec = replace(spec, tensor_parallel_size=2)
    ranks = [load_model(spec, tmp_path, "cpu", rank=rank) for rank in (0, 1)]
    for part, dim, halves in (("gate_up_proj", 1, 2), ("down_proj", 2, 1)):
        layer = f"library.model.layers.1.mlp.experts.{part}"
        expected, *held = (
            torch.stack([numbers_of(share) for share in model.get_submodule(layer).shares()])
            for model in (whole, *ranks)
        )
        of_parts = zip(*(each.chunk(halves, 1) for each in held), strict=True)
        joined = torch.cat([torch.cat(parts, dim) for parts in of_parts], 1)
        assert torch.equal(joined, expected), part


def test_groups_that_ranks_of_a_captured_model_would_cut_are_named(tmp_path: Path) -> None:
    wide = replace(MIXTRAL, options=MIXTRAL.options | {"intermediate_size": 192})
    save(BY_NAME["AutoAWQ 64"], tmp_path, wide)
    with pytest.raises(UserError, match=r"down_proj would have 96 columns, of which 64 share"):
        read_spec(tmp_path, "transformers", ranks=2)
