"""Computes the oracles of norms, gated activations and quantization, and of ops made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ._call import Array, Call, Expected, Floats, Oracle, rounded, to_e4m3


def layer_normed(x: Floats, weight: Floats, eps: float, bias: Floats | None) -> Floats:
    """x without its mean, over its standard deviation (Ba et al., 2016, eq. 4), times the weight,
    plus the bias."""
    width = max(x.shape[-1], 1)
    mean = x.sum(-1, keepdims=True) / width
    variance = (x * x).sum(-1, keepdims=True) / width - mean * mean
    return (x - mean) / np.sqrt(variance + eps) * weight + (0 if bias is None else bias)  # type: ignore[no-any-return]


def normed(
    x: Floats, weight: Floats, eps: float, offset: float | None, dtype: torch.dtype
) -> Floats:
    """x over the root of its mean square (Zhang and Sennrich, 2019, eq. 4), times the weight."""
    length = np.sqrt((x * x).sum(-1, keepdims=True) / max(x.shape[-1], 1) + eps)
    unit: Floats = x / length
    return rounded(unit, dtype) * weight if offset is None else unit * (weight + offset)


def norm(call: Call) -> Expected:
    """The norm, with the add before and the quantization behind it if the call has arguments for
    them; the sum is the last result.  A layer norm is what has an argument for a bias."""
    x, dtype, offset = call["x"], call.dtypes["x"], call.values.get("weight_offset")
    if "residual" in call.values:
        x = rounded(x + call["residual"], dtype)
    if "bias" in call.values:
        y = layer_normed(x, call["weight"], call["eps"], call["bias"])
    else:
        y = normed(x, call["weight"], call["eps"], offset, dtype)
    results = _quantized(y, call)
    return {**results, len(results): x} if "residual" in call.values else results


def silu(x: Floats) -> Floats:
    """x times the logistic function (Elfwing et al., 2017)."""
    with np.errstate(over="ignore"):
        y: Floats = x / (1 + np.exp(-x))
    return y


def gelu_tanh(x: Floats) -> Floats:
    """GELU by tanh (Hendrycks and Gimpel, 2016, section 2), as 0.5 (1 + tanh z) is the logistic
    function of 2 z."""
    with np.errstate(over="ignore"):
        y: Floats = x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return y


def gelu(x: Floats) -> Floats:
    """x times the normal distribution function (Hendrycks and Gimpel, 2016, section 2)."""
    return x * (1 + torch.erf(torch.from_numpy(x / np.sqrt(2))).numpy()) / 2  # type: ignore[no-any-return]


ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh}
_PLAIN: dict[str, Callable[[Floats], Floats]] = {
    "relu": lambda x: np.where(x < 0, 0, x),
    "relu2": lambda x: np.where(x < 0, 0, x * x),
    "gelu": gelu,
    "gelu_new": gelu_tanh,
}


def activated(y: Floats, activation: str) -> Floats:
    """A linear layer's activation of its sums, which are gate and up where it gates."""
    plain = _PLAIN.get(activation)
    return gated(y, None, activation) if plain is None else plain(y)


def gated(gate_up: Floats, up: Floats | None, activation: str) -> Floats:
    if up is not None:
        return ACTIVATIONS[activation](gate_up) * up
    width = gate_up.shape[-1] // 2
    return ACTIVATIONS[activation](gate_up[..., :width]) * gate_up[..., width:]


def gated_act(activation: str) -> Oracle:
    """Make the oracle of a gated activation.

    With SiLU, alpha 1.702, limit 7, an offset of 1 and interleaved columns it is gpt-oss's gate
    (model card, section 2.2): gate * logistic(alpha * gate) * (up + offset), of clamped inputs.
    """

    def oracle(call: Call) -> Expected:
        gate, up = call.values.get("gate_up", call.values.get("x")), call.values.get("up")
        alpha, limit = call.values.get("alpha", 1.0), call.values.get("limit")
        if up is None and call.values.get("interleaved"):
            gate, up = gate[..., 0::2], gate[..., 1::2]
        elif up is None:
            gate, up = np.split(gate, 2, axis=-1)
        if limit is not None:
            gate, up = np.minimum(gate, limit), np.minimum(np.maximum(up, -limit), limit)
        up = up + call.values.get("up_offset", 0.0)
        return _quantized(ACTIVATIONS[activation](alpha * gate) / alpha * up, call)

    return oracle


def quantized(x: Floats, scheme: Any, *, is_int8: bool = False) -> Expected:
    """``x`` in FP8 or int8, by a static scale or by the largest magnitude of each group of columns.
    Scales and products are float32, as in the definition."""
    rounded_to, most = (_to_int8, 127) if is_int8 else (to_e4m3, 448)
    single, one = x.astype(np.float32), np.float32(1)
    if isinstance(scheme, np.ndarray):
        return {0: rounded_to(single * (one / np.float32(scheme[0, 0])))}
    rows, columns = x.shape
    groups = single.reshape(rows, -1, scheme or columns) if rows else single[:, None, :]
    largest = np.maximum(np.abs(groups).max(-1), np.float32(2.0**-64))
    scale = largest * np.float32(1 / most)
    if not rows:
        scale = np.zeros((0, columns // scheme if scheme else 1), np.float32)
        return {0: rounded_to(single), 1: scale.astype(np.float64)}
    q = rounded_to(groups * (one / scale)[:, :, None])
    return {0: q.reshape(rows, columns), 1: scale.astype(np.float64)}


def _to_int8(x: Array) -> Floats:
    """The nearest integer from -128 to 127, of two as near the even one; 0 for NaN."""
    nearest: Floats = np.clip(np.rint(np.where(np.isnan(x), 0, x.astype(np.float64))), -128, 127)
    return nearest


def _quantized(y: Floats, call: Call) -> Expected:
    """Round ``y`` to x's dtype and quantize it if the call has a scale or group, else return it."""
    scheme = call.values.get("scale", call.values.get("group_size"))
    if scheme is None:
        return {0: y}
    return quantized(rounded(y, call.dtypes["x"]), scheme, is_int8="int8" in call.op)


def quantize(call: Call) -> Expected:
    return _quantized(call["x"], call)
