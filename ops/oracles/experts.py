"""Oracles of mixtures of experts, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._call import Call, Expected, Floats, rounded
from .linear import dequantized, matmul
from .norms import gated, quantized


def _chosen(choice: Floats, count: int) -> list[int]:
    """The places of the largest, one after the other; of equal ones the first."""
    left = list(range(len(choice)))
    found: list[int] = []
    for _ in range(count):
        best = max(left, key=lambda i: (choice[i], -i))
        left.remove(best)
        found.append(best)
    return found


def route(call: Call) -> Expected:
    logits, bias, top_k = call["router_logits"], call["correction_bias"], call["top_k"]
    groups = call["num_groups"]
    weights, ids = np.zeros((len(logits), top_k)), np.zeros((len(logits), top_k), dtype=np.int32)
    for token, of_token in enumerate(logits):
        if call["scoring"] == "softmax":
            powers = np.exp(of_token - of_token.max())
            scores = powers / powers.sum()
        else:
            scores = 1 / (1 + np.exp(-of_token))
        choice = scores if bias is None else scores + bias
        parts = choice.reshape(groups, -1)
        worth = parts.max(1) if bias is None else np.sort(parts, 1)[:, -2:].sum(1)
        if groups == 1:
            worth = parts.sum(1)
        kept = _chosen(worth, call["topk_groups"])
        allowed = [i for i in range(len(choice)) if i // parts.shape[1] in kept]
        ids[token] = [allowed[i] for i in _chosen(choice[allowed], top_k)]
        of_chosen = scores[ids[token]]
        if call["renormalize"]:
            of_chosen = of_chosen / of_chosen.sum()
        weights[token] = of_chosen * call["scaling"]
    return {0: weights, 1: ids}


def expert_linear(call: Call) -> Expected:
    x, weight, ids = call["x"], call["weight"], call["topk_ids"]
    if call["weight_scale"] is not None:
        x = dequantized(x, call["x_scale"])
        pairs = zip(weight, call["weight_scale"], strict=True)
        weight = np.stack([dequantized(w, scale) for w, scale in pairs])
    if len(x) == len(ids):
        x = np.repeat(x, ids.shape[1], 0)
    dtype: Any = call["out_dtype"] or call.dtypes["x"]
    places = ids.reshape(-1) - _first(call)
    y = np.zeros((len(places), weight.shape[1]))
    for slot, e in enumerate(places):
        if 0 <= e < len(weight):
            y[slot] = matmul(x[slot], weight[e])
    if call["activation"] is not None:
        y = gated(rounded(y, dtype), None, call["activation"])
    return {0: y}


def combine_experts(call: Call) -> Expected:
    weights, dtype = call["topk_weights"], call.dtypes["y"]
    of_token = call["y"].reshape(*weights.shape, call["y"].shape[1])
    total = np.einsum("tkh,tk->th", of_token, weights)
    if call["shared"] is not None:
        gate = call["shared_gate"]
        total = total + call["shared"] * (1.0 if gate is None else 1 / (1 + np.exp(-gate)))
    if call["residual"] is not None:
        total = rounded(total, dtype) + call["residual"]
    return {0: total}


def _quantized(call: Call, x: Floats, scale_of_input: str) -> Floats:
    """The values that the quantized input of a layer stands for."""
    if call["gate_up_scale"] is None:
        return x
    scale = call[scale_of_input]
    if scale is not None:
        static: Floats = quantized(x, scale)[0] * scale
        return static
    values, scales = quantized(x, call["group_size"]).values()
    return dequantized(values, scales)


def _first(call: Call) -> int:
    """The id of the first expert that is here."""
    return 0 if call["first_expert"] is None else int(call["first_expert"][0])


def _layer(x: Floats, weight: Floats, scale: Any) -> Floats:
    return matmul(x, weight if scale is None else dequantized(weight, scale))


def fused_moe(call: Call) -> Expected:
    x, dtype = call["x"], call.dtypes["x"]
    logits = matmul(x, call["router_weight"])
    if not call["float32_logits"]:
        logits = rounded(logits, dtype)
    chosen = route(Call({**call.values, "router_logits": logits}, call.dtypes))
    total = np.zeros_like(x)
    first = _quantized(call, x, "gate_up_input_scale")
    unscaled = [None] * len(call["gate_up"])
    scales = [unscaled if call[name] is None else call[name] for name in _SCALES]
    held = len(call["gate_up"])
    for place in range(call["top_k"]):
        hs = []
        local = chosen[1][:, place] - _first(call)
        for token, e in enumerate(local):
            if not 0 <= e < held:
                hs.append(np.zeros(call["down"].shape[2]))
                continue
            gate_up = rounded(_layer(first[token], call["gate_up"][e], scales[0][e]), dtype)
            hs.append(rounded(gated(gate_up, None, call["activation"]), dtype))
        inner = call["down"].shape[2]
        h = _quantized(call, np.array(hs).reshape(len(x), inner), "down_input_scale")
        for token, e in enumerate(local):
            if not 0 <= e < held:
                continue
            y = rounded(_layer(h[token], call["down"][e], scales[1][e]), dtype)
            total[token] += y * chosen[0][token, place]
    if call["shared"] is not None:
        gate = call["shared_gate"]
        total = total + call["shared"] * (1.0 if gate is None else 1 / (1 + np.exp(-gate)))
    return {0: total}


_SCALES = ("gate_up_scale", "down_scale")
