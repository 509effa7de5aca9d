"""Computes the oracles of norms, gated activations and quantization, and of ops made of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ._call import Call, Expected, Floats, Oracle, rounded, to_e4m3


def normed(
    x: Floats, weight: Floats, eps: float, offset: float | None, dtype: torch.dtype
) -> Floats:
    """x over the root of its mean square (Zhang and Sennrich, 2019, eq. 4), times the weight."""
    length = np.sqrt((x * x).sum(-1, keepdims=True) / max(x.shape[-1], 1) + eps)
    unit: Floats = x / length
    return rounded(unit, dtype) * weight if offset is None else unit * (weight + offset)


def rms_norm(call: Call) -> Expected:
    offset = call["weight_offset"]
    return {0: normed(call["x"], call["weight"], call["eps"], offset, call.dtypes["x"])}


def add_rms_norm(call: Call) -> Expected:
    dtype = call.dtypes["x"]
    total = rounded(call["x"] + call["residual"], dtype)
    return {0: normed(total, call["weight"], call["eps"], call["weight_offset"], dtype), 1: total}


def silu(x: Floats) -> Floats:
    """x times the logistic function (Elfwing et al., 2017)."""
    with np.errstate(over="ignore"):
        y: Floats = x / (1 + np.exp(-x))
    return y


def gelu_tanh(x: Floats) -> Floats:
    """Hendrycks and Gimpel, 2016, section 2; 0.5 (1 + tanh z) is the logistic function of 2 z."""
    with np.errstate(over="ignore"):
        y: Floats = x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return y


ACTIVATIONS = {"silu": silu, "gelu_tanh": gelu_tanh}


def gated(gate_up: Floats, up: Floats | None, activation: str) -> Floats:
    if up is not None:
        return ACTIVATIONS[activation](gate_up) * up
    width = gate_up.shape[-1] // 2
    return ACTIVATIONS[activation](gate_up[..., :width]) * gate_up[..., width:]


def activation_mul(activation: str) -> Oracle:
    return lambda call: {0: gated(call["gate_up"], call["up"], activation)}


def silu_mul(call: Call) -> Expected:
    """With alpha 1.702, limit 7, an offset of 1 and interleaved columns it is gpt-oss's gate (its
    model card, section 2.2): gate * logistic(alpha * gate) * (up + offset), clamped before."""
    gate, up, alpha, limit = (call[name] for name in ("gate_up", "up", "alpha", "limit"))
    if up is None and call["interleaved"]:
        gate, up = gate[..., 0::2], gate[..., 1::2]
    elif up is None:
        gate, up = np.split(gate, 2, axis=-1)
    if limit is not None:
        gate, up = np.minimum(gate, limit), np.minimum(np.maximum(up, -limit), limit)
    return {0: silu(alpha * gate) / alpha * (up + call["up_offset"])}


def quantized(x: Floats, scheme: Any) -> Expected:
    """To FP8 by a static scale, or by the largest magnitude of each group of columns; the scale and
    its product are float32, as the definition has them."""
    single, one = x.astype(np.float32), np.float32(1)
    if isinstance(scheme, np.ndarray):
        return {0: to_e4m3(single * (one / np.float32(scheme[0, 0])))}
    rows, columns = x.shape
    groups = single.reshape(rows, -1, scheme or columns) if rows else single[:, None, :]
    largest = np.maximum(np.abs(groups).max(-1), np.float32(2.0**-64))
    scale = largest * np.float32(1 / 448)
    if not rows:
        scale = np.zeros((0, columns // scheme if scheme else 1), np.float32)
        return {0: to_e4m3(single), 1: scale.astype(np.float64)}
    q = to_e4m3(groups * (one / scale)[:, :, None])
    return {0: q.reshape(rows, columns), 1: scale.astype(np.float64)}


def _scheme(call: Call, name: str) -> Any:
    return call[name if name in call.values else "group_size"]


def quantize(call: Call) -> Expected:
    return quantized(call["x"], _scheme(call, "scale"))


def quantized_norm(call: Call) -> Expected:
    dtype = call.dtypes["x"]
    x = call["x"]
    if "residual" in call.values:
        x = rounded(x + call["residual"], dtype)
    norm = rounded(normed(x, call["weight"], call["eps"], None, dtype), dtype)
    results = quantized(norm, _scheme(call, "scale"))
    return {**results, len(results): x} if "residual" in call.values else results


def quantized_activation(activation: str) -> Oracle:
    def oracle(call: Call) -> Expected:
        y = rounded(gated(call["x"], None, activation), call.dtypes["x"])
        return quantized(y, _scheme(call, "scale"))

    return oracle
