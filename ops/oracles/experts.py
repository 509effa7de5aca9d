"""Oracles of mixtures of experts, token by token."""

from __future__ import annotations

import ast
import re
from typing import Any

import numpy as np

from ...config.weight_format import STORED_FORMATS
from ._call import Call, Expected, Floats, rounded
from .linear import dequantized, matmul
from .norms import gated_act, quantized
from .stored import numbers_of


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
    if call["weight_format"] is not None:
        weight = _stored(call, "weight")
    elif call["weight_scale"] is not None:
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
            y[slot] = matmul(x[slot], weight[e], _of_expert(call, "bias", e))
    if call["activation"] is not None:
        y = _activated(rounded(y, dtype), call["activation"])
    return {0: y}


def _of_expert(call: Call, name: str, expert: int) -> Any:
    return None if call[name] is None else call[name][expert]


_OPTIONS = re.compile(r"(\w+)=([^,)]+)")


def _activated(gate_up: Floats, text: str) -> Floats:
    """The activation that a text names, with its options."""
    name, _, options = text.partition("(")
    how = {option: ast.literal_eval(value) for option, value in _OPTIONS.findall(options)}
    arguments = {"gate_up": gate_up, "scheme": None, **how}
    y: Floats = gated_act(name)(Call(arguments, {}))[0]
    return y


def _stored(call: Call, prefix: str) -> Floats:
    """The numbers of the experts' weights in a stored format."""
    form, weight = STORED_FORMATS[call["weight_format"]], call[prefix]
    zeros = [None] * len(weight) if (zero := call[f"{prefix}_zero"]) is None else zero
    triples = zip(weight, call[f"{prefix}_scale"], zeros, strict=True)
    return np.stack([numbers_of(form, *each) for each in triples])


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
    if call["gate_up_scale"] is None or call["weight_format"] is not None:
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


def _weights(call: Call, layer: str) -> Floats:
    """The numbers of all experts' weights of a layer, [num_experts, rows, columns]."""
    if call["weight_format"] is not None:
        return _stored(call, layer)
    weight: Floats = call[layer]
    if (scales := call[f"{layer}_scale"]) is None:
        return weight
    return np.stack([dequantized(w, s) for w, s in zip(weight, scales, strict=True)])


def fused_moe(call: Call) -> Expected:
    x, dtype = call["x"], call.dtypes["x"]
    logits = matmul(x, call["router_weight"], call["router_bias"])
    if not call["float32_logits"]:
        logits = rounded(logits, dtype)
    chosen = route(Call({**call.values, "router_logits": logits}, call.dtypes))
    total = np.zeros_like(x)
    first = _quantized(call, x, "gate_up_input_scale")
    gate_ups, downs = _weights(call, "gate_up"), _weights(call, "down")
    held, inner = len(gate_ups), downs.shape[2]
    for place in range(call["top_k"]):
        hs = []
        local = chosen[1][:, place] - _first(call)
        for token, e in enumerate(local):
            if not 0 <= e < held:
                hs.append(np.zeros(inner))
                continue
            bias = _of_expert(call, "gate_up_bias", e)
            gate_up = rounded(matmul(first[token], gate_ups[e], bias), dtype)
            hs.append(rounded(_activated(gate_up, call["activation"]), dtype))
        h = _quantized(call, np.array(hs).reshape(len(x), inner), "down_input_scale")
        for token, e in enumerate(local):
            if not 0 <= e < held:
                continue
            y = rounded(matmul(h[token], downs[e], _of_expert(call, "down_bias", e)), dtype)
            total[token] += y * chosen[0][token, place]
    if call["shared"] is not None:
        gate = call["shared_gate"]
        total = total + call["shared"] * (1.0 if gate is None else 1 / (1 + np.exp(-gate)))
    return {0: total}
