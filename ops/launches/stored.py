"""What Triton's kernels are told of weights in stored formats, which they dequantize in registers.

``ops/triton_kernels/experts.py`` has the function that reads a tile of such a weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...config.weight_format import StoredFormat
from ..core.tiles import next_power_of_2


def kind_of(form: StoredFormat) -> str:
    """What the kernels make numbers of: "e2m1", "signed" or "unsigned" integers."""
    return "e2m1" if form.values else "signed" if form.weight.signed else "unsigned"


def offset_of(form: StoredFormat) -> int:
    """What the kernels take from every integer, of a format without zero points."""
    return 0 if form.zero or form.values else form.offset


def stored_constexprs(form: StoredFormat | None, columns: int) -> dict[str, Any]:
    """The constants of a kernel that reads weights [rows, columns] in a format.

    STORED: ``kind_of``; None for weights that are not stored so.  BITS: of a number.  GROUP:
    columns that share a scale.  OFFSET: ``offset_of``.
    """
    if form is None:
        return {"STORED": None, "BITS": 0, "GROUP": 1, "OFFSET": 0}
    return {
        "STORED": kind_of(form),
        "BITS": form.weight.bits,
        "GROUP": form.scale.unit[1] or next_power_of_2(columns),
        "OFFSET": offset_of(form),
    }


def words_of(weight: Tensor, form: StoredFormat | None) -> Tensor:
    """A weight of bytes as words of 32 bits; one that is not stored as it is."""
    return weight if form is None else weight.contiguous().view(torch.int32)


def bits_of(scale: Tensor) -> Tensor:
    """Scales as kernels read them: powers of two as their exponents' bytes."""
    return scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale
