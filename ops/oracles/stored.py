"""Decodes weights in stored formats, number by number, from the bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...config.weight_format import StoredFormat
from ._call import Array, Floats


def numbers_of(form: StoredFormat, weight: Array, scale: Array, zero: Array | None) -> Floats:
    """The numbers of a weight [rows, columns] of bytes, which hold one number or two of a row, the
    first in the low bits.  A scale, and a zero point, is for the columns that share it."""
    codes: Array = weight
    if form.weight.bits == 4:
        codes = np.stack([weight & 15, (weight >> 4) & 15], -1).reshape(len(weight), -1)
    if form.values:
        values: Any = np.array(form.values)[codes]
    else:
        values = codes.astype(np.float64) - form.offset
    each = codes.shape[1] // scale.shape[1]
    if zero is not None:
        values = values - np.repeat(zero, each, 1) - form.zero_offset
    numbers: Floats = values * np.repeat(scale, each, 1)
    return numbers
