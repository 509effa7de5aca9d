"""Small graphs with every part that a pass can read: biases, norms of heads, scales, experts.

``--verify`` compares the rewrites of the model's own sites.  A pass may still lose what this model
lacks, such as a bias, so it is also run over these graphs, whose rewrites are verified likewise.
Nothing of them is compiled; they take a few seconds, once in a process.
"""

from __future__ import annotations

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
    """A graph: what computes it, the shapes and dtypes of its inputs, of which those named in
    ``tokens`` have a row a token, and the passes that have a site in it."""

    compute: Callable[..., Any]
    inputs: dict[str, tuple[tuple[int, ...], torch.dtype]]
    tokens: tuple[str, ...]
    passes: tuple[str, ...]


def _dense(
    x: Tensor, r: Tensor, w: Tensor, b: Tensor, norm: Tensor, gate_up: Tensor, gate_up_bias: Tensor,
    down: Tensor, down_bias: Tensor, norm2: Tensor, qkv: Tensor, qkv_bias: Tensor,
) -> Any:  # fmt: skip
    total = r + ops.linear(x, w, b)
    gate, up = ops.linear(ops.rms_norm(total, norm, 1e-5), gate_up, gate_up_bias).chunk(2, -1)
    total = total + ops.linear(F.silu(gate) * up, down, down_bias)
    return ops.linear(ops.rms_norm(total, norm2, 1e-3), qkv, qkv_bias), total


def _fp8_linear(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    q, x_scale = ops.quant_fp8_dynamic(x, 0)
    return ops.linear(q, w, bias, x_scale, scale, _BF16)


def _fp8_dynamic(
    x: Tensor, r: Tensor, w: Tensor, s: Tensor, b: Tensor, norm: Tensor, gate_up: Tensor,
    gate_up_s: Tensor, down: Tensor, down_s: Tensor, norm2: Tensor, qkv: Tensor, qkv_s: Tensor,
    qkv_bias: Tensor,
) -> Any:  # fmt: skip
    total = r + _fp8_linear(x, w, s, b)
    y = _fp8_linear(ops.rms_norm(total, norm, 1e-5), gate_up, gate_up_s)
    total = total + _fp8_linear(ops.silu_mul(y), down, down_s)
    return _fp8_linear(ops.rms_norm(total, norm2, 1e-3), qkv, qkv_s, qkv_bias), total


def _fp8_static(
    x: Tensor, r: Tensor, norm: Tensor, x_s: Tensor, gate_up: Tensor, gate_up_s: Tensor,
    bias: Tensor, out_s: Tensor,
) -> Any:  # fmt: skip
    total = r + x
    q = ops.quant_fp8_static(ops.rms_norm(total, norm, 1e-5), x_s)
    y = ops.silu_mul(ops.linear(q, gate_up, bias, x_s, gate_up_s, _BF16))
    return ops.quant_fp8_static(y, out_s), total


def _heads(
    positions: Tensor, q: Tensor, k: Tensor, v: Tensor, q_norm: Tensor, k_norm: Tensor,
    table: Tensor, cache: Tensor, slots: Tensor, kv_scale: Tensor,
) -> Any:  # fmt: skip
    q, k = ops.rms_norm(q, q_norm, 1e-5), ops.rms_norm(k, k_norm, 1e-5)
    q, k = ops.rotary_embedding(positions, q, k, table)
    ops.kv_store(k, v, cache, slots, kv_scale)
    return q, cache.float()


def _attention(
    q: Tensor, cache: Tensor, table: Tensor, lens: Tensor, starts: Tensor, kv_scale: Tensor,
    out_s: Tensor,
) -> Any:  # fmt: skip
    out = torch.empty_like(q)
    ops.paged_attention(q, cache, table, lens, starts, out, _DIM**-0.5, 6, 30.0, kv_scale)
    return ops.quant_fp8_static(out.view(-1, _HEADS * _DIM), out_s)


def _experts(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, *rest: Any) -> Tensor:
    weights, ids = ops.route(ops.linear(x, router), None, _TOP_K)
    h = ops.silu_mul(ops.expert_linear(x, gate_up, ids))
    return ops.combine_experts(ops.expert_linear(h, down, ids), weights, *rest)


def _shared_experts(
    x: Tensor, router: Tensor, correction: Tensor, gate_up: Tensor, down: Tensor, shared: Tensor,
    gate: Tensor,
) -> Tensor:  # fmt: skip
    logits = ops.linear(x, router)
    weights, ids = ops.route(logits, correction, _TOP_K, "sigmoid", False, 2, 1, 2.5)
    h = ops.gelu_tanh_mul(ops.expert_linear(x, gate_up, ids))
    return ops.combine_experts(ops.expert_linear(h, down, ids), weights, shared, gate)


def _norm_moe(
    x: Tensor, r: Tensor, w: Tensor, b: Tensor, norm: Tensor, router: Tensor, gate_up: Tensor,
    down: Tensor, norm2: Tensor, qkv: Tensor, qkv_bias: Tensor,
) -> Any:  # fmt: skip
    total = r + ops.linear(x, w, b)
    total = total + _experts(ops.rms_norm(total, norm, 1e-5), router, gate_up, down)
    return ops.linear(ops.rms_norm(total, norm2, 1e-3), qkv, qkv_bias), total


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
    found: dict[str, Any] = {}
    for name, (shape, dtype) in names.items():
        found[name] = (shape, _FP8 if len(shape) == 2 else dtype)
        if len(shape) == 2:
            found["s" if name == "w" else f"{name}_s"] = ((shape[0], 1), torch.float32)
    return found


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
         "kv_scale": _KV_SCALE, "out_s": _SCALE},
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
    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__()
        self._compute = compute

    def forward(self, *args: Tensor) -> Any:
        return self._compute(*args)


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
    return trace(_Model(probe.compute), tuple(inputs.values()), inputs, dynamic).gm


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
