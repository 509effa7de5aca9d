"""Describes a mixture of experts as data, and plans the launches that follow the router's layer.

``Call`` holds the arguments of ``fused_moe`` and derives those of the ops that it consists of.
``fused_moe`` and chains with experts run the launches that are planned here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...config.routing import Routing
from ..core.desc import Cost, TensorDesc
from ..core.float8 import E4M3
from ..core.launch import Launch, Launches
from ..launches import experts as plans, route as route_plans
from ..launches.quant import quantize as plan_quantize
from . import kernels as kernels
from .kernels import describe_experts
from .route import check as check_route


class Call(NamedTuple):
    """The arguments of a call, and those of the ops that it consists of.

    Attributes:
        x: [num_tokens, hidden], floating point.
        router_weight: [num_experts, hidden], same dtype, or float32 where ``float32_logits``; with
            ``first_expert`` of all ranks'.
        correction_bias: as of ``route``.
        gate_up, down: [num_experts, 2 * intermediate, hidden] and [num_experts, hidden,
            intermediate], same dtype; or float8_e4m3fn, then their inputs are quantized first.
        gate_up_scale, down_scale: of FP8: as of ``expert_linear``.
        gate_up_input_scale, down_input_scale: [1, 1] float32, by which inputs are quantized; None:
            by scales found in them, for groups of ``group_size``, 0 for whole rows.
        shared, shared_gate: as of ``combine_experts``.
        top_k, scoring, renormalize, num_groups, topk_groups, scaling: as of ``route``.
        activation: as of ``expert_linear``.
        first_expert: as of ``expert_linear``: the result is the summand of one rank.
        float32_logits: the router's logits are not rounded to x's dtype.
        router_bias: [num_experts], is added to the logits; as of ``linear``.
        gate_up_bias, down_bias: as of ``expert_linear``.
        gate_up_zero, down_zero, weight_format: as of ``expert_linear``; the format is that of both
            layers, and their inputs are not quantized.
    """

    x: Tensor
    router_weight: Tensor
    correction_bias: Tensor | None
    gate_up: Tensor
    down: Tensor
    gate_up_scale: Tensor | None
    down_scale: Tensor | None
    gate_up_input_scale: Tensor | None
    down_input_scale: Tensor | None
    group_size: int
    shared: Tensor | None
    shared_gate: Tensor | None
    top_k: int
    scoring: str
    renormalize: bool
    num_groups: int
    topk_groups: int
    scaling: float
    activation: str
    first_expert: Tensor | None = None
    float32_logits: bool = False
    router_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gate_up_zero: Tensor | None = None
    down_zero: Tensor | None = None
    weight_format: str | None = None

    @property
    def num_experts(self) -> Any:
        """Number of experts on this rank: all of them, unless ``first_expert`` is given."""
        return self.gate_up.shape[0]

    @property
    def num_routed(self) -> Any:
        """Number of experts that tokens can choose, on all ranks."""
        return self.router_weight.shape[0]

    def scheme(self, input_scale: Any) -> Any:
        """How an input is quantized: by a static scale, in groups of this size, or not (None)."""
        if not self.quantizes_x:
            return None
        return self.group_size if input_scale is None else input_scale

    @property
    def quantizes_x(self) -> bool:
        """Whether the inputs of both layers are quantized."""
        return self.gate_up_scale is not None and self.weight_format is None

    @property
    def routing(self) -> Routing:
        """How experts are chosen."""
        return Routing(*self[12:18])

    def routed(self, logits: Any) -> tuple[Any, ...]:
        """The arguments of ``route``."""
        return logits, self.correction_bias, *self[12:18]

    def first(self, x: tuple[Any, ...], ids: Any) -> tuple[Any, ...]:
        """The arguments of ``expert_linear`` for gate and up; ``x`` is a result of ``finish``."""
        scale = self._scale(x, self.gate_up_input_scale)
        dtype = None if scale is None else self.x.dtype
        held = (self.gate_up_bias, self.gate_up_zero, self.weight_format)
        given = (dtype, self.activation, self.first_expert, *held)
        return x[0], self.gate_up, ids, scale, self.gate_up_scale, *given

    def second(self, h: tuple[Any, ...], ids: Any) -> tuple[Any, ...]:
        """The arguments of ``expert_linear`` for down."""
        scale = self._scale(h, self.down_input_scale)
        dtype = None if scale is None else self.x.dtype
        given = (dtype, None, self.first_expert)
        held = (self.down_bias, self.down_zero, self.weight_format)
        return h[0], self.down, ids, scale, self.down_scale, *given, *held

    def _scale(self, made: tuple[Any, ...], input_scale: Any) -> Any:
        if not self.quantizes_x:
            return None
        return made[1] if len(made) > 1 else input_scale


def check(call: Call) -> None:
    """Raises ValueError: shapes, dtypes or attributes do not fit; names what was expected."""
    x, experts = call.x, call.num_experts if call.first_expert is None else call.num_routed
    if len(x.shape) != 2 or tuple(call.router_weight.shape) != (experts, x.shape[1]):
        raise ValueError(
            f"fused_moe: x is {[*x.shape]} and router_weight {[*call.router_weight.shape]}, "
            f"expected [num_tokens, hidden] and [{experts}, hidden]"
        )
    dtypes = (x.dtype, torch.float32) if call.float32_logits else (x.dtype,)
    if call.router_weight.dtype not in dtypes:
        raise ValueError(
            f"fused_moe: router_weight is {call.router_weight.dtype}, expected "
            f"{' or '.join(map(str, dtypes))}"
        )
    bias = call.router_bias
    if bias is not None and (tuple(bias.shape) != (experts,) or bias.dtype not in dtypes):
        raise ValueError(
            f"fused_moe: router_bias is {bias.dtype} {[*bias.shape]}, expected "
            f"{' or '.join(map(str, dtypes))} [{experts}]"
        )
    logits = TensorDesc(dtypes[-1], (x.shape[0], experts))
    check_route(logits, call.correction_bias, call.routing)
    ids = TensorDesc(torch.int32, (x.shape[0], call.top_k))
    slots = x.shape[0] * call.top_k
    h = TensorDesc(x.dtype, (slots, call.gate_up.shape[1] // 2))
    first = describe_experts(*call.first(_described(x, call.scheme(call.gate_up_input_scale)), ids))
    second = describe_experts(*call.second(_described(h, call.scheme(call.down_input_scale)), ids))
    if (second.out_features, second.groups) != (first.in_features, first.groups):
        raise ValueError(
            f"fused_moe: gate_up is {[*call.gate_up.shape]} and down {[*call.down.shape]}, "
            "expected [num_experts, 2 * intermediate, hidden] and [num_experts, hidden, "
            "intermediate]"
        )


def logits_of(call: Call, linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> Tensor:
    """The router's logits; ``linear`` is for those in x's dtype."""
    x, weight, bias = call.x, call.router_weight, call.router_bias
    if not call.float32_logits or x.dtype == torch.float32:
        return linear(x, weight, bias)
    if x.is_cuda and x.dtype == weight.dtype and bias is None:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    wide = None if bias is None else bias.float()
    return torch.nn.functional.linear(x.float(), weight.float(), wide)


def _described(x: Any, scheme: Any) -> tuple[Any, ...]:
    """The results of ``finish`` on x, as descriptions."""
    if scheme is None:
        return (x,)
    rows, columns = x.shape
    q = TensorDesc(E4M3, (rows, columns))
    if not isinstance(scheme, int):
        return (q,)
    return q, TensorDesc(torch.float32, (rows, columns // scheme if scheme else 1))


def plan_quantized(x: Tensor, scheme: Any) -> Launches[tuple[Tensor, ...]]:
    """The launches that do what ``finish`` does, and their results."""
    if scheme is None:
        return [], (x,)
    return plan_quantize(x, scheme)


class Routed(NamedTuple):
    """The launches that choose experts and, with many tokens, sort the slots."""

    launches: list[Launch]
    topk_weights: Tensor
    ids: Tensor
    by_expert: plans.Sorted | None


class Planned(NamedTuple):
    """The launches from the router's layer up to the sum, and the operands of that sum."""

    launches: list[Launch]
    y: Tensor
    topk_weights: Tensor


def plan_routing(call: Call, logits: Tensor) -> Routed:
    launches, (topk_weights, ids) = route_plans.route(logits, call.correction_bias, call.routing)
    return plan_sort(call, launches, topk_weights, ids)


def plan_sort(call: Call, launches: list[Launch], topk_weights: Tensor, ids: Tensor) -> Routed:
    """Append the launches that sort the slots of many tokens to those that choose experts."""
    if call.x.shape[0] <= kernels.MOST_UNSORTED:
        return Routed(launches, topk_weights, ids, None)
    more, by_expert = plans.sort_by_expert(ids, call.num_experts, call.first_expert)
    return Routed([*launches, *more], topk_weights, ids, by_expert)


def plan_layers(call: Call, logits: Tensor) -> Planned:
    """The launches that choose experts, sort the slots of many tokens, and run both layers."""
    return plan_experts(call, plan_routing(call, logits))


def plan_experts(call: Call, routed: Routed) -> Planned:
    """The launches up to both layers of the experts that were chosen."""
    launches, topk_weights, ids, by_expert = routed
    more, first = plan_quantized(call.x, call.scheme(call.gate_up_input_scale))
    launches = [*launches, *more]
    more, h = kernels.plan_gemm(by_expert, *call.first(first, ids))
    launches += more
    more, second = plan_quantized(h, call.scheme(call.down_input_scale))
    launches += more
    more, y = kernels.plan_gemm(by_expert, *call.second(second, ids))
    return Planned([*launches, *more], y, topk_weights)


def plan_sum(call: Call, made: Planned) -> Launches[Tensor]:
    """The launches up to the experts' sum, and that sum."""
    more, out = plans.combine(made.y, made.topk_weights, call.shared, call.shared_gate, None)
    return [*made.launches, *more], out


def plan_sum_and_norm(
    call: Call, made: Planned, residual: Tensor, norm: plans.NormOfSum
) -> Launches[tuple[Tensor, Tensor]]:
    """The launches up to (the norm, the sum).  One kernel adds the experts and the residual, and
    normalizes the sum."""
    beside = (call.shared, call.shared_gate, residual)
    more, results = plans.combine_add_norm(made.y, made.topk_weights, *beside, norm)
    return [*made.launches, *more], results


def kernel_names(launches: list[Launch]) -> tuple[str, ...]:
    return tuple(launch.kernel.partition(":")[2] for launch in launches)


def cost_of_call(call: Call) -> Cost:
    """The cost of the experts and of their router."""
    num_tokens, hidden = call.x.shape
    slots = num_tokens * call.top_k
    if call.first_expert is not None:  # the slots are spread over the ranks, as the experts are
        slots = slots * call.num_experts / call.num_routed
    more = (call.gate_up_bias, call.down_bias, call.gate_up_zero, call.down_zero)
    held = [t for t in (*call[3:7], *more) if t is not None]
    share = kernels.share_chosen(num_tokens, call.top_k, call.num_routed)
    beside = (call.router_weight, call.router_bias, *call[2:3], *call[7:9], *call[10:12])
    read = call.x.nbytes + sum(t.nbytes for t in beside if t is not None)
    read += share * sum(t.nbytes for t in held)
    inner = call.gate_up.shape[1] // 2
    flops = 2 * num_tokens * hidden * call.num_routed + 2 * slots * 3 * inner * hidden
    return Cost(bytes=read + call.x.nbytes, flops=flops + slots * (5 * inner + 2 * hidden))
