"""Mixtures of experts in semantic ops, for the tests of their passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusewright import ops
from tests.passes.graphs import hidden

HIDDEN, INNER, EXPERTS, TOP_K = 32, 24, 4, 2
Model = Callable[[Tensor, Tensor], Any]
_SIZES = {
    "router": (EXPERTS, HIDDEN),
    "gate_up": (EXPERTS, 2 * INNER, HIDDEN),
    "down": (EXPERTS, HIDDEN, INNER),
}


def inputs() -> tuple[Tensor, Tensor]:
    """x, and all weights flat: of several dimensions the first would be captured as dynamic."""
    count = sum(torch.Size(shape).numel() for shape in _SIZES.values())
    return hidden(size=HIDDEN), torch.randn(count) / 5


def weights(flat: Tensor) -> list[Tensor]:
    """Router, gate and up, down."""
    sizes = [torch.Size(shape).numel() for shape in _SIZES.values()]
    parts = flat.split(sizes)
    return [part.view(shape) for part, shape in zip(parts, _SIZES.values(), strict=True)]


def moe(
    x: Tensor,
    flat: Tensor,
    *,
    routed: Callable[[Tensor, Tensor], Tensor] = ops.linear,
    gated: Callable[[Tensor], Tensor] = ops.silu_mul,
) -> Tensor:
    router, gate_up, down = weights(flat)
    topk_weights, ids = ops.route(routed(x, router), None, TOP_K)
    h = gated(ops.expert_linear(x, gate_up, ids))
    return ops.combine_experts(ops.expert_linear(h, down, ids), topk_weights)


def biased(x: Tensor, flat: Tensor) -> Tensor:
    """Biases of the router and of both layers, and gpt-oss's gate."""
    router, gate_up, down = weights(flat)
    of_router, of_gate_up, of_down = router[:, 0], gate_up[:, :, 1], down[:, :, 2]
    topk_weights, ids = ops.route(ops.linear(x, router, of_router), None, TOP_K)
    y = ops.expert_linear(x, gate_up, ids, bias=of_gate_up)
    h = ops.silu_mul(y, None, 1.702, 0.3, 1.0, True)
    return ops.combine_experts(ops.expert_linear(h, down, ids, bias=of_down), topk_weights)


def shared(x: Tensor, flat: Tensor) -> Tensor:
    router, gate_up, down = weights(flat)
    topk_weights, ids = ops.route(ops.linear(x, router), None, TOP_K, "sigmoid", False, 2, 1, 2.5)
    h = ops.gelu_tanh_mul(ops.expert_linear(x, gate_up, ids))
    beside, gate = x * 2, x[:, :1].contiguous()
    return ops.combine_experts(ops.expert_linear(h, down, ids), topk_weights, beside, gate)


def fp8(x: Tensor, flat: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    router, gate_up, down = weights(flat)
    scales = [w.abs().amax(-1, keepdim=True) / 448 for w in (gate_up, down)]
    gate_up, down = (
        (w / s).to(torch.float8_e4m3fn) for w, s in zip((gate_up, down), scales, strict=True)
    )
    topk_weights, ids = ops.route(ops.linear(x, router), None, TOP_K)
    q, scale = ops.quant_fp8_dynamic(x, 0)
    h = ops.silu_mul(ops.expert_linear(q, gate_up, ids, scale, scales[0], dtype))
    q, scale = ops.quant_fp8_dynamic(h, 0)
    y = ops.expert_linear(q, down, ids, scale, scales[1], dtype)
    return ops.combine_experts(y, topk_weights)


def other_ids(x: Tensor, flat: Tensor) -> Tensor:
    router, gate_up, down = weights(flat)
    topk_weights, ids = ops.route(ops.linear(x, router), None, TOP_K)
    _, others = ops.route(ops.linear(x * 2, router), None, TOP_K)
    h = ops.silu_mul(ops.expert_linear(x, gate_up, ids))
    return ops.combine_experts(ops.expert_linear(h, down, others), topk_weights)


def weights_read(x: Tensor, flat: Tensor) -> Tensor:
    router, gate_up, down = weights(flat)
    topk_weights, ids = ops.route(ops.linear(x, router), None, TOP_K)
    h = ops.silu_mul(ops.expert_linear(x, gate_up, ids))
    y = ops.combine_experts(ops.expert_linear(h, down, ids), topk_weights)
    return y * topk_weights.sum()


def other_input(x: Tensor, flat: Tensor) -> Tensor:
    return moe(x, flat, routed=lambda x, router: ops.linear(x * 2, router))


def no_gate(x: Tensor, flat: Tensor) -> Tensor:
    return moe(x, flat, gated=lambda y: y[:, :INNER].relu())


def logits_added(x: Tensor, flat: Tensor) -> Tensor:
    return moe(x, flat, routed=lambda x, router: ops.linear(x, router) + 1)


def gate_up_read(x: Tensor, flat: Tensor) -> Tensor:
    router, gate_up, _ = weights(flat)
    _, ids = ops.route(ops.linear(x, router), None, TOP_K)
    y = ops.expert_linear(x, gate_up, ids)
    return ops.silu_mul(y) * y.sum()


def norm_weights(flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two norms, and a layer [hidden, hidden]."""
    return flat[:HIDDEN], flat[HIDDEN : 2 * HIDDEN], flat[: HIDDEN * HIDDEN].view(HIDDEN, HIDDEN)


def between_linears(x: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
    first, second, layer = norm_weights(flat)
    total = x.cos() + ops.linear(x, layer, None)
    total = total + moe(ops.rms_norm(total, first, 1e-5), flat)
    return ops.linear(ops.rms_norm(total, second, 1e-6), layer, first), total


def last_layer(x: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
    first, second, layer = norm_weights(flat)
    total = ops.linear(x, layer, first) + x.cos()
    total = total + moe(ops.rms_norm(total, first, 1e-5), flat)
    return ops.rms_norm(total, second, 1e-6), total


def experts_read_the_sum(x: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
    first, _, layer = norm_weights(flat)
    total = x.cos() + ops.linear(x, layer, None)
    return ops.rms_norm(total, first, 1e-5), moe(total, flat)


def shared_reads_the_norm(x: Tensor, flat: Tensor) -> Tensor:
    first, _, layer = norm_weights(flat)
    total = x.cos() + ops.linear(x, layer, None)
    return shared(ops.rms_norm(total, first, 1e-5), flat)


def no_linear_before(x: Tensor, flat: Tensor) -> Tensor:
    first, _, _ = norm_weights(flat)
    return moe(ops.rms_norm(x.cos() + x.relu(), first, 1e-5), flat)


def added_to_itself(x: Tensor, flat: Tensor) -> Tensor:
    first, _, layer = norm_weights(flat)
    y = ops.linear(x, layer, None)
    return moe(ops.rms_norm(y + y, first, 1e-5), flat)


def fp8_behind_the_norm(x: Tensor, flat: Tensor) -> Tensor:
    first, _, layer = norm_weights(flat)
    return fp8(ops.rms_norm(x.cos() + ops.linear(x, layer, None), first, 1e-5), flat)


def fp8_linear(
    x: Tensor, layer: Tensor, bias: Tensor | None = None, static: bool = False
) -> Tensor:
    scale = layer.abs().amax(-1, keepdim=True) / 448
    weight = (layer / scale).to(torch.float8_e4m3fn)
    if static:
        one = torch.full((1, 1), 0.01)
        q = ops.quant_fp8_static(x, one)
        return ops.linear(q, layer.to(torch.float8_e4m3fn), bias, one, one, x.dtype)
    q, x_scale = ops.quant_fp8_dynamic(x, 0)
    return ops.linear(q, weight, bias, x_scale, scale, x.dtype)


def fp8_between_linears(x: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
    first, second, layer = norm_weights(flat)
    total = x.cos() + fp8_linear(x, layer)
    total = total + fp8(ops.rms_norm(total, first, 1e-5), flat)
    return fp8_linear(ops.rms_norm(total, second, 1e-6), layer, first), total


def fp8_last_layer(x: Tensor, flat: Tensor) -> tuple[Tensor, Tensor]:
    first, second, layer = norm_weights(flat)
    total = fp8_linear(x, layer, first) + x.cos()
    total = total + fp8(ops.rms_norm(total, first, 1e-5), flat)
    return ops.rms_norm(total, second, 1e-6), total


def fp8_layer_before(x: Tensor, flat: Tensor) -> Tensor:
    first, _, layer = norm_weights(flat)
    return moe(ops.rms_norm(x.cos() + fp8_linear(x, layer), first, 1e-5), flat)


def static_layer_before(x: Tensor, flat: Tensor) -> Tensor:
    first, _, layer = norm_weights(flat)
    return fp8(ops.rms_norm(x.cos() + fp8_linear(x, layer, static=True), first, 1e-5), flat)


def norm_read_twice(x: Tensor, flat: Tensor) -> Tensor:
    first, _, layer = norm_weights(flat)
    normed = ops.rms_norm(x.cos() + ops.linear(x, layer, None), first, 1e-5)
    return moe(normed, flat) * normed


def sum_read_early(x: Tensor, flat: Tensor) -> Tensor:
    first, _, layer = norm_weights(flat)
    total = x.cos() + ops.linear(x, layer, None)
    normed = ops.rms_norm(total, first, 1e-5)
    doubled = total * 2
    return moe(normed, flat) + doubled
