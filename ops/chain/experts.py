"""Chain kernels of experts: between dense layers for few tokens, and with the add and norm behind
them for any number."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.desc import TensorDesc
from ..core.launch import Launches, run_all
from ..core.target import Target
from ..experts import csrc
from ..experts.moe import (
    Call as ExpertsCall,
    Planned,
    kernel_names,
    logits_of,
    plan_layers,
    plan_sum_and_norm,
)
from ..launches.experts import NormOfSum
from ..linear.kernels import STREAM as STREAMED_LINEAR, why_not_streamed
from ..linear.linear import OP as LINEAR
from .kernels import ChainKernel, Part, streamed_layer, why_no_plain_norm
from .row_stages import AddNorm
from .stages import Experts, Linear, State


def _never_streams(stages: tuple[Any, ...]) -> str:
    for stage in stages:
        if isinstance(stage, AddNorm):
            if stage.reduce:
                return "a sum over ranks comes before its norm"
            if reason := why_no_plain_norm(stage):
                return reason
        if isinstance(stage, Linear) and stage.activation is not None:
            return "a layer beside the experts has an activation"
        if isinstance(stage, Linear) and stage.weight_format is not None:
            return f"reads no weights of layers in {stage.weight_format}"
    first, _, experts, *_ = stages
    fp8 = "gate_up_scale" in experts.tensors and experts.weight_format is None
    if (first.group_size is None) is fp8:
        return "either the experts or the layer before them are FP8"
    return ""


def _stream_refuses(part: Part, target: Target) -> str:
    dtype = part.state.total.dtype
    layers = [streamed_layer(part.stages[0], part.operands[0], dtype, add=True)]
    if part.stages[3:]:
        layers.append(streamed_layer(part.stages[4], part.operands[4], dtype, prologue="norm"))
    if reason := why_not_streamed(layers, part.rows, target):
        return reason
    normed = TensorDesc(dtype, tuple(part.state.total.shape))
    experts = part.stages[2].call(normed, part.operands[2])
    return csrc.why_not_streamed(experts, part.rows, target)


def _stream(part: Part) -> State | None:
    """Five kernels, each of which streams weights; three where the experts end the part."""
    state, operands = part.state, part.operands
    tensors = [state.x, state.total, *(t for each in operands for t in each.values())]
    if state.scale is not None or not all(
        t.is_contiguous() and t.data_ptr() % 16 == 0 for t in tensors
    ):
        return None
    first, norm = operands[:2]
    weighted, total, squares = torch.ops.fw_cuda.skinny_linear_add.default(
        *(state.x, first["weight"], first.get("bias"), state.total, norm["weight"]),
        first.get("weight_scale"),
    )
    experts = part.stages[2].call(weighted, operands[2])
    made = csrc.route_and_gate_up(experts, squares, float(part.stages[1].eps))
    if not part.stages[3:]:
        return state._replace(x=csrc.down(experts, made), total=total)
    next_norm, then = operands[3:]
    total, weighted, squares = csrc.down_add_norm(experts, made, total, next_norm["weight"])
    behind = (then["weight"], then.get("bias"), None, then.get("weight_scale"))
    norm_linear = torch.ops.fw_cuda.skinny_norm_linear.default
    y = norm_linear(weighted, squares, float(part.stages[3].eps), *behind)
    return state._replace(x=y, total=total)


def _stream_names(part: Part) -> tuple[str, ...]:
    first = f"{STREAMED_LINEAR.name}, add"
    experts = part.stages[2].call(part.state.total, part.operands[2])
    if not part.stages[3:]:
        return (first, *csrc.streamed_names(experts))
    return (first, *csrc.streamed_names(experts, adds=True), f"norm, {STREAMED_LINEAR.name}")


STREAM_EXPERTS = ChainKernel(
    "streaming kernels of experts",
    ((Linear, AddNorm, Experts, AddNorm, Linear), (Linear, AddNorm, Experts)),
    _never_streams,
    _stream_refuses,
    _stream,
    _stream_names,
)


def _never_sums(stages: tuple[Any, ...]) -> str:
    norm = stages[1]
    if norm.reduce:
        return "a sum over ranks comes before the norm"
    if norm.group_size is not None:
        return "the norm behind the experts quantizes"
    return "it is a layer norm" if norm.center else ""


def _logits(experts: ExpertsCall) -> Tensor:
    return logits_of(experts, _skinny)


def _skinny(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = LINEAR.implementation("skinny").fn(x, weight, bias, *(None,) * 5)
    return y


def _of_csrc(experts: ExpertsCall) -> Planned:
    return csrc.layers(experts, _logits)


def _of_triton(experts: ExpertsCall) -> Planned:
    return plan_layers(experts, _logits(experts))


def _plan(part: Part, layers: Callable[[ExpertsCall], Planned]) -> Launches[State]:
    """The launches that are left when ``layers`` has run or planned both layers of the experts."""
    experts = part.stages[0].call(part.state.x.contiguous(), part.operands[0])
    stage, weight = part.stages[1], part.operands[1]["weight"]
    norm = NormOfSum(weight, float(stage.eps), stage.offset)
    launches, results = plan_sum_and_norm(experts, layers(experts), part.state.total, norm)
    return launches, part.state._replace(x=results[0], total=results[1])


def _run(part: Part, layers: Callable[[ExpertsCall], Planned]) -> State:
    launches, state = _plan(part, layers)
    run_all(launches)
    return state


def _launches(part: Part) -> Launches[State]:
    operands = part.operands[0]
    logits = LINEAR.fake(part.state.x, operands["router_weight"], operands.get("router_bias"))
    return _plan(part, partial(plan_layers, logits=logits))


def _triton_names(part: Part) -> tuple[str, ...]:
    return ("cuBLAS", *kernel_names(_launches(part)[0]))


def _csrc_names(part: Part) -> tuple[str, ...]:
    return csrc.names(part.stages[0].call(part.state.x, part.operands[0]), _triton_names(part))


def _sum(layers: Callable[[ExpertsCall], Planned], names: Any) -> ChainKernel:
    """Experts whose sum, the add behind them and its norm are one kernel."""
    return ChainKernel(
        "experts' sum with add and norm",
        ((Experts, AddNorm),),
        _never_sums,
        lambda part, target: "",
        partial(_run, layers=layers),
        names,
        _launches,
    )


SUM_OF_CSRC, SUM_OF_TRITON = _sum(_of_csrc, _csrc_names), _sum(_of_triton, _triton_names)
