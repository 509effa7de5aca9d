"""The chain kernels of low-bit weights: two launches for two layers and the norm between.

The first launch adds the residual to its sums and multiplies them by the norm's weight; the second
multiplies its own sums by the norm's scale, which it makes of the squares that the first one left.
csrc's kernels do so for few rows of weights of 4 bits, Triton's for others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...config.weight_format import STORED_FORMATS, why_not_words
from ..core.launch import Launches, run_all
from ..core.target import Target
from ..launches.linear_lowbit import AddedNorm, LowBit, linear, linear_add
from ..linear import packed
from ..linear.csrc import streamable
from ..linear.desc import LinearDesc
from ..linear.kernels import ADMITTED, LOW_BIT as LOW_BIT_LINEAR, PACKED as PACKED_LINEAR
from .kernels import ChainKernel, Part
from .row_stages import AddNorm
from .stages import Linear, Operands, State


def why_not_read(weight_format: str, in_features: int) -> str:
    """Why a layer of a stored format is in no chain, or an empty string."""
    if own := ADMITTED.get(weight_format):
        return f"{own[0].name} reads it"
    return why_not_words(STORED_FORMATS[weight_format], in_features)


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


def _described(part: Part) -> list[LinearDesc]:
    """Both layers of a part, each by itself."""
    (first, _, second), (first_of, _, second_of) = part.stages, part.operands
    dtype, hidden = part.state.total.dtype, part.state.total.shape[-1]
    layers = (first, first_of, part.state.x.shape[-1]), (second, second_of, hidden)
    return [
        LinearDesc(
            str(layer.weight_format),
            dtype,
            layer.rows(operands["weight"]),
            columns,
            activation=layer.activation or "",
        )
        for layer, operands, columns in layers
    ]


def _why_other_dtypes(part: Part) -> str:
    dtype, norm_of = part.state.total.dtype, part.operands[1]
    if part.state.x.dtype == dtype == norm_of["weight"].dtype:
        return ""
    return f"x or the norm's weight is not {dtype}, as the residual is"


def _refuses(part: Part, target: Target) -> str:
    if reason := _why_other_dtypes(part):
        return reason
    layers = _described(part)
    if not any(PACKED_LINEAR.refuses(desc, part.rows, target) for desc in layers):
        return f"{part.rows} rows: {PACKED_LINEAR.name} is faster for each layer by itself"
    reasons = (LOW_BIT_LINEAR.refuses(desc, part.rows, target) for desc in layers)
    return next(filter(None, reasons), "")


def _packed_refuses(part: Part, target: Target) -> str:
    if reason := _why_other_dtypes(part):
        return reason
    first, second = _described(part)
    joined = replace(first, add=True), replace(second, prologue="norm")
    reasons = (PACKED_LINEAR.refuses(desc, part.rows, target) for desc in joined)
    return next(filter(None, reasons), "")


def _run_packed(part: Part) -> State | None:
    (_, norm, second), (first_of, norm_of, second_of) = part.stages, part.operands
    state = part.state
    held = [
        packed.operands(
            STORED_FORMATS[str(layer.weight_format)],
            *(of["weight"], of["weight_scale"], of.get("weight_zero"), of.get("weight_row_scale")),
        )
        for layer, of in ((part.stages[0], first_of), (second, second_of))
    ]
    x = streamable(state.x, first_of["weight"], second_of["weight"])
    if x is None or held[0] is None or held[1] is None:
        return None
    are_floats = [bool(STORED_FORMATS[str(s.weight_format)].values) for s in part.stages[::2]]
    shape = state.total.shape
    y, total = torch.ops.fw_cuda.packed_linear_add_norm_linear.default(
        *(x, *held[0], first_of.get("bias"), are_floats[0]),
        state.total.reshape(x.shape[0], -1).contiguous(),
        *(norm_of["weight"].contiguous(), norm.eps, norm.offset or 0.0),
        *(*held[1], second_of.get("bias"), are_floats[1], second.activation),
    )
    return state._replace(x=y.view(*shape[:-1], y.shape[1]), total=total.view(shape))


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


PACKED = ChainKernel(
    "two streaming kernels of 4-bit weights",
    ((Linear, AddNorm, Linear),),
    _never,
    _packed_refuses,
    _run_packed,
    lambda part: (f"{PACKED_LINEAR.name}, add", f"norm, {PACKED_LINEAR.name}"),
)
LOW_BIT = ChainKernel(
    "two kernels of low-bit weights",
    ((Linear, AddNorm, Linear),),
    _never,
    _refuses,
    _run,
    lambda part: (f"{LOW_BIT_LINEAR.name}, add", f"norm, {LOW_BIT_LINEAR.name}"),
    _plan,
)
