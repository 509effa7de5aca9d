"""The layers between two attentions: in turn where there are many tokens, else without rounding
their activations to FP8."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.ops import BY_NAME, load_cuda_library
from fusewright.ops.linear.linear_add_norm_mlp import OP, Call

CPU = torch.device("cpu")
FEW = 2
"""The most tokens whose activations stay bfloat16."""


def cases(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    made = OP.cases(dtype, device, torch.Generator(device=device).manual_seed(5))
    return {case.label: case for case in made}


def unrounded(call: Call) -> tuple[Tensor, Tensor]:
    """Compute the layers in float64, with activations that are rounded nowhere."""

    def layer(x: Tensor, weight: Any, scale: Any, bias: Any = None) -> Tensor:
        y = x @ (weight.double() * scale.double()).T
        return y if bias is None else y + bias.double()

    def norm(x: Tensor, weight: Any, eps: float) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()

    head = call.head
    total = layer(head.x.double(), head.weight, call.weight_scale, head.bias)
    total = total + head.residual.double()
    y = layer(norm(total, head.norm_weight, head.eps), call.gate_up, call.gate_up_scale)
    gate, up = y.chunk(2, -1)
    silu, gelu = torch.nn.functional.silu, torch.nn.functional.gelu
    act = silu(gate) if call.activation == "silu" else gelu(gate, approximate="tanh")
    y = layer(act * up, call.down, call.down_scale)
    if call.is_last:
        return y, total
    total = total + y
    normed = norm(total, call.next_norm_weight, call.next_eps)
    return layer(normed, call.next_weight, call.next_scale, call.next_bias), total


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.gpu
def test_a_few_tokens_are_rounded_to_bfloat16_alone() -> None:
    """They are less than 1.5 % off float64; with FP8 activations four layers are more."""
    if not load_cuda_library():
        pytest.skip("csrc is not built here")
    device = torch.device("cuda")
    run = OP.implementation("skinny").fn
    for label, case in cases(device).items():
        call = Call.of(case.args)
        tokens, large = call.head.x.shape[0], call.head.weight.numel() >= 8 << 20
        if not (large and tokens):
            continue
        errors = [error(g, w) for g, w in zip(run(*case.args), unrounded(call), strict=True)]
        names = OP.implementation("skinny").runs(*case.args)  # type: ignore[misc]
        streams = [name for name in names if "skinny_linear" in name] == [*names]
        assert streams is (tokens <= FEW), label
        assert not streams or len(names) == (3 if call.is_last else 4), label
        assert (max(errors) < 0.015) is streams, f"{label}: {errors}"
        assert all(map(torch.equal, run(*case.args), run(*case.args))), label


def test_the_reference_is_its_ops_in_turn() -> None:
    """Each of them by its dispatcher op, on the last layer's call too."""
    for case in cases(CPU).values():
        call, fw = Call.of(case.args), torch.ops.fw
        head, dtype = call.head, call.head.x.dtype
        q, s = fw.quant_fp8_dynamic(head.x, 0)
        y = fw.linear(q, head.weight, head.bias, s, call.weight_scale, dtype)
        q, s, total = fw.add_rms_norm_quant_dynamic(y, head.residual, head.norm_weight, head.eps, 0)
        y = fw.linear(q, call.gate_up, None, s, call.gate_up_scale, dtype)
        q, s = BY_NAME[f"{call.activation}_mul_quant_dynamic"].overload()(y, 0)
        y = fw.linear(q, call.down, None, s, call.down_scale, dtype)
        if not call.is_last:
            norm = call.next_norm_weight, call.next_eps, 0
            q, s, total = fw.add_rms_norm_quant_dynamic(y, total, *norm)
            y = fw.linear(q, call.next_weight, call.next_bias, s, call.next_scale, dtype)
        assert all(map(torch.equal, OP.overload()(*case.args), (y, total))), case.label


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda call: call._replace(activation="relu"), "activation is 'relu', expected 'silu'"),
        (lambda call: call._replace(next_scale=None), "expected all or none"),
        (lambda call: call._replace(down=call.down.t()), "linear of x, x_scale, weight"),
        (
            lambda call: call._replace(head=call.head._replace(residual=call.head.x)),
            r"the residual \[1, 48\], expected \[num_tokens, in_features\] and \[num_tokens, 64\]",
        ),
    ],
)
def test_bad_arguments_are_named(change: Any, message: str) -> None:
    call = change(Call.of(cases(CPU)["one token"].args))
    for run in (OP.reference, OP.fake):
        with pytest.raises(ValueError, match=message):
            run(*call.head, *call[1:])


def test_what_the_streaming_kernels_refuse_is_said() -> None:
    """Layers too small for them, and activations of float16, which an FP8 weight does not meet."""
    small = cases(CPU)["one token"]
    described = replace(OP.describe(small.args, sm=90, csrc=True), device="cuda")
    assert "MiB" in OP.implementation("skinny").supports(described)
    half = next(iter(cases(CPU, torch.float16).values())).args
    described = replace(OP.describe(half, sm=90, csrc=True), device="cuda")
    reason = OP.implementation("skinny").supports(described)
    assert reason == "x is torch.float16: an FP8 weight is converted to bfloat16 alone"
