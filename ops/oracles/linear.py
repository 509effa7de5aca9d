"""Computes the oracles of linear layers and of ops that are made of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...config.weight_format import STORED_FORMATS
from ._call import Call, Expected, Floats, rounded
from .norms import activated, quantized

_GROUP = 128


def matmul(x: Floats, weight: Floats, bias: Floats | None = None) -> Floats:
    """``x @ weight.T``, plus the bias if there is one."""
    with np.errstate(invalid="ignore"):
        y: Floats = np.einsum("...k,nk->...n", x, weight)
    return y if bias is None else y + bias


def dequantized(q: Floats, scale: Floats) -> Floats:
    """Each number times the scale of its row and column: one for all, for each, or for 128."""
    places = []
    for size, scales in zip(q.shape, scale.shape, strict=True):
        unit = 1 if scales == size else max(size, 1) if scales == 1 else _GROUP
        places.append(np.arange(size) // unit)
    values: Floats = q * scale[np.ix_(*places)]
    return values


def _numbers(call: Call) -> Floats:
    """The numbers of a weight that is stored in bytes: of 8 bits, or of two of 4, the first column
    in the lower ones."""
    stored, codes = STORED_FORMATS[call["weight_format"]], call["weight"].astype(np.int64)
    if stored.weight.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)
    numbers = codes - float(stored.offset)
    if stored.values:
        exponent, odd = codes >> 1 & 3, codes & 1
        size = np.where(exponent == 0, odd / 2, 2.0 ** (exponent - 1) * (1 + odd / 2))
        numbers = np.where(codes & 8, -size, size)
    scale, zero = call["weight_scale"], call["weight_zero"]
    group = codes.shape[1] // scale.shape[1]
    if zero is not None:
        numbers = codes - np.repeat(zero, group, 1)
    numbers = numbers * np.repeat(scale, group, 1)
    of_rows = call["weight_row_scale"]
    return numbers if of_rows is None else numbers * of_rows


def linear(call: Call) -> Expected:
    x, weight = call["x"], call["weight"]
    if call["weight_format"] is not None:
        weight = _numbers(call)
    elif call["weight_scale"] is not None:
        x, weight = dequantized(x, call["x_scale"]), dequantized(weight, call["weight_scale"])
    dtype: Any = call["out_dtype"] or call.dtypes["x"]
    y = matmul(x, weight, call["bias"])
    if call["activation"] is not None:
        y = activated(rounded(y, dtype), call["activation"])
    return {0: y} if call["out_scale"] is None else quantized(rounded(y, dtype), call["out_scale"])
