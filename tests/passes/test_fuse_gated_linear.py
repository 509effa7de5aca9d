"""A linear layer and its gated activation become one op where nothing else reads the result."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright import ops
from fusewright.passes import build_passes, run_passes
from tests.passes.graphs import capture, hidden, targets

Model = Callable[[Tensor, Tensor], Tensor]


def silu(x: Tensor, weight: Tensor) -> Tensor:
    return ops.silu_mul(ops.linear(x, weight, None))


def gelu(x: Tensor, weight: Tensor) -> Tensor:
    return ops.gelu_tanh_mul(ops.linear(x, weight, None))


def with_bias(x: Tensor, weight: Tensor) -> Tensor:
    return ops.silu_mul(ops.linear(x, weight, weight[:, 0].contiguous()))


def read_twice(x: Tensor, weight: Tensor) -> Tensor:
    y = ops.linear(x, weight, None)
    return ops.silu_mul(y) * y.sum()


def no_linear(x: Tensor, weight: Tensor) -> Tensor:
    return ops.silu_mul(x * weight[0, 0])


def clamped(x: Tensor, weight: Tensor) -> Tensor:
    return ops.silu_mul(ops.linear(x, weight), None, 1.702, 7.0, 1.0, True)


def of_two_layers(x: Tensor, weight: Tensor) -> Tensor:
    return ops.silu_mul(ops.linear(x, weight, None), ops.linear(x, weight.neg(), None))


def relu(x: Tensor, weight: Tensor) -> Tensor:
    return F.relu(ops.linear(x, weight, weight[:, 0].contiguous()))


def relu2(x: Tensor, weight: Tensor) -> Tensor:
    return F.relu(ops.linear(x, weight)).square()


def few_bits_relu(x: Tensor, weight: Tensor) -> Tensor:
    stored = (weight * 64).to(torch.int8), None, None, weight[:, :1].abs().float() + 0.01
    return F.relu(ops.linear(x, *stored, None, None, None, None, "int8_channel"))


def exact_gelu(x: Tensor, weight: Tensor) -> Tensor:
    return F.gelu(ops.linear(x, weight))


def gelu_new(x: Tensor, weight: Tensor) -> Tensor:
    """GPT-2's."""
    y = ops.linear(x, weight)
    return 0.5 * y * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y.pow(3.0))))


def relu_read_twice(x: Tensor, weight: Tensor) -> Tensor:
    y = ops.linear(x, weight)
    return F.relu(y) * y.sum()


def of_no_layer(x: Tensor, weight: Tensor) -> Tensor:
    """As Gemma 4, which gates an embedding of each layer."""
    return ops.silu_mul(ops.linear(x, weight, None), x.repeat(1, 2)[:, :48])


def inputs() -> tuple[Tensor, Tensor]:
    """x, and the weight flat: of two dimensions its first would be captured as dynamic."""
    return hidden(dtype=torch.bfloat16), torch.randn(48 * 32).bfloat16()


def shaped(model: Model) -> Model:
    return lambda x, weight: model(x, weight.view(48, 32))


@pytest.mark.parametrize("model", [silu, gelu, with_bias])
def test_they_become_one_op_and_no_bit_changes(model: Model) -> None:
    x, weight = inputs()
    gm = capture(shaped(model), x=x, weight=weight)
    (report,) = run_passes(gm, build_passes(["fuse_gated_linear"]), verify=True)
    assert report.matched == 1 and not report.missed
    assert [t for t in targets(gm) if t.endswith(".default")] == ["linear.default"]
    sizes = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    values = iter((weight, x))  # in the order in which the model reads them
    (got,) = gm(*(s.node.hint if isinstance(s, torch.SymInt) else next(values) for s in sizes))
    assert torch.equal(got, shaped(model)(x, weight))


@pytest.mark.parametrize(
    ("model", "activation"),
    [
        *((relu, "relu"), (relu2, "relu2"), (exact_gelu, "gelu"), (gelu_new, "gelu_new")),
        (few_bits_relu, "relu"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_activation_is_an_epilogue_too(
    model: Model, activation: str, dtype: torch.dtype
) -> None:
    x, weight = (tensor.to(dtype) for tensor in inputs())
    gm = capture(shaped(model), x=x, weight=weight)
    (report,) = run_passes(gm, build_passes(["fuse_gated_linear"]), verify=True)
    assert report.matched == 1 and not report.missed
    (linear,) = gm.graph.find_nodes(op="call_function", target=torch.ops.fw.linear.default)
    assert linear.args[6] == activation
    assert (linear.args[9:10] == ("int8_channel",)) is (model is few_bits_relu)
    assert not {"relu", "gelu", "tanh", "pow", "square"} & {*targets(gm)}


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (relu_read_twice, "linear is also read by"),
        (read_twice, "has 2 users, not the activation alone"),
        (no_linear, "not from a linear layer"),
        (of_two_layers, "gate and up are two linear layers"),
        (clamped, "interleaved=True), for which there is no fused kernel"),
    ],
)
def test_a_miss_says_why(model: Model, reason: str) -> None:
    x, weight = inputs()
    gm = capture(shaped(model), x=x, weight=weight)
    (report,) = run_passes(gm, build_passes(["fuse_gated_linear"]), verify=True)
    (site,) = report.missed
    assert reason in site.reason


def test_a_gate_of_what_no_layer_made_is_no_site() -> None:
    x, weight = inputs()
    gm = capture(shaped(of_no_layer), x=x, weight=weight)
    (report,) = run_passes(gm, build_passes(["fuse_gated_linear"]), verify=True)
    assert not report.sites


def fp8_operands(*scales: tuple[int, int]) -> dict[str, Tensor]:
    """In the order in which ``fp8`` reads them; what is a weight is flat."""
    x, w = (100 * torch.randn(rows, 32) for rows in (7, 48))
    sizes = scales or ((1, 1), (1, 1))
    x_scale, w_scale = (0.01 * (1 + torch.rand(shape)) for shape in sizes)
    return {
        "x": x.clamp(-448, 448).to(torch.float8_e4m3fn),
        "x_scale": x_scale.flatten() if sizes[0] == (1, 1) else x_scale,
        "w": w.clamp(-448, 448).to(torch.float8_e4m3fn).flatten(),
        "w_scale": w_scale.flatten(),
        "scale": torch.tensor([0.5]),
    }


def fp8(t: dict[str, Tensor], quantize: Callable[[Tensor, Tensor], Any]) -> Any:
    x_scale = t["x_scale"].view(-1, 1) if t["x_scale"].dim() == 1 else t["x_scale"]
    operands = t["x"], x_scale, t["w"].view(48, 32), t["w_scale"].view(-1, 1)
    x, x_scale, w, w_scale = operands
    y = ops.linear(x, w, None, x_scale, w_scale, torch.bfloat16)
    return quantize(ops.silu_mul(y), t["scale"].view(1, 1))


def static(y: Tensor, scale: Tensor) -> Any:
    return ops.quant_fp8_static(y, scale)


def per_token(y: Tensor, scale: Tensor) -> Any:
    return ops.quant_fp8_dynamic(y, 0)


def unquantized(y: Tensor, scale: Tensor) -> Any:
    return y * scale


@pytest.mark.parametrize("scales", [((1, 1), (1, 1)), ((7, 1), (48, 1))])
def test_fp8_with_a_static_scale_becomes_one_op(scales: Any) -> None:
    given = fp8_operands(*scales)
    gm = capture(lambda **t: fp8(t, static), **given)
    (report,) = run_passes(gm, build_passes(["fuse_gated_linear"]), verify=True)
    assert report.matched == 1 and not report.missed
    assert [t for t in targets(gm) if t.endswith(".default")] == ["linear.default"]


@pytest.mark.parametrize("quantize", [per_token, unquantized])
def test_fp8_without_a_static_scale_saves_no_launch(quantize: Any) -> None:
    gm = capture(lambda **t: fp8(t, quantize), **fp8_operands())
    (report,) = run_passes(gm, build_passes(["fuse_gated_linear"]), verify=True)
    (site,) = report.missed
    assert "no launch would be saved" in site.reason
