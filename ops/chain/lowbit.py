"""The chain kernel of low-bit weights: two Triton launches for two layers and the norm between.

The first launch adds the residual to its sums and multiplies them by the norm's weight; the second
multiplies its own sums by the norm's scale, which it makes of the squares that the first one left.
"""

from __future__ import annotations

from typing import Any

import torch

from ...config.weight_format import STORED_FORMATS
from ..core.launch import Launches, run_all
from ..core.target import Target
from ..launches.linear_lowbit import AddedNorm, LowBit, linear, linear_add, why_not
from ..linear.desc import LinearDesc
from ..linear.kernels import ADMITTED, LOW_BIT as LOW_BIT_LINEAR
from .kernels import ChainKernel, Part
from .row_stages import AddNorm
from .stages import Linear, Operands, State


def why_not_read(weight_format: str, in_features: int) -> str:
    """Why a layer of a stored format is in no chain, or an empty string."""
    if own := ADMITTED.get(weight_format):
        return f"{own[0].name} reads it"
    return why_not(STORED_FORMATS[weight_format], in_features)


def _never(stages: tuple[Any, ...]) -> str:
    first, norm, second = stages
    if first.weight_format is None or second.weight_format is None:
        return "a weight is not stored in few bits"
    if first.activation is not None:
        return "the layer before the norm has an activation"
    if norm.reduce:
        return "sums over no ranks"
    if norm.center:
        return "joins no layers to a layer norm"
    return "" if norm.group_size is None else "a norm quantizes"


def _weight(layer: Linear, operands: Operands) -> LowBit:
    stored = STORED_FORMATS[str(layer.weight_format)]
    optional = (operands.get(name) for name in ("weight_zero", "weight_row_scale"))
    return LowBit(stored, operands["weight"], operands["weight_scale"], *optional)


def _described(layer: Linear, operands: Operands, columns: int, dtype: torch.dtype) -> LinearDesc:
    rows = layer.rows(operands["weight"])
    return LinearDesc(str(layer.weight_format), dtype, rows, columns)


def _refuses(part: Part, target: Target) -> str:
    (first, _, second), (first_of, norm_of, second_of) = part.stages, part.operands
    state = part.state
    dtype, hidden = state.total.dtype, state.total.shape[-1]
    if state.x.dtype != dtype or norm_of["weight"].dtype != dtype:
        return f"x or the norm's weight is not {dtype}, as the residual is"
    layers = (first, first_of, state.x.shape[-1]), (second, second_of, hidden)
    for layer, operands, columns in layers:
        desc = _described(layer, operands, columns, dtype)
        if reason := LOW_BIT_LINEAR.refuses(desc, part.rows, target):
            return reason
    return ""


def _plan(part: Part) -> Launches[State]:
    (first, norm, second), (first_of, norm_of, second_of) = part.stages, part.operands
    state, weight = part.state, norm_of["weight"].contiguous()
    added = AddedNorm(weight, norm.offset, norm.eps)
    residual, bias = state.total.contiguous(), first_of.get("bias")
    launches, results = linear_add(state.x, _weight(first, first_of), bias, residual, added)
    weighted, total, normed = results
    second_weight, bias = _weight(second, second_of), second_of.get("bias")
    more, y = linear(weighted, second_weight, bias, second.activation, normed)
    return [*launches, *more], state._replace(x=y, total=total)


def _run(part: Part) -> State | None:
    layers = zip(part.stages[::2], part.operands[::2], strict=True)
    if not all(_weight(layer, operands).fits() for layer, operands in layers):
        return None
    launches, state = _plan(part)
    run_all(launches)
    return state


LOW_BIT = ChainKernel(
    "two kernels of low-bit weights",
    ((Linear, AddNorm, Linear),),
    _never,
    _refuses,
    _run,
    lambda part: (f"{LOW_BIT_LINEAR.name}, add", f"norm, {LOW_BIT_LINEAR.name}"),
    _plan,
)
