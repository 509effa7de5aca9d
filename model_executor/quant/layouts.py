"""How checkpoints lay out weights of 4 and 8 bits, as data.

Each project packs the same numbers in its own way.  A ``Layout`` says how, and in which of
``STORED_FORMATS`` the layer holds them: ``convert`` brings one to the other while a weight is read.
Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ...config.weight_format import (
    MXFP4,
    NVFP4,
    STORED_FORMATS,
    Packing,
    StoredFormat,
    StoredTensor,
    integer_format,
)

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Stored: TypeAlias = Literal["packed", "bytes"]
"""Weights of compressed-tensors: several in an int32, or each in an int8."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a checkpoint has the weights of one format.

    Attributes:
        project: who writes it, for errors.
        target: the format in which a layer holds them.
        bits: of an integer, which may be less than its element or field has.
        weight, scale, zero, row_scale: the checkpoint's tensors.  A unit of 0 is all rows or
            columns; dimensions of one number may be missing.  Scales are of any floating-point
            dtype where theirs is float32.
        order: the tensor that says for each column which group it belongs to, where neighbours
            need not share one.
        offset: of symmetric weights, the integer that stands for 0; of others, the least integer.
        zero_offset: added to every stored zero point.
        divides: the row scale divides.
        unread: suffixes of tensors that are there beside them.
    """

    project: str
    target: str
    bits: int
    weight: StoredTensor
    scale: StoredTensor
    zero: StoredTensor | None = None
    row_scale: StoredTensor | None = None
    order: StoredTensor | None = None
    offset: int = 0
    zero_offset: int = 0
    divides: bool = False
    unread: tuple[str, ...] = ()

    @property
    def form(self) -> StoredFormat:
        """The format in which a layer holds the weights."""
        return STORED_FORMATS[self.target]

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """The checkpoint's tensors, by the names of those of a layer."""
        kinds = {
            "weight": self.weight,
            "weight_scale": self.scale,
            "weight_zero": self.zero,
            "weight_row_scale": self.row_scale,
            "order": self.order,
        }
        return {kind: tensor for kind, tensor in kinds.items() if tensor is not None}


def awq(group: int) -> Layout:
    """AutoAWQ's version "gemm": eight rows in an int32 in an order of its own, transposed."""
    packing = Packing(4, "rows", order=_AWQ_ORDER)
    return Layout(
        project="AutoAWQ",
        target=integer_format(4, group, zero=True),
        bits=4,
        weight=StoredTensor(("qweight",), "int32", packing=packing, transposed=True),
        scale=StoredTensor(("scales",), "float32", (1, group), transposed=True),
        zero=StoredTensor(("qzeros",), "int32", (1, group), packing, transposed=True),
    )


def gptq(bits: int, group: int, *, symmetric: bool, version: int, ordered: bool) -> Layout:
    """GPTQ's: columns of an int32, transposed.  Version 1 stores zero points less one."""
    columns, rows = Packing(bits), Packing(bits, "rows")
    return Layout(
        project="GPTQ",
        target=integer_format(bits, group, zero=not symmetric),
        bits=bits,
        weight=StoredTensor(("qweight",), "int32", packing=columns, transposed=True),
        scale=StoredTensor(("scales",), "float32", (1, group), transposed=True),
        zero=StoredTensor(("qzeros",), "int32", (1, group), rows, transposed=True),
        order=StoredTensor(("g_idx",), "int32", (0, 1)) if ordered else None,
        offset=2 ** (bits - 1) if symmetric else 0,
        zero_offset=1 if version == 1 else 0,
        unread=() if ordered else ("g_idx",),
    )


def compressed(
    bits: int,
    unit: tuple[int, int],
    stored: Stored,
    *,
    symmetric: bool,
    ordered: bool,
    target: str = "",
) -> Layout:
    """Integers of compressed-tensors, packed or a byte each; ``unit`` is that of a scale.
    ``target``: another format than that of weights alone."""
    packed, least = stored == "packed", -(2 ** (bits - 1))
    if packed:
        weight = StoredTensor(("weight_packed",), "int32", packing=Packing(bits))
        zero = StoredTensor(("weight_zero_point",), "int32", unit, Packing(bits, "rows"))
    else:
        weight = StoredTensor(("weight",), "int8")
        zero = StoredTensor(("weight_zero_point",), "int8", unit)
    zeros = () if not symmetric else ("weight_zero_point",)
    return Layout(
        project="compressed-tensors",
        target=target or integer_format(bits, unit[1], zero=not symmetric),
        bits=bits,
        weight=weight,
        scale=StoredTensor(("weight_scale",), "float32", unit),
        zero=None if symmetric else zero,
        order=StoredTensor(("weight_g_idx",), "int32", (0, 1)) if ordered else None,
        offset=(-least if symmetric else 0) if packed else (0 if symmetric else least),
        unread=("weight_shape", *zeros, "input_scale", "input_zero_point"),
    )


def modelopt_int4(group: int) -> Layout:
    """ModelOpt's: two rows in a byte, in two's complement."""
    return Layout(
        project="ModelOpt",
        target=integer_format(4, group),
        bits=4,
        weight=StoredTensor(("weight",), "uint8", packing=Packing(4, "rows", signed=True)),
        scale=StoredTensor(("weight_scale",), "float32", (1, group)),
        unread=("input_scale",),
    )


def nvfp4(project: str) -> Layout:
    """NVFP4 of ModelOpt, and of compressed-tensors, where the scale of all divides."""
    divides = project == "compressed-tensors"
    names = ("weight_packed", "weight_global_scale") if divides else ("weight", "weight_scale_2")
    return Layout(
        project=project,
        target=NVFP4,
        bits=4,
        weight=StoredTensor(names[:1], "uint8", packing=Packing(4)),
        scale=StoredTensor(("weight_scale",), "float8_e4m3fn", (1, 16)),
        row_scale=StoredTensor(names[1:], "float32", (0, 0)),
        divides=divides,
        unread=("input_global_scale",) if divides else ("input_scale",),
    )


def mxfp4(project: str) -> Layout:
    """MXFP4 of gpt-oss, with blocks as a dimension, and of compressed-tensors."""
    gpt_oss = project == "gpt-oss"
    names = ("weight_blocks", "blocks") if gpt_oss else ("weight_packed",)
    scales = ("weight_scales", "scales") if gpt_oss else ("weight_scale",)
    return Layout(
        project=project,
        target=MXFP4,
        bits=4,
        weight=StoredTensor(names, "uint8", packing=Packing(4)),
        scale=StoredTensor(scales, "float8_e8m0fnu", (1, 32)),
    )
