"""Computes the oracles of linear layers and of ops that are made of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._call import Call, Expected, Floats, rounded
from .norms import gated, normed, quantized

_GROUP = 128


def product(x: Floats, weight: Floats, bias: Floats | None = None) -> Floats:
    """The sums over the last dimension of both."""
    with np.errstate(invalid="ignore"):
        y: Floats = np.einsum("...k,nk->...n", x, weight)
    return y if bias is None else y + bias


def linear(call: Call) -> Expected:
    return {0: product(call["x"], call["weight"], call["bias"])}


def dequantized(q: Floats, scale: Floats) -> Floats:
    """Each number times the scale of its row and column: one for all, for each, or for 128."""
    places = []
    for size, scales in zip(q.shape, scale.shape, strict=True):
        unit = 1 if scales == size else max(size, 1) if scales == 1 else _GROUP
        places.append(np.arange(size) // unit)
    values: Floats = q * scale[np.ix_(*places)]
    return values


def linear_fp8(call: Call) -> Expected:
    x = dequantized(call["x"], call["x_scale"])
    return {0: product(x, dequantized(call["weight"], call["weight_scale"]), call["bias"])}


def gated_linear(call: Call) -> Expected:
    gate_up = rounded(product(call["x"], call["weight"]), call.dtypes["x"])
    return {0: gated(gate_up, None, call["activation"])}


def gated_linear_fp8(call: Call) -> Expected:
    x = dequantized(call["x"], call["x_scale"])
    weight = dequantized(call["weight"], call["weight_scale"])
    gate_up = rounded(product(x, weight), call["dtype"])
    y = rounded(gated(gate_up, None, call["activation"]), call["dtype"])
    return quantized(y, call["out_scale"])


def linear_add_norm_linear(call: Call) -> Expected:
    dtype: Any = call.dtypes["x"]
    total = rounded(rounded(product(call["x"], call["weight"]), dtype) + call["residual"], dtype)
    norm = rounded(normed(total, call["norm_weight"], call["eps"], None, dtype), dtype)
    y = product(norm, call["next_weight"], call["next_bias"])
    if call["activation"] is not None:
        y = gated(rounded(y, dtype), None, call["activation"])
    return {0: y, 1: total}
