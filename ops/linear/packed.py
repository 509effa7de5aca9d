"""csrc's kernels of linear layers whose weights have four bits: what they read, and their calls.

Up to 8 rows the streaming kernel reads them, with prologue and epilogue
(``csrc/gemm/skinny_packed.cuh``); some formats up to 256 rows a kernel that makes numbers of them
in registers and multiplies those by all rows (``csrc/gemm/packed_linear.cuh``).  Which stored
formats they read is a table, ``_READ``; no format is known here by its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...config.weight_format import E2M1, STORED_FORMATS, StoredFormat, StoredTensor
from ..core.device_table import most_rows
from ..core.target import Target
from .csrc import streamable
from .desc import LinearArgs, LinearDesc

_LINE_COLUMNS, _UNIT_ROWS = 256, 16
# The scales of a block's rows have room beside its rings.
_MOST_COLUMNS = 28672
STREAMED_ROWS = 8
"""The most rows of the streaming kernel, which alone joins layers that share a norm."""
# Integers by 16 rows take a layer of Llama-3-8B 91 us, and Triton 82; by 64 rows, whose tile serves
# all from 17 on, 97, and Triton 107 by 32 (docs/lab/linear.md).
_FEWER_ROWS_OF_TRITON = 16
_ALONE, _ZEROS, _ROW_SCALES = "alone", "with zero points", "with scales of rows"
_READ: dict[tuple[bool, str, int], tuple[str, ...]] = {
    (False, "float16", 128): (_ALONE, _ZEROS),
    (False, "float16", 64): (_ALONE,),
    (False, "float16", 32): (_ALONE,),
    (False, "float32", 0): (_ALONE,),
    (True, "float8_e8m0fnu", 32): (_ALONE,),
    (True, "float8_e4m3fn", 16): (_ROW_SCALES,),
}
"""Whether numbers are E2M1, the scale's dtype and its columns (0: a whole row) -> what may be
beside such scales."""


def _reasons(stored: StoredFormat) -> Iterator[str]:
    weight, scale, zero, row_scale = stored.weight, stored.scale, stored.zero, stored.row_scale
    packing = weight.packing
    if packing is None or packing.bits != 4 or weight.dtype != "uint8":
        yield f"{weight.bits} bits in {weight.dtype}: reads 4 in uint8"
    elif packing.along != "columns" or packing.order not in ((), (0, 1)) or weight.transposed:
        yield "a row's neighbours do not follow one another"
    elif packing.signed:
        yield "its integers are signed"
    if stored.x_dtype:
        yield f"x is quantized to {stored.x_dtype}: reads bfloat16"
    if stored.values and tuple(stored.values) != E2M1:
        yield "the values of its integers are not those of E2M1"
    if not stored.values and zero is None and stored.offset != 8:
        yield f"{stored.offset} is taken from its integers, expected 8"
    tensors = {"scale": scale, "zero": zero, "row_scale": row_scale}
    for name, tensor in tensors.items():
        if tensor is not None and (tensor.transposed or tensor.packing):
            yield f"{name} is packed or transposed"
    if zero is not None and (zero.dtype != "float16" or stored.zero_offset):
        yield f"zero points of {zero.dtype} to which {stored.zero_offset} is added"
    beside = _ALONE if row_scale is None else _ROW_SCALES
    beside = beside if zero is None else _ZEROS
    key = (bool(stored.values), scale.dtype, scale.unit[1])
    if scale.unit[0] != 1 or beside not in _READ.get(key, ()):
        yield f"no kernel for scales of {scale.dtype} for {_columns(scale)}, {beside}"


def _columns(scale: StoredTensor) -> str:
    rows, columns = scale.unit
    return f"{rows} rows and {columns or 'all'} columns"


def _most_rows(desc: LinearDesc) -> int:
    """The most rows for which one of the kernels is chosen.  That for more rows reads E2M1 in
    groups of 32 and integers in groups of 128."""
    stored = desc.format.stored
    assert stored is not None
    if desc.add or desc.prologue or stored.scale.unit[1] != (32 if stored.values else 128):
        return STREAMED_ROWS
    return most_rows("packed 4 bits", desc.out_features)


def why_not_read(desc: LinearDesc) -> str:
    """Why the kernels do not read the weight of a layer, or an empty string."""
    stored = desc.format.stored
    if stored is None:
        return "its weight is not stored in a format of its own"
    if reason := next(_reasons(stored), ""):
        return reason
    if desc.dtype != torch.bfloat16:
        return f"x is {desc.dtype}, not bfloat16"
    if desc.groups > 1 or desc.quantize:
        return "multiplies, adds a bias and activates, nothing else"
    n, k = desc.columns, desc.in_features
    if k % _LINE_COLUMNS or k > _MOST_COLUMNS or n % _UNIT_ROWS:
        return (
            f"a result of {n} features of {k}: expected multiples of {_UNIT_ROWS} and of "
            f"{_LINE_COLUMNS} up to {_MOST_COLUMNS}"
        )
    return ""


def refuses(desc: LinearDesc, rows: int, target: Target) -> str:
    """Why csrc's kernels do not serve a layer, or an empty string."""
    if reason := target.why_no_hopper or why_not_read(desc):
        return reason
    most = _most_rows(desc)
    if not 0 < rows <= most:
        return f"{rows} rows: reads words for 1 to {most}"
    is_integer = desc.format.stored is not None and not desc.format.stored.values
    if is_integer and STREAMED_ROWS < rows <= _FEWER_ROWS_OF_TRITON:
        return f"{rows} rows: faster up to {STREAMED_ROWS} and from {_FEWER_ROWS_OF_TRITON + 1} on"
    return target.why_no_csrc


def operands(
    stored: StoredFormat,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    row_scale: Tensor | None,
) -> tuple[Any, ...] | None:
    """The weight as the kernels take it: itself, its scales and zero points, and those of rows;
    None where these do not lie as they read them."""
    held = [tensor for tensor in (scale, zero, row_scale) if tensor is not None]
    if not all(tensor.is_contiguous() and tensor.data_ptr() % 4 == 0 for tensor in held):
        return None
    return weight, scale, zero, row_scale


def run(*args: Any) -> Tensor | None:
    """A call of ``linear``, with its activation; None if the kernels cannot read the operands."""
    call = LinearArgs(*args)
    stored = STORED_FORMATS[call.weight_format or ""]
    x = streamable(call.x, call.weight)
    optional = call.weight_zero, call.weight_row_scale
    held = operands(stored, call.weight, call.weight_scale, *optional)
    if x is None or held is None:
        return None
    kernel = torch.ops.fw_cuda.packed_linear.default
    y: Tensor = kernel(x, *held, call.bias, bool(stored.values), call.activation)
    return y if call.x.dim() == 2 else y.view(*call.x.shape[:-1], y.shape[1])
