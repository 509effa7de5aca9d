"""csrc's kernels of linear layers: what they refuse, and their calls.

The streaming kernel (``csrc/gemm/skinny_linear.cuh``) serves few rows, with prologue and epilogue.
The kernel of clusters (``csrc/gemm/cluster_linear.cuh``) serves some more, and the persistent one
(``csrc/gemm/persistent_linear.cuh``) more rows of gated layers; both of bfloat16 and of FP8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.device_table import most_rows
from ..core.target import Target
from ..norm.gated_act import ACTIVATIONS
from .desc import BLOCK, LinearArgs, LinearDesc

_LINE_BYTES = 128
# Smaller weights are not measured; their time is that of launches rather than of bytes, of which
# layers that are joined have fewer.
_LEAST_BYTES = 8 << 20
_BLOCK_COLUMNS = 512
_MOST_NORMED_ROWS = 16
_STREAMED = (
    *("bfloat16", "fp8 tensor", "fp8 token", "fp8 block"),
    *("fp8 weight", "fp8 block weight"),
)
_MANY_ROWS = ("bfloat16", "fp8 tensor", "fp8 token")
# Blocks of a cluster own units of so many rows of the weight; one round of them has so many rows
# (csrc/gemm/skinny.h).
_CLUSTER_UNIT, _MOST_CLUSTER_FEATURES = 8, 7392
_OUTPUTS_STORED = 8  # by one thread of the persistent kernel


def _row_bytes(desc: LinearDesc) -> int:
    return desc.format.dtype.itemsize * desc.in_features


def stream_rows(desc: LinearDesc) -> int:
    """The most rows for which the streaming kernel is chosen.

    With it, the bfloat16 linear layers of a Llama-3-8B token take 12 % less time than with cuBLAS
    at one row, 7 % less at 16 and 3 % more at 32, where x costs as much in L2 as the weight does in
    memory (docs/lab/linear.md).  It is 0 if the kernel cannot run, and for small weights.
    """
    row_bytes = _row_bytes(desc)
    joined = desc.add or desc.prologue  # saves launches, whatever its size
    if row_bytes % _LINE_BYTES or (desc.out_features * row_bytes < _LEAST_BYTES and not joined):
        return 0
    most = most_rows(f"stream {desc.weight_format}", desc.out_features)
    return min(most, _MOST_NORMED_ROWS) if desc.add or desc.prologue else most


def stream_refuses(desc: LinearDesc, rows: int, target: Target) -> str:
    """Why the streaming kernel does not serve a layer, or an empty string."""
    if target.why_no_hopper:
        return target.why_no_hopper
    if desc.weight_format not in _STREAMED:
        return f"dtype {desc.format.dtype}, not bfloat16 or FP8"
    if desc.format.scaled and not desc.format.x_scale and desc.dtype != torch.bfloat16:
        return f"x is {desc.dtype}: an FP8 weight is converted to bfloat16 alone"
    if desc.format.x_scale and (desc.add or desc.prologue):
        return "joins no layers of FP8 x: quantizing it in every block was slower"
    if desc.format.weight_scale == (BLOCK, BLOCK):
        if desc.activation:
            return "activates no layer with scales of blocks"
        if desc.in_features % _BLOCK_COLUMNS:
            return f"in_features {desc.in_features}: block scales are copied for {_BLOCK_COLUMNS}"
    if desc.groups > 1:
        return f"{desc.groups} groups of weights, expected 1"
    most = stream_rows(desc)
    if not most:
        return (
            f"weight [{desc.out_features}, {desc.in_features}]: in_features not a multiple of "
            f"{_LINE_BYTES // desc.format.dtype.itemsize}, or less than {_LEAST_BYTES >> 20} MiB"
        )
    if not 0 < rows <= most:
        return f"{rows} rows: fastest from 1 to {most}"
    return target.why_no_csrc


def _why_not_many(desc: LinearDesc) -> str:
    """Why neither of the kernels for more rows serves a layer, or an empty string."""
    if desc.weight_format not in _MANY_ROWS or desc.dtype != torch.bfloat16:
        return "multiplies bfloat16, or FP8 without scales of blocks, to bfloat16"
    return "joins no layers" if desc.groups > 1 or desc.prologue or desc.add else ""


def _why_no_cluster(desc: LinearDesc) -> str:
    """Why the kernel of clusters serves a layer with no number of rows, or an empty string."""
    if reason := _why_not_many(desc):
        return reason
    n, k = desc.out_features, desc.in_features
    if n % _CLUSTER_UNIT or n > _MOST_CLUSTER_FEATURES or _row_bytes(desc) % _LINE_BYTES:
        return (
            f"weight [{n}, {k}]: expected a multiple of {_CLUSTER_UNIT} rows up to "
            f"{_MOST_CLUSTER_FEATURES}, of a multiple of {_LINE_BYTES} bytes"
        )
    if n * _row_bytes(desc) < _LEAST_BYTES:
        return f"weight [{n}, {k}]: less than {_LEAST_BYTES >> 20} MiB"
    return ""


def cluster_rows(desc: LinearDesc) -> int:
    """The most rows for which the kernel of clusters is chosen; 0 if it cannot run."""
    if _why_no_cluster(desc):
        return 0
    return most_rows(f"cluster {desc.weight_format}", desc.out_features)


def cluster_refuses(desc: LinearDesc, rows: int, target: Target) -> str:
    """Why the kernel of clusters does not serve a layer, or an empty string."""
    if reason := target.why_no_hopper or _why_no_cluster(desc):
        return reason
    most = cluster_rows(desc)
    if not 0 < rows <= most:
        return f"{rows} rows: fastest up to {most}"
    return target.why_no_csrc


def _why_not_persistent(desc: LinearDesc) -> str:
    """Why the persistent kernel serves a layer with no number of rows, or an empty string."""
    if reason := _why_not_many(desc):
        return reason
    if desc.quantize or desc.activation not in ACTIVATIONS:
        return f"serves gated layers alone ({', '.join(ACTIVATIONS)}), and quantizes nothing"
    if desc.columns % _OUTPUTS_STORED or _row_bytes(desc) % _LINE_BYTES:
        return (
            f"weight [{desc.out_features}, {desc.in_features}]: expected a multiple of "
            f"{_OUTPUTS_STORED} outputs, from rows of a multiple of {_LINE_BYTES} bytes"
        )
    if desc.out_features * _row_bytes(desc) < _LEAST_BYTES:
        return (
            f"weight [{desc.out_features}, {desc.in_features}]: less than {_LEAST_BYTES >> 20} MiB"
        )
    return ""


def persistent_refuses(desc: LinearDesc, rows: int, target: Target) -> str:
    """Why the persistent kernel does not serve a layer, or an empty string."""
    if reason := target.why_no_hopper or _why_not_persistent(desc):
        return reason
    most = most_rows(f"persistent {desc.weight_format}", desc.out_features)
    if not 0 < rows <= most:
        return f"{rows} rows: fastest up to {most}"
    return target.why_no_csrc


def _can_stream(t: Tensor) -> bool:
    """Whether the kernels' 16-byte copies can read the rows of a matrix."""
    return t.stride(1) == 1 and t.stride(0) * t.itemsize % 16 == 0 and t.data_ptr() % 16 == 0


def streamable(x: Tensor, *weights: Tensor) -> Tensor | None:
    """x as a matrix, if the kernels' copies can read it and the weights."""
    x_2d = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return x_2d if all(map(_can_stream, (x_2d, *weights))) else None


def reads_bias(bias: Tensor | None) -> bool:
    """Whether the kernels for more rows, which read several numbers of it at once, can read it."""
    return bias is None or bias.data_ptr() % 16 == 0


def _of_shape(y: Tensor, x: Tensor) -> Tensor:
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[1])


def stream(*args: Any) -> Tensor | None:
    """A call of ``linear``, with its epilogue; None if the copies cannot read the operands."""
    call = LinearArgs(*args)
    rows = streamable(call.x, call.weight)
    if rows is None:
        return None
    operands = (call.weight, call.bias, call.x_scale, call.weight_scale)
    how = (call.out_dtype, *call.epilogue)
    return _of_shape(torch.ops.fw_cuda.skinny_linear.default(rows, *operands, *how), call.x)


def cluster(*args: Any) -> Tensor | None:
    """The sums of a call of ``linear``; None if the copies cannot read the operands."""
    call = LinearArgs(*args)
    rows = streamable(call.x, call.weight)
    if rows is None or not reads_bias(call.bias):
        return None
    how = (call.weight, call.bias, call.x_scale, call.weight_scale)
    return _of_shape(torch.ops.fw_cuda.cluster_linear.default(rows, *how), call.x)


def persistent(*args: Any) -> Tensor | None:
    """A call of ``linear``, with its gated activation; None if the copies cannot read the
    operands."""
    call = LinearArgs(*args)
    rows = streamable(call.x, call.weight)
    if rows is None or not reads_bias(call.bias):
        return None
    how = (call.weight, call.bias, call.activation, call.x_scale, call.weight_scale)
    return _of_shape(torch.ops.fw_cuda.persistent_linear.default(rows, *how), call.x)
