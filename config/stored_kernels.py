"""Which stored formats the experts' kernels dequantize in registers.

Nothing here imports torch, so that a checkpoint can be refused before that is imported.
"""

from __future__ import annotations

from .weight_format import E2M1, StoredFormat

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
    if form.row_scale is not None:
        return f"{form.name} has scales of rows too"
    if form.values and form.values != E2M1:
        return f"{form.name} has values of its own, expected those of E2M1"
    return ""
