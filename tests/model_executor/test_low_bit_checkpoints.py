"""Checkpoints of 4 and 8 bits: every dialect is read to the numbers that it stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fusewright.config import UserError
from fusewright.model_executor.hf_config import read_spec
from fusewright.model_executor.loader import load_model
from fusewright.model_executor.parallel import check_parallel
from fusewright.model_executor.quant.scheme import LINEARS
from fusewright.model_executor.spec import quantize_online
from fusewright.ops.linear.formats import dequantize
from tests.model_executor.low_bit_checkpoints import (
    BY_NAME,
    DIALECTS,
    INPUT_SCALE,
    TINY,
    WIDE,
    Dialect,
    save,
)
from tests.model_executor.quant_checkpoints import FUSED
from tests.model_executor.test_parallel import ranks_of

every = pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
SPREAD = [dialect for dialect in DIALECTS if "act-order" not in dialect.name]


def numbers_of(layer: Any) -> Tensor:
    """What a layer's weight stands for; columns as those of its input."""
    kinds = ("weight", "weight_scale", "weight_zero", "weight_row_scale")
    numbers = dequantize(layer.quant, *(getattr(layer, kind, None) for kind in kinds))
    return numbers if layer.x_order is None else numbers[:, layer.x_order.argsort()]


@every
def test_layers_hold_the_numbers_of_every_dialect(dialect: Dialect, tmp_path: Path) -> None:
    """Merged ones, one below the other; ``down`` and the rows before it in an order of their own
    where columns are sorted."""
    saved = save(dialect, tmp_path).state_dict()
    spec = read_spec(tmp_path)
    assert spec.quant is not None and spec.quant.kind == dialect.kind
    model = load_model(spec, tmp_path, "cpu")
    for layer in range(2):
        for linear in LINEARS:
            held = model.get_submodule(f"layers.{layer}.{linear}")
            names = [f"model.layers.{layer}.{part}.weight" for part in FUSED[linear]]
            exact, numbers = torch.cat([saved[name] for name in names]), numbers_of(held)
            if "act-order" in dialect.name and linear.startswith("mlp"):
                continue
            torch.testing.assert_close(numbers, exact, atol=1e-6, rtol=1e-5, msg=linear)
    if "act-order" in dialect.name:
        x = torch.randn(5, 128)
        mlp = model.get_submodule("layers.1.mlp")
        gate, up, down = (
            saved[f"model.layers.1.mlp.{n}_proj.weight"] for n in ("gate", "up", "down")
        )
        expected = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
        torch.testing.assert_close(mlp(x), expected, atol=1e-5, rtol=1e-4)
        assert mlp.down.x_order is None and mlp.gate_up.x_order is not None


@pytest.mark.parametrize("when", ["static", "dynamic"])
def test_int8_activations_are_those_of_the_checkpoint(when: str, tmp_path: Path) -> None:
    """By the scale that is there, or by the largest number of each row; no line is said."""
    saved = save(BY_NAME[f"int-quantized W8A8 {when}"], tmp_path).state_dict()
    spec = read_spec(tmp_path)
    assert not spec.notes
    down = load_model(spec, tmp_path, "cpu").get_submodule("layers.1.mlp.down")
    x = 3 * torch.randn(5, 256)
    scale = torch.tensor(INPUT_SCALE) if when == "static" else x.abs().amax(1, True) / 127
    q = (x / scale).round().clamp(-128, 127)
    assert (q.abs() > 100).any()
    exact = (q * scale) @ saved["model.layers.1.mlp.down_proj.weight"].T
    # A number half way between two may go either way.
    torch.testing.assert_close(down(x), exact, atol=2e-3, rtol=1e-4)


@pytest.mark.product
@pytest.mark.parametrize("dialect", SPREAD, ids=lambda dialect: dialect.name)
def test_ranks_hold_every_dialect_together(dialect: Dialect, tmp_path: Path) -> None:
    save(dialect, tmp_path, WIDE)
    spec = read_spec(tmp_path)
    check_parallel(spec, 2)
    whole, ranks = load_model(spec, tmp_path, "cpu"), ranks_of(spec, tmp_path, 2, "auto")
    by_rows = [("attention.qkv", 3, 0), ("mlp.gate_up", 2, 0)]
    by_columns = [("attention.o", 1, 1), ("mlp.down", 1, 1)]
    for name, parts, dim in by_rows + by_columns:
        of_ranks = [numbers_of(rank.get_submodule(f"layers.1.{name}")) for rank in ranks]
        numbers = numbers_of(whole.get_submodule(f"layers.1.{name}"))
        if name == "attention.qkv":
            sizes = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
            splits = [n.split([s * spec.head_dim // 2 for s in sizes]) for n in of_ranks]
            joined = torch.cat([part for pair in zip(*splits, strict=True) for part in pair])
        else:
            splits = [n.chunk(parts) for n in of_ranks]
            pairs = [torch.cat(pair, dim) for pair in zip(*splits, strict=True)]
            joined = torch.cat(pairs)
        assert torch.equal(joined, numbers), name


def _of_q(target: str, how: tuple[int, dict[str, Any]] = (8, {"strategy": "channel"})) -> Any:
    """Groups of which one is of ``target`` alone."""
    groups: Any = json.loads(json.dumps(BY_NAME["mixed precision"].section["config_groups"]))
    groups["group_0"]["targets"] = [target]
    groups["group_0"]["weights"] |= {"num_bits": how[0], **how[1]}
    return groups


AWQ, GPTQ = BY_NAME["AutoAWQ 32"], BY_NAME["GPTQ v1 int4 g128"]
PACKED, ACT_ORDER = BY_NAME["pack-quantized int4 g128"], BY_NAME["GPTQ v1 int4 g32 act-order"]
DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("dialect", "section", "expected"),
    [
        (AWQ, {"bits": 3}, "bits is 3; expected 4; use a checkpoint of so many bits"),
        (GPTQ, {"bits": 2}, "bits is 2; expected 4 or 8; use a checkpoint"),
        (AWQ, {"group_size": 48}, "group_size is 48; expected 32, 64, 128, or -1 for a whole row"),
        (AWQ, {"version": "gemv"}, "version is 'gemv'; expected gemm"),
        (AWQ, {"zero_point": False}, "zero_point is False; expected true"),
        (GPTQ, {"checkpoint_format": "marlin"}, "is 'marlin'; expected gptq or gptq_v2"),
        (GPTQ, {"lm_head": True}, "lm_head is True; expected false: lm_head stays in 16 bits"),
        (GPTQ, {"dynamic": {"+:x": {}}}, "leave modules out (-:): one number of bits"),
        (PACKED, {"format": "marlin-24"}, "format is 'marlin-24'; expected one of float-quantized"),
        (
            BY_NAME["ModelOpt NVFP4"],
            {"group_size": 32},
            "group_size is 32; expected 16 with NVFP4",
        ),
        (
            BY_NAME["mixed precision"],
            {"config_groups": _of_q("re:.*q_proj$")},
            "self_attn.v_proj as int4_g64, which are one matrix here; expected one format",
        ),
        (
            BY_NAME["mixed precision"],
            {"config_groups": _of_q("re:.*q_proj$", (3, {"strategy": "channel"}))},
            "group_0.weights.num_bits is 3; expected 4 or 8",
        ),
    ],
)
def test_what_a_config_asks_for_and_is_not_there_is_named(
    dialect: Dialect, section: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    save(dialect, tmp_path, **section)
    with pytest.raises(UserError, match=re.escape(expected)):
        read_spec(tmp_path)


def _scale(value: float) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{DOWN}.scales"][0, 3] = value

    return change


def _replaced(suffix: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({f"{DOWN}.{suffix}": tensor})


def _sorted_apart(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.self_attn.k_proj.g_idx"
    tensors[name] = tensors[name].flip(0).contiguous()


@pytest.mark.parametrize(
    ("dialect", "change", "expected"),
    [
        (AWQ, lambda t: t.pop(f"{DOWN}.scales"), f"the checkpoint lacks {DOWN}.scales, which"),
        (AWQ, lambda t: t.pop(f"{DOWN}.qzeros"), f"the checkpoint lacks {DOWN}.qzeros, which"),
        (AWQ, _scale(0.0), "holds 0.0, expected positive numbers"),
        (AWQ, _scale(float("nan")), "holds nan, expected positive numbers"),
        (
            AWQ,
            _replaced("qweight", torch.zeros(256, 16, dtype=torch.int64)),
            "is of type I64, expected I32 of AutoAWQ in the format int4_zero_g32",
        ),
        (
            AWQ,
            _replaced("scales", torch.ones(4, 128).half()),
            "has shape [4, 128], expected [8, 128] for a weight [128, 256]",
        ),
        (
            AWQ,
            _replaced("pre_quant_scale", torch.ones(256)),
            "scales the input of the layer, for which there is no op; export the model with",
        ),
        (
            GPTQ,
            _replaced("qzeros", torch.zeros(2, 16, dtype=torch.int32)),
            "has a zero point 1, expected 8 with sym = true; set sym to false",
        ),
        (
            ACT_ORDER,
            _replaced("g_idx", torch.zeros(256, dtype=torch.int32)),
            "does not have 32 columns of each group",
        ),
        (ACT_ORDER, _sorted_apart, "sort columns in two orders, but the weights are one matrix"),
        (AWQ, _replaced("extra", torch.ones(1)), f"the checkpoint has weight {DOWN}.extra"),
    ],
)
def test_what_is_wrong_with_a_tensor_is_named(
    dialect: Dialect,
    change: Callable[[dict[str, Tensor]], Any],
    expected: str,
    tmp_path: Path,
) -> None:
    save(dialect, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=re.escape(expected)):
        load_model(read_spec(tmp_path), tmp_path, "cpu")


def test_an_order_that_no_rows_can_follow_is_refused(tmp_path: Path) -> None:
    """Where gate and up are not quantized; and where columns of ``o`` would cross ranks."""
    save(ACT_ORDER, tmp_path, modules_to_not_convert=["gate_proj", "up_proj"])
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if "gate_proj" in name or "up_proj" in name]:
        del tensors[name]
        tensors[f"{name.rpartition('.')[0]}.weight"] = torch.zeros(256, 128)
    save_file(tensors, tmp_path / "model.safetensors")
    spec = read_spec(tmp_path)
    with pytest.raises(UserError, match=r"mlp\.gate_up is not quantized; use .*desc_act=false"):
        load_model(spec, tmp_path, "cpu")
    with pytest.raises(UserError, match=r"attention\.o are sorted by activation"):
        check_parallel(spec, 2)


def test_a_start_says_what_is_gathered_and_what_stays_in_16_bits(tmp_path: Path) -> None:
    save(ACT_ORDER, tmp_path / "order")
    spec = read_spec(tmp_path / "order")
    assert spec.quant is not None and spec.quant.gathered[:3] == LINEARS[:3]
    assert "one more launch each; mlp.down takes the order" in spec.notes[0]
    save(BY_NAME["int-quantized W8A8 dynamic zero"], tmp_path / "w8a8")
    note = "which stay in 16 bits here: they are of 8 bits of int with zero points, for which there"
    assert note in read_spec(tmp_path / "w8a8").notes[0]
    TINY.save(tmp_path / "plain")
    plain = replace(read_spec(tmp_path / "plain"), intermediate_size=224)
    (note,) = quantize_online(plain, "int4_g64").notes
    assert note == (
        "quantization=int4_g64 leaves mlp.down in float32: weight_scale of mlp.down would have 224 "
        "columns, of which 64 share an element of weight_scale in the format 'int4_g64'"
    )


@pytest.mark.parametrize("dialect", [PACKED, AWQ], ids=lambda dialect: dialect.name)
def test_scales_of_an_fp8_cache_are_read_beside_low_bits(dialect: Dialect, tmp_path: Path) -> None:
    save(dialect, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        for kind, value in (("k_scale", 0.5), ("v_scale", 0.25)):
            tensors[f"model.layers.{layer}.self_attn.{kind}"] = torch.tensor([value])
    save_file(tensors, tmp_path / "model.safetensors")
    model = load_model(replace(read_spec(tmp_path), fp8_kv_cache=True), tmp_path, "cpu")
    scales: Any = model.get_submodule("layers.1.attention").kv_scale
    assert scales[0].unique().tolist() == [0.5] and scales[1].unique().tolist() == [0.25]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("int-quantized W8A8 dynamic", "layers in w8a8_int8 quantize their input, and a model"),
        ("GPTQ v1 int4 g32 act-order", "columns of their input in an order of their own"),
        ("pack-quantized int4 g128", "64 columns, of which 128 share an element of weight_scale"),
    ],
)
def test_what_a_captured_model_does_not_spread_is_named(
    name: str, reason: str, tmp_path: Path
) -> None:
    save(BY_NAME[name], tmp_path)
    with pytest.raises(UserError, match=reason):
        check_parallel(read_spec(tmp_path, "transformers", ranks=2), 2)
