"""The chain kernel of gated FP8 layers: csrc multiplies and activates, Triton quantizes.

It reads x as the stage before has quantized it, or quantizes it as the layer would, and hands on a
quantized result, so that all stages around it run as without it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..core.launch import Launches, run_all
from ..core.target import Target
from ..experts.moe import kernel_names
from ..launches.quant import Quantized, quantize
from ..linear.csrc import reads_bias, streamable
from ..linear.desc import LinearDesc
from ..linear.kernels import PERSISTENT, STREAM
from .kernels import ChainKernel, Part
from .stages import Act, Linear, State


def _never(stages: tuple[Any, ...]) -> str:
    layer, act = stages
    if layer.group_size is None or act.group_size is None:
        return "the layer or what follows its activation is not FP8"
    if layer.group_size or act.group_size:
        return "reads no scales of blocks"
    if layer.weight_format is not None:
        return f"reads no weights in {layer.weight_format}"
    return "" if layer.activation is None else "the layer has an activation of its own"


def _described(part: Part) -> LinearDesc:
    (_, act), operands = part.stages, part.operands[0]
    rows, columns = operands["weight"].shape
    return LinearDesc(
        "fp8 token",
        part.state.total.dtype,
        rows,
        columns,
        bias=operands.get("bias") is not None,
        activation=act.activation,
    )


def _refuses(part: Part, target: Target) -> str:
    desc = _described(part)
    if reason := PERSISTENT.refuses(desc, part.rows, target):
        return reason
    streams = not STREAM.refuses(replace(desc, activation=""), part.rows, target)
    return f"{part.rows} rows: {STREAM.name} is faster" if streams else ""


def _read(part: Part) -> Launches[Quantized]:
    """x as the layer multiplies it, and its scales."""
    state = part.state
    if state.scale is not None:
        return [], (state.x, state.scale)
    return quantize(state.x, part.stages[0].group_size)


def _quantized(part: Part, y: Any) -> Launches[State]:
    launches, (x, scale) = quantize(y, part.stages[1].group_size)
    return launches, part.state._replace(x=x, scale=scale)


def _around(part: Part) -> tuple[Launches[Quantized], Launches[State]]:
    """The launches ahead of the kernel, and those behind."""
    columns = _described(part).columns
    return _read(part), _quantized(part, part.state.total.new_empty((part.rows, columns)))


def _launches(part: Part) -> Launches[State]:
    (ahead, _), (behind, state) = _around(part)
    return ahead + behind, state


def _names(part: Part) -> tuple[str, ...]:
    (ahead, _), (behind, _) = _around(part)
    return (*kernel_names(ahead), PERSISTENT.name, *kernel_names(behind))


def _run(part: Part) -> State | None:
    (_, act), operands = part.stages, part.operands[0]
    weight, bias = operands["weight"], operands.get("bias")
    ahead, (x, scale) = _read(part)
    rows = streamable(x, weight)
    if rows is None or not reads_bias(bias):
        return None
    run_all(ahead)
    scales = (scale, operands["weight_scale"])
    y = torch.ops.fw_cuda.persistent_linear.default(rows, weight, bias, act.activation, *scales)
    launches, made = _quantized(part, y)
    run_all(launches)
    return made


GATED = ChainKernel(
    "a gated kernel, a quantizing one",
    ((Linear, Act),),
    _never,
    _refuses,
    _run,
    _names,
    _launches,
    quantizes=True,
)
