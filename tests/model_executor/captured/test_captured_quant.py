"""Captured models have the quantized weights that an adapter has, to the bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fusewright.config import UserError
from fusewright.model_executor.captured.moves import Axis, Move
from fusewright.model_executor.captured.quantized.scales import by_units
from fusewright.model_executor.checkpoint import TensorInfo
from fusewright.model_executor.hf_config import read_spec
from fusewright.model_executor.loader import load_model
from fusewright.model_executor.spec import ModelSpec, quantize_online
from tests.model_executor import low_bit_checkpoints as low_bit, stored_formats
from tests.model_executor.low_bit_models import MIXTRAL, QWEN3_MOE
from tests.model_executor.quant_checkpoints import (
    BY_NAME,
    DIALECTS,
    TINY,
    Dialect,
    save,
)
from tests.model_executor.tiny_models import TinyModel

MOE = TinyModel(
    "quantizable_moe",
    "Qwen3Moe",
    {
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 128,
        "head_dim": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
)
PAIRS = {
    "attention.qkv": "self_attn.q_proj+k_proj+v_proj",
    "attention.o": "self_attn.o_proj",
    "mlp.gate_up": "mlp.gate_proj+up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp.experts.gate_up": "mlp.experts.gate_up_proj",
    "mlp.experts.down": "mlp.experts.down_proj",
}


def submodule(model: nn.Module, name: str) -> Any:
    parent, _, last = name.rpartition(".")
    return dict(model.get_submodule(parent).named_children())[last]


def check_equal(adapter: ModelSpec, captured: ModelSpec, folder: Path) -> nn.Module:
    """Both models of a folder hold the same bits; returns the captured one."""
    assert adapter.quant is not None and captured.quant is not None
    assert adapter.quant.kind == captured.quant.kind
    ours, theirs = (load_model(spec, folder, "cpu") for spec in (adapter, captured))
    for layer in range(adapter.num_layers):
        for linear in adapter.linears:
            expected = ours.get_submodule(f"layers.{layer}.{linear}").state_dict()
            name = f"library.model.layers.{layer}.{PAIRS[linear]}"
            held = submodule(theirs, name).state_dict()
            assert expected.keys() == held.keys(), linear
            for kind, tensor in expected.items():
                assert tensor.dtype == held[kind].dtype
                assert torch.equal(tensor.float(), held[kind].float()), f"{linear}.{kind}"
    return theirs


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda each: each.name)
def test_every_dialect_has_the_bits_of_the_adapter(dialect: Dialect, tmp_path: Path) -> None:
    save(dialect, tmp_path)
    check_equal(read_spec(tmp_path), read_spec(tmp_path, "transformers"), tmp_path)


@pytest.mark.parametrize("kind", ["fp8", "fp8_block"])
@pytest.mark.parametrize("tiny", [TINY, MOE], ids=lambda each: each.name)
def test_online_weights_have_the_bits_of_the_adapter(
    kind: str, tiny: TinyModel, tmp_path: Path
) -> None:
    """An expert is quantized when it is all there."""
    tiny.save(tmp_path)
    specs = [quantize_online(read_spec(tmp_path, impl), kind) for impl in ("auto", "transformers")]
    check_equal(*specs, tmp_path)


@pytest.mark.parametrize("name", ["fp8 static", "fp8 block", "compressed channel"])
def test_experts_of_a_checkpoint_have_the_bits_of_the_adapter(name: str, tmp_path: Path) -> None:
    """Scales go where the library's conversion stacks and joins the experts' weights."""
    save(BY_NAME[name], tmp_path, tiny=MOE, ignore={"re:.*mlp.gate$": ".mlp.gate."})
    check_equal(read_spec(tmp_path), read_spec(tmp_path, "transformers"), tmp_path)


def test_siblings_of_two_formats_are_two_layers(tmp_path: Path) -> None:
    ignore = {"re:.*layers.1.self_attn.v_proj": "layers.1.self_attn.v_proj."}
    save(BY_NAME["compressed channel"], tmp_path, ignore=ignore)
    spec = read_spec(tmp_path, "transformers")
    assert spec.quant is not None
    assert spec.quant.unquantized[0] == ("model.layers.1.self_attn.v_proj",)
    model = load_model(spec, tmp_path, "cpu")
    attention: Any = dict(model.get_submodule("library.model.layers.1.self_attn").named_children())
    assert attention["q_proj+k_proj"].quant and attention["v_proj"].quant is None


def test_ignored_modules_have_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    """The library joins the experts that the list names; it cannot join some of them."""
    dialect, gate = BY_NAME["fp8 dynamic"], {"re:.*mlp.gate$": ".mlp.gate."}
    (tmp_path / "all").mkdir()
    save(dialect, tmp_path / "all", tiny=MOE, ignore=gate | {"re:.*1.mlp.experts": "1.mlp.experts"})
    spec = read_spec(tmp_path / "all", "transformers")
    assert spec.quant is not None
    left = tuple(f"model.layers.1.mlp.experts.{kind}" for kind in ("gate_up_proj", "down_proj"))
    assert sorted(spec.quant.unquantized[0]) == sorted(left)
    load_model(spec, tmp_path / "all", "cpu")
    (tmp_path / "some").mkdir()
    save(dialect, tmp_path / "some", tiny=MOE, ignore=gate | {"re:.*experts.2.down": "s.2.down"})
    with pytest.raises(UserError, match=r"experts\.2\.down_proj unquantized; expected all or none"):
        read_spec(tmp_path / "some", "transformers")


@pytest.mark.parametrize("name", list(stored_formats.STORE))
def test_admitted_formats_go_through_the_library_too(name: str, tmp_path: Path) -> None:
    """Packed integers, scales and zero points are moved in units of the format."""
    with stored_formats.admitted():
        stored_formats.save(name, tmp_path)
        adapter, captured = (read_spec(tmp_path, impl) for impl in ("auto", "transformers"))
        check_equal(adapter, captured, tmp_path)
        assert captured.quant is not None and captured.quant.kind == name


@pytest.mark.product(8)
@pytest.mark.parametrize("tiny", [QWEN3_MOE, MIXTRAL], ids=lambda each: each.name)
@pytest.mark.parametrize("dialect", low_bit.OF_EXPERTS, ids=lambda each: each.name)
def test_experts_of_low_bits_have_the_bits_of_the_adapter(
    dialect: low_bit.Dialect, tiny: TinyModel, tmp_path: Path
) -> None:
    """Integers, scales and zero points go where the library stacks and joins experts' weights."""
    low_bit.save(dialect, tmp_path, tiny)
    check_equal(read_spec(tmp_path), read_spec(tmp_path, "transformers"), tmp_path)


def test_layers_of_as_many_features_as_experts_are_no_routers(tmp_path: Path) -> None:
    """As k and v of a model with 64 experts and two heads of 32."""
    options = {"num_experts": 64, "moe_intermediate_size": 32}
    tiny = TinyModel("many", "Qwen3Moe", QWEN3_MOE.options | options)
    low_bit.save(low_bit.BY_NAME["AutoAWQ 32"], tmp_path, tiny)
    captured = read_spec(tmp_path, "transformers")
    assert "model.layers.1.self_attn.k_proj" in captured.linears
    check_equal(read_spec(tmp_path), captured, tmp_path)


@pytest.fixture
def static(tmp_path: Path) -> Iterator[tuple[Path, dict[str, Tensor]]]:
    yield tmp_path, save(BY_NAME["fp8 static"], tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor", "expected"),
    [
        ("q_proj.weight_scale", None, "no scale for model.layers.0.self_attn.q_proj.weight"),
        ("q_proj.input_scale", torch.tensor(-1.0), "holds -1.0, expected positive numbers"),
        ("q_proj.weight_scale", torch.ones(3), r"has shape \[3\], expected \[1, 1\]"),
        ("q_proj.weight", torch.zeros(256, 128), "is of type F32, expected F8_E4M3"),
    ],
)
def test_bad_scales_are_named(
    name: str, tensor: Tensor | None, expected: str, static: tuple[Path, dict[str, Tensor]]
) -> None:
    folder, tensors = static
    key = f"model.layers.0.self_attn.{name}"
    if tensor is None:
        del tensors[key]
    else:
        tensors[key] = tensor
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=expected):
        load_model(read_spec(folder, "transformers"), folder, "cpu")


def test_blocks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save(BY_NAME["fp8 block"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 96}))
    with pytest.raises(UserError, match=r"q_proj reads 96 features, expected a multiple of 128"):
        read_spec(tmp_path, "transformers")


def test_scales_move_in_units() -> None:
    info = TensorInfo(Path("f"), "w", (256, 192), "F8_E4M3")
    axes = (Axis(128, 0, 1, 1, 1), Axis(192, 1, 1, 2, 1))
    move = Move(info, "p", (128, 0), (3, 256, 0), axes)
    part = by_units(move, (128, 128), info.shape)
    assert part == move._replace(
        source_start=(1, 0), dest_start=(3, 2, 0), axes=(Axis(2, 1, 1, 2, 1),)
    )
    assert by_units(move, (1, 0), info.shape).axes == axes[:1]
    with pytest.raises(ValueError, match="begins within 96"):
        by_units(move, (96, 0), info.shape)
    with pytest.raises(ValueError, match="share one element part"):
        by_units(
            move._replace(source_start=(0, 0), axes=(Axis(64, 0, 2, 1, 2),)), (128, 0), (256, 192)
        )


@pytest.mark.product
@pytest.mark.parametrize("dialect", low_bit.DIALECTS, ids=lambda each: each.name)
def test_dialects_of_low_bits_have_the_bits_of_the_adapter(
    dialect: low_bit.Dialect, tmp_path: Path
) -> None:
    """But for rows that an adapter puts into the order of the columns that read them."""
    low_bit.save(dialect, tmp_path)
    adapter, captured = read_spec(tmp_path), read_spec(tmp_path, "transformers")
    if "act-order" not in dialect.name:
        check_equal(adapter, captured, tmp_path)
        return
    ours, theirs = (load_model(spec, tmp_path, "cpu") for spec in (adapter, captured))
    x = torch.randn(5, 128)
    library = theirs.get_submodule("library.model.layers.1")
    torch.testing.assert_close(
        submodule(library, "mlp")(x), ours.get_submodule("layers.1.mlp")(x), atol=1e-6, rtol=1e-5
    )
    expected = ours.get_submodule("layers.1.attention.qkv")(x)
    assert torch.equal(submodule(library, "self_attn.q_proj+k_proj+v_proj")(x), expected)
