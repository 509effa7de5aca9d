"""Computes the oracles of rotary embedding, the paged KV cache and attention over it."""

from __future__ import annotations

import numpy as np
import torch

from ._call import Array, Call, Expected, Floats, rounded, to_e4m3
from .norms import normed


def _columns(pair: int, half: int, layout: str) -> tuple[int, int]:
    """The two columns of a pair: neighbours, or half a rotary dimension apart."""
    return (2 * pair, 2 * pair + 1) if layout == "pairs" else (pair, half + pair)


def rotate(x: Floats, positions: Array, cos_sin: Floats, layout: str = "halves") -> Floats:
    """Pairs of a head's columns as complex numbers times exp(i angle) (Su et al., 2021, eq. 34).
    A layout such as "pairs_to_halves" says where they are and where they go."""
    half = cos_sin.shape[1] // 2
    source, _, target = layout.partition("_to_")
    out = x.copy()
    for token, position in enumerate(positions.tolist()):
        row = cos_sin[min(max(position, 0), len(cos_sin) - 1)]
        for pair in range(half):
            real, imaginary = _columns(pair, half, source)
            turned = (x[token, :, real] + 1j * x[token, :, imaginary]) * complex(
                row[pair], row[half + pair]
            )
            real, imaginary = _columns(pair, half, target or source)
            out[token, :, real], out[token, :, imaginary] = turned.real, turned.imag
    return out


def rotary_embedding(call: Call) -> Expected:
    how = (call["positions"], call["cos_sin_cache"], call["layout"])
    return {0: rotate(call["q"], *how), 1: rotate(call["k"], *how)}


def _stored(call: Call, k: Floats, v: Floats) -> Floats:
    cache: Floats = call["kv_cache"].copy()
    fp8 = call.dtypes["kv_cache"] == torch.float8_e4m3fn
    scale = np.ones((2, k.shape[1])) if call["kv_scale"] is None else call["kv_scale"]
    size = cache.shape[2]
    for token, slot in enumerate(call["slot_mapping"].tolist()):
        for plane, new in enumerate((k, v)) if slot >= 0 else ():
            row = new[token].astype(np.float32) / scale[plane][:, None].astype(np.float32)
            cache[slot // size, plane, slot % size] = to_e4m3(row) if fp8 else new[token]
    return cache


def kv_store(call: Call) -> Expected:
    return {"kv_cache": _stored(call, call["k"], call["v"])}


def rope_kv_store(call: Call) -> Expected:
    dtype, heads = call.dtypes["q"], {}
    for name in ("q", "k"):
        x, weight = call[name], call[f"{name}_weight"]
        if weight is not None:
            x = rounded(normed(x, weight, call["eps"], call["weight_offset"], dtype), dtype)
        how = (call["positions"], call["cos_sin_cache"], call["layout"])
        heads[name] = rounded(rotate(x, *how), dtype)
    return {0: heads["q"], "kv_cache": _stored(call, heads["k"], call["v"])}


def paged_attention(call: Call) -> Expected:
    """One query and head at a time: the softmax of its logits over gathered keys (Vaswani et al.,
    2017, eq. 1)."""
    q, cache, out = call["q"], call["kv_cache"], call["out"].copy()
    starts, size = call["query_start_loc"], cache.shape[2]
    num_heads, kv_heads = q.shape[1], cache.shape[3]
    scales = np.ones((2, kv_heads)) if call["kv_scale"] is None else call["kv_scale"]
    for s, context in enumerate(call["seq_lens"].tolist()):
        for token in range(starts[s], starts[s + 1]) if context else ():
            position = context - starts[s + 1] + token
            seen = np.arange(position + 1)
            if call["sliding_window"]:
                seen = seen[position - seen < call["sliding_window"]]
            if call["chunk"]:
                seen = seen[seen // call["chunk"] == position // call["chunk"]]
            found = cache[call["block_table"][s, seen // size], :, seen % size]
            for head in range(num_heads):
                of = head * kv_heads // num_heads
                keys, values = (found[:, i, of] * scales[i, of] for i in (0, 1))
                logits = (keys * q[token, head]).sum(-1) * call["scale"]
                if call["soft_cap"] > 0:
                    logits = call["soft_cap"] * np.tanh(logits / call["soft_cap"])
                sink = -np.inf if call["sinks"] is None else call["sinks"][head]
                peak = max(logits.max(), sink)
                weights = np.exp(logits - peak)
                total = weights.sum() + np.exp(sink - peak)
                out[token, head] = (weights[:, None] * values).sum(0) / total
                if call["out_scale"] is not None:
                    out[token, head] = to_e4m3(out[token, head] / call["out_scale"][0, 0])
    return {"out": out}
