"""Computes the oracles of linear layers and of ops that are made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...config.weight_format import STORED_FORMATS
from ._call import Call, Expected, Floats, rounded
from .norms import activated, quantized
from .stored import numbers_of

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


def stored_numbers(weight_format: str, tensors: Mapping[str, Any]) -> Floats:
    """The numbers of a weight in a stored format, of its tensors by name."""
    zero, of_rows = tensors.get("weight_zero"), tensors.get("weight_row_scale")
    form = STORED_FORMATS[weight_format]
    numbers = numbers_of(form, tensors["weight"], tensors["weight_scale"], zero)
    return numbers if of_rows is None else numbers * of_rows


def linear(call: Call) -> Expected:
    x, weight = call["x"], call["weight"]
    if call["weight_format"] is not None:
        weight = stored_numbers(call["weight_format"], call.values)
        if call["x_scale"] is not None:
            x = dequantized(x, call["x_scale"])
    elif call["weight_scale"] is not None:
        x, weight = dequantized(x, call["x_scale"]), dequantized(weight, call["weight_scale"])
    dtype: Any = call["out_dtype"] or call.dtypes["x"]
    y = matmul(x, weight, call["bias"])
    if call["activation"] is not None:
        y = activated(rounded(y, dtype), call["activation"])
    return {0: y} if call["out_scale"] is None else quantized(rounded(y, dtype), call["out_scale"])
