"""Triton's kernels of linear layers whose weights are stored in words of 4 or 8 bit numbers.

For some rows a kernel reads the words and makes numbers of them in registers; for more rows it
costs less to write all numbers once and to leave the multiplication to cuBLAS.  What the kernels
read of a stored format is said by ``why_not_read``; no format is known here by its name.  Where x
is int8 too, the GEMM of FP8 multiplies as the tensor cores do, at any number of rows.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...config.weight_format import STORED_FORMATS, why_not_words
from ..core.device_table import most_rows
from ..core.launch import Launches, run_all
from ..core.target import Target
from ..launches import linear_lowbit as launches
from ..launches.linear_lowbit import LowBit
from ..launches.quant import quantize
from .desc import LinearArgs, LinearDesc

_MOST_ROWS = 256
"""Up to so many rows the words are read where no device table says it.  Not measured."""


def why_not_read(desc: LinearDesc) -> str:
    """Why the kernels do not read the weight of a layer, or an empty string."""
    if desc.format.stored is None:
        return "its weight is not stored in a format of its own"
    if desc.groups > 1 or desc.prologue or desc.add:
        return "multiplies, adds a bias and activates, nothing else"
    return why_not_words(desc.format.stored, desc.in_features)


def why_not_int8(desc: LinearDesc) -> str:
    """Why the kernels that multiply int8 do not serve a layer, or an empty string."""
    stored = desc.format.stored
    if stored is None or stored.x_dtype != "int8" or stored.x_columns:
        return "x is not int8 with one scale a row"
    weight, scale = stored.weight, stored.scale
    if (weight.dtype, weight.packing, weight.transposed) != ("int8", None, False):
        return f"the weight is of {weight.dtype}, expected int8 in rows"
    if scale.unit != (1, 0) or scale.dtype != "float32" or stored.zero or stored.row_scale:
        return "expected a float32 scale for each row of the weight, and no zero points"
    if stored.values or stored.offset or desc.groups > 1 or desc.prologue or desc.add:
        return "multiplies and adds a bias, nothing else"
    return ""


def int8_refuses(desc: LinearDesc, rows: int, target: Target) -> str:
    """Why the kernel that multiplies int8 does not serve a layer, or an empty string."""
    return "on cpu, not CUDA" if target.device.type == "cpu" else why_not_int8(desc)


def _rows(desc: LinearDesc) -> int:
    assert desc.format.stored is not None
    kernel = f"tiled {desc.format.stored.weight.bits} bits"
    return most_rows(kernel, desc.out_features) or _MOST_ROWS


def dequantizing_refuses(desc: LinearDesc, rows: int, target: Target) -> str:
    """Why the kernel that writes all numbers does not serve a layer, or an empty string."""
    if target.device.type == "cpu":
        return "on cpu, not CUDA"
    return why_not_read(desc)


def tiled_refuses(desc: LinearDesc, rows: int, target: Target) -> str:
    """Why the kernel that reads words does not serve a layer, or an empty string."""
    if reason := dequantizing_refuses(desc, rows, target):
        return reason
    most = _rows(desc)
    return "" if rows <= most else f"{rows} rows: read as words up to {most}"


def _weight_of(call: LinearArgs) -> LowBit:
    stored = STORED_FORMATS[call.weight_format or ""]
    optional = call.weight_zero, call.weight_row_scale
    return LowBit(stored, call.weight, call.weight_scale, *optional)


def plan_tiled(*args: Any, invariant: bool = False) -> Launches[Tensor]:
    """The launches of a call of ``linear``, its epilogue included.  ``invariant``: a row has the
    same bits whatever the other rows are."""
    call = LinearArgs(*args)
    weight = _weight_of(call)
    made, y = launches.linear(call.x, weight, call.bias, call.activation, invariant=invariant)
    if call.out_scale is None:
        return made, y
    more, (quantized,) = quantize(y, call.out_scale)
    return [*made, *more], quantized


def run_tiled(*args: Any) -> Tensor | None:
    """A call of ``linear``; None if its weight cannot be read as words where it lies."""
    if not _weight_of(LinearArgs(*args)).fits():
        return None
    made, y = plan_tiled(*args)
    run_all(made)
    return y


def plan_dequantizing(*args: Any) -> Launches[Tensor]:
    """The launch that writes all numbers of a call's weight, and the empty sums behind it."""
    call = LinearArgs(*args)
    weight = _weight_of(call)
    made, _ = launches.dequantize(weight, call.x.dtype)
    return made, call.x.new_empty((*call.x.shape[:-1], weight.shape[0]))


def run_dequantizing(*args: Any) -> Tensor | None:
    """The sums of a call of ``linear``; None if its weight cannot be read as words."""
    call = LinearArgs(*args)
    weight = _weight_of(call)
    if not weight.fits():
        return None
    made, numbers = launches.dequantize(weight, call.x.dtype)
    run_all(made)
    return F.linear(call.x, numbers, call.bias)
