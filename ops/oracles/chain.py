"""Computes the oracle of chains: stage by stage, quantized where a layer reads it."""

from __future__ import annotations

from typing import Any

from ..chain.row_stages import Add, AddNorm, Norm, Scale
from ..chain.stages import Act, Experts, Linear, Stage, parse
from ._call import Call, Expected, Floats, rounded
from .experts import fused_moe
from .linear import dequantized, matmul, stored_numbers
from .norms import activated, gated, layer_normed, normed, quantized

_ABSENT = ("correction_bias", "gate_up_scale", "down_scale", "shared", "gate_up_input_scale",
           "down_input_scale", "first_expert")  # fmt: skip


def chain(call: Call) -> Expected:
    dtype: Any = call.dtypes["residual"]
    x, total = call["x"], call["residual"]
    stages = parse(call["stages"])
    for stage, operands in zip(stages.stages, stages.deal(call["operands"]), strict=True):
        is_sum = x is total
        if isinstance(stage, (Add, AddNorm)):
            total = x = rounded(x + total, dtype)
        if not isinstance(stage, Add):
            x = rounded(_made(stage, operands, x, call), dtype)
        if isinstance(stage, Scale) and is_sum:
            total = x
    return {0: x, 1: x[:0].reshape(0) if x is total else total}


def _made(stage: Stage, operands: Any, x: Floats, call: Call) -> Floats:
    dtype: Any = call.dtypes["residual"]
    if isinstance(stage, (AddNorm, Norm)) and stage.center:
        return layer_normed(x, operands["weight"], stage.eps, operands.get("bias"))
    if isinstance(stage, (AddNorm, Norm)):
        return normed(x, operands["weight"], stage.eps, stage.offset, dtype)
    if isinstance(stage, Scale):
        return x * stage.factor
    if isinstance(stage, Act):
        return gated(x, None, stage.activation)
    if isinstance(stage, Experts):
        constants = {name: getattr(stage, name) for name in stage.constants()}
        absent = dict.fromkeys((*_ABSENT, *stage.takes()))
        given = {**absent, **constants, **operands, "x": x}
        return fused_moe(Call(given, {"x": dtype}))[0]
    assert isinstance(stage, Linear)
    weight = operands["weight"]
    if stage.weight_format is not None:
        weight = stored_numbers(stage.weight_format, operands)
    if stage.group_size is not None:
        q = quantized(x, stage.group_size)
        x, weight = dequantized(q[0], q[1]), dequantized(weight, operands["weight_scale"])
    y = matmul(x, weight, operands.get("bias"))
    return y if stage.activation is None else activated(rounded(y, dtype), stage.activation)
