"""Small graphs with every part that a pass can read: biases, norms of heads, scales, experts.

``--verify`` compares the rewrites of the model's own sites.  A pass may still lose what this model
lacks, such as a bias, so it is also run over these graphs, whose rewrites are verified likewise.
Nothing of them is compiled; they take a few seconds, once in a process.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .. import ops
from ..config import VerificationError
from ..passes import PassReport, build_passes, run_passes
from .capture.trace import trace

_T, _H, _I, _EXPERTS, _TOP_K = 5, 64, 32, 4, 2
_HEADS, _KV_HEADS, _DIM, _BLOCK = 4, 2, 16, 8
_BF16, _FP8 = torch.bfloat16, torch.float8_e4m3fn


@dataclass(frozen=True)
class Probe:
    """A graph: what computes it from a named tuple of tensors, their shapes and dtypes, the names
    of those with a row a token, and the passes that have a site in it."""

    compute: Callable[[Any], Any]
    inputs: dict[str, tuple[tuple[int, ...], torch.dtype]]
    tokens: tuple[str, ...]
    passes: tuple[str, ...]


def _dense(t: Any) -> Any:
    total = t.r + ops.linear(t.x, t.w, t.b)
    y = ops.linear(ops.rms_norm(total, t.norm, 1e-5), t.gate_up, t.gate_up_bias)
    gate, up = y.chunk(2, -1)
    total = total + ops.linear(F.silu(gate) * up, t.down, t.down_bias)
    return ops.linear(ops.rms_norm(total, t.norm2, 1e-3), t.qkv, t.qkv_bias), total


def _fp8_linear(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    q, x_scale = ops.quant_fp8_dynamic(x, 0)
    return ops.linear(q, w, bias, x_scale, scale, _BF16)


def _fp8_dynamic(t: Any) -> Any:
    total = t.r + _fp8_linear(t.x, t.w, t.w_s, t.b)
    y = _fp8_linear(ops.rms_norm(total, t.norm, 1e-5), t.gate_up, t.gate_up_s)
    total = total + _fp8_linear(ops.silu_mul(y), t.down, t.down_s)
    return _fp8_linear(ops.rms_norm(total, t.norm2, 1e-3), t.qkv, t.qkv_s, t.qkv_bias), total


def _fp8_static(t: Any) -> Any:
    total = t.r + t.x
    q = ops.quant_fp8_static(ops.rms_norm(total, t.norm, 1e-5), t.x_s)
    y = ops.silu_mul(ops.linear(q, t.gate_up, t.bias, t.x_s, t.gate_up_s, _BF16))
    return ops.quant_fp8_static(y, t.out_s), total


def _heads(t: Any) -> Any:
    q, k = ops.rms_norm(t.q, t.q_norm, 1e-5), ops.rms_norm(t.k, t.k_norm, 1e-5)
    q, k = ops.rotary_embedding(t.positions, q, k, t.table)
    ops.kv_store(k, t.v, t.cache, t.slots, t.kv_scale)
    return q, t.cache.float()


def _attention(t: Any) -> Any:
    out = torch.empty_like(t.q)
    batch = (t.q, t.cache, t.table, t.lens, t.starts)
    scale, window, cap, chunk = _DIM**-0.5, 6, 30.0, 10
    ops.paged_attention(*batch, out, scale, window, cap, t.kv_scale, None, t.sinks, chunk)
    return ops.quant_fp8_static(out.view(-1, _HEADS * _DIM), t.out_s)


def _shared_experts(t: Any) -> Tensor:
    logits = ops.linear(t.x, t.router)
    weights, ids = ops.route(logits, t.correction, _TOP_K, "sigmoid", False, 2, 1, 2.5)
    h = ops.gelu_tanh_mul(ops.expert_linear(t.x, t.gate_up, ids))
    return ops.combine_experts(ops.expert_linear(h, t.down, ids), weights, t.shared, t.gate)


def _norm_moe(t: Any) -> Any:
    total = t.r + ops.linear(t.x, t.w, t.b)
    x = ops.rms_norm(total, t.norm, 1e-5)
    weights, ids = ops.route(ops.linear(x, t.router), None, _TOP_K)
    h = ops.silu_mul(ops.expert_linear(x, t.gate_up, ids))
    total = total + ops.combine_experts(ops.expert_linear(h, t.down, ids), weights)
    return ops.linear(ops.rms_norm(total, t.norm2, 1e-3), t.qkv, t.qkv_bias), total


_ROWS: dict[str, Any] = {"x": ((_T, _H), _BF16), "r": ((_T, _H), _BF16)}
_WEIGHTS: dict[str, Any] = {
    "w": ((_H, _H), _BF16), "b": ((_H,), _BF16), "norm": ((_H,), _BF16),
    "gate_up": ((2 * _I, _H), _BF16), "gate_up_bias": ((2 * _I,), _BF16),
    "down": ((_H, _I), _BF16), "down_bias": ((_H,), _BF16), "norm2": ((_H,), _BF16),
    "qkv": ((2 * _H, _H), _BF16), "qkv_bias": ((2 * _H,), _BF16),
}  # fmt: skip
_OF_EXPERTS: dict[str, Any] = {
    "router": ((_EXPERTS, _H), _BF16), "gate_up": ((_EXPERTS, 2 * _I, _H), _BF16),
    "down": ((_EXPERTS, _H, _I), _BF16),
}  # fmt: skip
_SCALE: Any = ((1, 1), torch.float32)
_CACHE: Any = ((3, 2, _BLOCK, _KV_HEADS, _DIM), _FP8)
_KV_SCALE: Any = ((2, _KV_HEADS), torch.float32)


def _quantized(names: dict[str, Any]) -> dict[str, Any]:
    """Turn the matrices into FP8, each followed by its scales, one for each row."""
    quantized: dict[str, Any] = {}
    for name, (shape, dtype) in names.items():
        quantized[name] = (shape, _FP8 if len(shape) == 2 else dtype)
        if len(shape) == 2:
            quantized[f"{name}_s"] = ((shape[0], 1), torch.float32)
    return quantized


def _without(names: dict[str, Any], *left_out: str) -> dict[str, Any]:
    return {name: value for name, value in names.items() if name not in left_out}


PROBES = {
    "dense": Probe(
        _dense, _ROWS | _WEIGHTS, ("x", "r"),
        ("fuse_add_norm", "fuse_act", "fuse_gated_linear", "fuse_chain"),
    ),
    "FP8, scales of tokens": Probe(
        _fp8_dynamic, _ROWS | _quantized(_without(_WEIGHTS, "gate_up_bias", "down_bias")),
        ("x", "r"), ("fuse_add_norm", "fuse_norm_quant", "fuse_act_quant", "fuse_chain"),
    ),
    "FP8, static scales": Probe(
        _fp8_static,
        _ROWS | {"norm": ((_H,), _BF16), "x_s": _SCALE, "gate_up": ((2 * _I, _H), _FP8),
                 "gate_up_s": _SCALE, "bias": ((2 * _I,), _BF16), "out_s": _SCALE},
        ("x", "r"), ("fuse_add_norm", "fuse_gated_linear", "fuse_norm_quant"),
    ),
    "normed heads": Probe(
        _heads,
        {"positions": ((_T,), torch.int32), "q": ((_T, _HEADS, _DIM), _BF16),
         "k": ((_T, _KV_HEADS, _DIM), _BF16), "v": ((_T, _KV_HEADS, _DIM), _BF16),
         "q_norm": ((_DIM,), _BF16), "k_norm": ((_DIM,), _BF16),
         "table": ((50, _DIM), torch.float32), "cache": _CACHE, "slots": ((_T,), torch.int32),
         "kv_scale": _KV_SCALE},
        ("positions", "q", "k", "v", "slots"), ("fuse_rope_store",),
    ),
    "attention": Probe(
        _attention,
        {"q": ((_T, _HEADS, _DIM), _BF16), "cache": _CACHE, "table": ((_T, 3), torch.int32),
         "lens": ((_T,), torch.int32), "starts": ((_T + 1,), torch.int32),
         "kv_scale": _KV_SCALE, "sinks": ((_HEADS,), torch.float32), "out_s": _SCALE},
        (), ("fuse_attn_quant",),
    ),
    "shared experts": Probe(
        _shared_experts,
        {"x": _ROWS["x"], "router": _OF_EXPERTS["router"],
         "correction": ((_EXPERTS,), torch.float32), **_without(_OF_EXPERTS, "router"),
         "shared": _ROWS["x"], "gate": ((_T, 1), _BF16)},
        ("x", "shared", "gate"), ("fuse_gated_linear", "fuse_moe"),
    ),
    "experts between linear layers": Probe(
        _norm_moe,
        {**_ROWS, **{name: _WEIGHTS[name] for name in ("w", "b", "norm")}, **_OF_EXPERTS,
         **{name: _WEIGHTS[name] for name in ("norm2", "qkv", "qkv_bias")}},
        ("x", "r"), ("fuse_add_norm", "fuse_gated_linear", "fuse_moe", "fuse_chain"),
    ),
}  # fmt: skip


class _Model(nn.Module):
    def __init__(self, probe: Probe) -> None:
        super().__init__()
        self._compute, self._named = probe.compute, namedtuple("_Named", probe.inputs)

    def forward(self, *tensors: Tensor) -> Any:
        return self._compute(self._named(*tensors))


def run_probe(probe: Probe, passes: tuple[str, ...]) -> list[PassReport]:
    """Run these passes over a probe, and verify their rewrites.

    Raises:
        VerificationError: a rewrite is wrong.
    """
    return run_passes(graph_of(probe), build_passes(passes), verify=True)


def graph_of(probe: Probe) -> fx.GraphModule:
    """The graph of a probe, before any pass."""
    inputs = {name: torch.empty(shape, dtype=d) for name, (shape, d) in probe.inputs.items()}
    dynamic = {name: {0: "num_tokens"} for name in probe.tokens}
    return trace(_Model(probe), tuple(inputs.values()), inputs, dynamic).gm


@cache
def check_probes(passes: tuple[str, ...]) -> None:
    """Verify what these passes do to every probe that has a site of one of them.

    Raises:
        VerificationError: names the probe, pass, site and values.
    """
    for name, probe in PROBES.items():
        if not {*passes}.isdisjoint(probe.passes):
            try:
                run_probe(probe, passes)
            except VerificationError as error:
                raise VerificationError(f"in the probe {name!r}: {error}") from error
