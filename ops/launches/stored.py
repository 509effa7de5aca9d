"""What Triton's kernels are told of weights in stored formats, which they dequantize in registers.

``ops/triton_kernels/experts.py`` has the function that reads a tile of such a weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...config.weight_format import E2M1, StoredFormat
from ..core.tiles import next_power_of_2

_BITS = (4, 8)
_SCALES = ("float8_e8m0fnu", "bfloat16", "float16", "float32")


def why_not_stored(form: StoredFormat | None) -> str:
    """Why the kernels do not read a format, or nothing; None stands for weights that have none."""
    if form is None:
        return ""
    weight, scale = form.weight, form.scale
    if form.x_dtype:
        return f"activations of {form.name} are quantized too"
    if form.zero is not None and (form.zero.dtype not in _SCALES or form.zero_offset):
        return f"{form.name} has zero points of {form.zero.dtype}"
    if weight.bits not in _BITS or weight.dtype not in ("uint8", "int8") or weight.transposed:
        return f"{form.name} holds {weight.bits} bits in {weight.dtype}, expected 4 or 8 in a byte"
    packing = weight.packing
    if packing is not None and (packing.along != "columns" or packing.order not in ((), (0, 1))):
        return f"{form.name} does not pack neighbours of a row in ascending order"
    columns = scale.unit[1]
    if scale.unit[0] != 1 or scale.transposed or columns & (columns - 1) or 0 < columns < 16:
        return f"{form.name} has a scale for {scale.unit}, expected (1, a power of two from 16 on)"
    if scale.dtype not in _SCALES:
        return f"{form.name} has scales of {scale.dtype}, expected one of {', '.join(_SCALES)}"
    if getattr(form, "row_scale", None) is not None:
        return f"{form.name} has scales of rows too"
    if form.values and form.values != E2M1:
        return f"{form.name} has values of its own, expected those of E2M1"
    return ""


def why_not_words(form: StoredFormat | None, columns: int) -> str:
    """Why the kernels do not read rows of so many columns in a format, or nothing."""
    if form is None or columns % (32 // form.weight.bits) == 0:
        return ""
    return f"{columns} columns of {form.name} are no whole words of 32 bits"


def stored_constexprs(form: StoredFormat | None, columns: int) -> dict[str, Any]:
    """The constants of a kernel that reads weights [rows, columns] in a format.

    STORED: "e2m1", "signed" or "unsigned" integers; None for weights that are not stored so.
    BITS: of a number.  GROUP: columns that share a scale.  OFFSET: is taken from every integer.
    """
    if form is None:
        return {"STORED": None, "BITS": 0, "GROUP": 1, "OFFSET": 0}
    kind = "e2m1" if form.values else "signed" if form.weight.signed else "unsigned"
    return {
        "STORED": kind,
        "BITS": form.weight.bits,
        "GROUP": form.scale.unit[1] or next_power_of_2(columns),
        "OFFSET": form.offset,
    }


def words_of(weight: Tensor, form: StoredFormat | None) -> Tensor:
    """A weight of bytes as words of 32 bits; one that is not stored as it is."""
    return weight if form is None else weight.contiguous().view(torch.int32)


def bits_of(scale: Tensor) -> Tensor:
    """Scales as kernels read them: powers of two as their exponents' bytes."""
    return scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale
