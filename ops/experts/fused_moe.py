"""``fused_moe`` is a whole mixture of experts: router, choice, both layers of experts, their sum.

It is one op because what lies between its GEMMs depends on the number of tokens, which is known
only when a program runs.  With few tokens each choice reads its expert's weights by itself; with
many, slots are sorted by expert once, and that index serves both layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...config.weight_format import STORED_FORMATS, why_not_experts
from ..core.desc import Case, Cost, Draw, OpDesc, Tolerance, drawn
from ..core.float8 import E4M3
from ..core.gate import Gate, spelled
from ..core.launch import Launches, run_all
from ..core.op import Implementation, SemanticOp, on_gpu, parameters_of, signed
from ..core.target import Target
from ..launches import experts as plans, route as route_plans
from ..linear.cases import GATED
from ..linear.formats import quantize
from ..linear.linear import OP as LINEAR
from ..norm.quantize import finish, refuses_device
from . import csrc
from .combine_experts import OP as COMBINE_EXPERTS
from .expert_linear import OP as EXPERT_LINEAR
from .moe import (
    Call,
    Planned,
    check,
    cost_of_call,
    kernel_names,
    logits_of,
    plan_layers,
    plan_sum,
)
from .route import OP as ROUTE


def _reference(*args: Any) -> Tensor:
    """Router, ``route``, two ``expert_linear`` and ``combine_experts``, rounded as in turn.

    Returns:
        [num_tokens, hidden] in x's dtype, contiguous.

    Raises:
        ValueError: shapes, dtypes or attributes are not these.
    """
    call = Call(*args)
    topk_weights, ids = ROUTE.reference(*call.routed(logits_of(call, LINEAR.reference)))
    first = finish(call.x, call.scheme(call.gate_up_input_scale))
    h = EXPERT_LINEAR.reference(*call.first(first, ids))
    y = EXPERT_LINEAR.reference(*call.second(finish(h, call.scheme(call.down_input_scale)), ids))
    result: Tensor = COMBINE_EXPERTS.reference(y, topk_weights, call.shared, call.shared_gate)
    return result


def _fake(*args: Any) -> Tensor:
    call = Call(*args)
    check(call)
    result: Tensor = call.x.new_empty(call.x.shape)
    return result


def _cuda(*args: Any) -> Tensor:
    """Three kernels of csrc for few tokens, its router for some more, its GEMMs for many, and its
    kernels of weights of four bits for any number; all else is Triton's."""
    call = Call(*args)
    x = call.x if call.x.is_contiguous() and call.x.data_ptr() % 16 == 0 else call.x.clone()
    shared = None if call.shared is None else call.shared.contiguous()
    call = call._replace(x=x.contiguous(), shared=shared)
    if csrc.streams(call):
        return csrc.down(call, csrc.route_and_gate_up(call))
    return _sum(call, csrc.layers(call, _logits))


def _triton(*args: Any) -> Tensor:
    call = Call(*args)
    return _sum(call, plan_layers(call, _logits(call)))


def _logits(call: Call) -> Tensor:
    return logits_of(call, torch.nn.functional.linear)


def _sum(call: Call, made: Planned) -> Tensor:
    launches, out = plan_sum(call, made)
    run_all(launches)
    return out


def _launches(*args: Any) -> Launches[Tensor]:
    """The launches that must be compiled: all but the router's GEMM.  They are those of Triton's
    layers too where csrc has kernels, which do not read weights at every address."""
    call = Call(*args)
    check(call)
    dtype = torch.float32 if call.float32_logits else call.x.dtype
    logits = call.x.new_empty((call.x.shape[0], call.num_routed), dtype=dtype)
    return plan_sum(call, plan_layers(call, logits))


def _runs(*args: Any) -> tuple[str, ...]:
    fills = () if Call(*args).first_expert is None else ("zeros",) * 2
    return "cuBLAS", *fills, *kernel_names(_launches(*args)[0])


def _cuda_runs(*args: Any) -> tuple[str, ...]:
    call = Call(*args)
    return csrc.streamed_names(call) if csrc.streams(call) else csrc.names(call, _runs(*args))


def _cuda_supports(desc: OpDesc) -> str:
    call, target = Call(*(value for _, value in desc.args)), Target.of(desc)
    if reason := supports(desc):
        return reason
    if not csrc.why_not_grouped(call, csrc.MANY_TOKENS, target):
        return ""
    if not csrc.why_not_packed(call, csrc.MANY_TOKENS, target):
        return ""
    return csrc.why_not_streamed(call, 1, target)


def supports(desc: OpDesc) -> str:
    """Why the Triton kernels do not serve a call, or nothing."""
    return supports_call(Call(*(value for _, value in desc.args)), desc)


def supports_call(call: Call, desc: OpDesc) -> str:
    """Why the Triton kernels do not serve a call that is a part of ``desc``, or nothing."""
    try:
        check(call)
    except ValueError as error:
        return str(error)
    if call.quantizes_x and (reason := refuses_device(desc)):
        return reason
    form, inner = STORED_FORMATS.get(call.weight_format or ""), call.gate_up.shape[1] // 2
    widths = (call.x.shape[1], inner)
    if form and (reason := next(filter(None, (why_not_experts(form, k) for k in widths)), "")):
        return reason
    if call.num_experts > plans.MOST_EXPERTS:
        return f"{call.num_experts} experts > {plans.MOST_EXPERTS}: their offsets are one tile"
    return route_plans.too_many(call.num_routed)


def _with_clear_groups(orders: Tensor, *, num_groups: int, num_chosen: int) -> Tensor:
    """Choose the order of a token's experts in which the chosen groups are ahead by most.

    A group counts by the sum of its best two sigmoid scores; two such sums may be nearly equal.

    Args:
        orders: [candidates, tokens, experts].
    """
    scores = (orders * (4.0 / orders.shape[2])).sigmoid().unflatten(-1, (num_groups, -1))
    ranked = scores.topk(2).values.sum(-1).sort(descending=True).values
    ahead = ranked[..., num_chosen - 1] - ranked[..., num_chosen]
    tokens = torch.arange(orders.shape[1], device=orders.device)
    return orders[ahead.argmax(0), tokens]


def moe_args(
    draw: Draw,
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    *,
    fp8: str = "",
    shared: bool = False,
    biased: bool = False,
    routing: tuple[Any, ...] = ("softmax", True, 1, 1, 1.0),
    activation: str = "silu",
    rank: int | None = None,
    float32_logits: bool = False,
    biases: bool = False,
    weight_format: str | None = None,
) -> tuple[Any, ...]:
    """Arguments of a call; router logits are far enough apart that no rounding changes a choice.
    ``rank``: of two, each of which has half of the experts.  ``biases``: of the router, which is
    too small to change a choice, and of the experts."""
    dtype, device, randn = draw.dtype, draw.device, draw.randn
    # Each token points along a few router rows, which are orthogonal.
    router = torch.linalg.qr(randn(hidden, hidden))[0][:experts]
    order = draw.rand(tokens, experts).argsort(-1)
    if biased and routing[2] > 1:
        orders = draw.rand(8, tokens, experts).argsort(-1)
        order = _with_clear_groups(orders, num_groups=routing[2], num_chosen=routing[3])
    x = (order * (4.0 / experts)) @ router + randn(tokens, hidden) * 1e-3
    bias = torch.zeros(experts, device=device) if biased else None
    scales: list[Tensor | None] = [None] * 4
    weights = [randn(experts, 2 * inner, hidden) * hidden**-0.5]
    weights += [randn(experts, hidden, inner) * inner**-0.5]
    group_size = 0
    if fp8:
        group_size = 128 if fp8 == "block" else 0
        for index, weight in enumerate(weights):
            n, k = weight.shape[1:]
            shape = {"tensor": (1, 1), "token": (n, 1), "block": (-(-n // 128), -(-k // 128))}[fp8]
            scales[index] = 0.01 + draw.rand(experts, *shape) / 99
            weights[index] = (weight * 60).clamp(-448, 448).to(E4M3)
            if fp8 == "tensor":
                scales[2 + index] = torch.full((1, 1), 0.02, device=device)
    elif weight_format is None:
        weights = [weight.to(dtype) for weight in weights]
    zeros: list[Tensor | None] = [None, None]
    if weight_format is not None:
        for index, weight in enumerate(weights):
            parts = [quantize(STORED_FORMATS[weight_format], one) for one in weight]
            held = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
            weights[index], scales[index] = held["weight"], held["weight_scale"]
            zeros[index] = held.get("weight_zero")
    of_router: Tensor | None = None
    of_layers: list[Tensor | None] = [None, None]
    if biases:
        of_router = (randn(experts) * 1e-3).to(dtype)
        of_layers = [randn(experts, rows).to(dtype) for rows in (2 * inner, hidden)]
    widths = (hidden, 1) if shared else ()
    beside: list[Tensor | None] = [randn(tokens, width).to(dtype) for width in widths]
    beside = beside or [None, None]
    first = None
    if rank is not None:
        half = experts // 2
        here = slice(rank * half, (rank + 1) * half)
        weights = [weight[here].contiguous() for weight in weights]
        for each in (scales, zeros, of_layers):
            each[:2] = [None if s is None else s[here].contiguous() for s in each[:2]]
        first = torch.tensor([rank * half], dtype=torch.int32, device=device)
    return (
        *(
            x.to(dtype),
            router.to(dtype).contiguous(),
            bias,
            *weights,
            *scales,
            group_size,
        ),
        *(*beside, top_k, *routing, activation, first, float32_logits),
        *(of_router, *of_layers, *zeros, weight_format),
    )


CLAMPED = spelled("silu", Gate(1.702, 1.5, 1.0, interleaved=True))
"""The activation of gpt-oss's experts, with a limit that random numbers reach."""


@drawn
def _cases(draw: Draw) -> Iterator[Case]:
    def call(label: str, *sizes: int, **given: Any) -> Case:
        tolerances = _FP8 if given.get("fp8") else None
        return Case(label, moe_args(draw, *sizes, **given), tolerances)

    yield call("one token", 1, 4, 2, 64, 32)
    yield call("few tokens, shared", 3, 8, 2, 48, 40, shared=True)
    yield call("sorted", 11, 6, 3, 64, 48, activation="gelu_tanh")
    grouped = ("sigmoid", True, 4, 2, 2.5)
    yield call("groups and a bias, sorted", 9, 16, 3, 64, 32, biased=True, routing=grouped)
    yield call("sorted, float32 logits", 10, 8, 2, 32, 16, float32_logits=True)
    for rank in (None, 1):
        how: dict[str, Any] = {"biases": True, "activation": CLAMPED, "rank": rank}
        label = "biases, a clamped gate" + ("" if rank is None else ", of one rank")
        yield call(f"few tokens, {label}", 3, 6, 2, 64, 32, **how)
        yield call(f"sorted, {label}", 11, 6, 3, 64, 48, **how)
    how = {"biases": True, "activation": CLAMPED, "weight_format": "mxfp4"}
    yield call("few tokens, MXFP4", 3, 4, 2, 64, 32, **how)
    yield call("sorted, MXFP4, of one rank", 10, 4, 2, 64, 64, weight_format="mxfp4", rank=1)
    yield call("no tokens", 0, 4, 2, 32, 16)
    yield call("few tokens of one rank", 3, 8, 3, 48, 40, rank=1, shared=True)
    yield call("sorted, of one rank", 11, 6, 3, 64, 48, rank=0)
    yield call("FP8 token, of one rank", 10, 4, 2, 64, 32, fp8="token", rank=1)
    yield call("FP8 block, of one rank", 9, 4, 2, 128, 128, fp8="block", rank=0)
    yield call("FP8 token", 10, 4, 2, 64, 32, fp8="token")
    yield call("FP8 tensor", 2, 4, 2, 64, 32, fp8="tensor")
    yield call("FP8 block", 9, 3, 2, 128, 128, fp8="block")
    # csrc does not round activations: its results are up to 0.006 from those of the reference.
    exact = dict.fromkeys(_FP8, Tolerance(1e-2, 6e-2))
    for fp8 in ("token", "block"):
        few = moe_args(draw, 3, 4, 2, 128, 128, fp8=fp8)
        yield Case(f"few tokens, FP8 {fp8}", few, exact)
    if draw.device.type == "cuda":  # too large to interpret
        for tokens in (1, 8, 64, 600, 2048):
            yield call(f"{tokens} tokens of 64 experts", tokens, 64, 8, 1024, 384)
        for tokens in (1, 2, 8, 9, 100):
            yield call(f"{tokens} tokens, MXFP4", tokens, 8, 4, 832, 768, **how)
            kind = "int4_g64" if tokens == 9 else "int4_g128"
            yield call(f"{tokens} tokens, {kind}", tokens, 16, 3, 768, 768, weight_format=kind)


_FP8 = {
    # h is quantized between the layers: what differs by a rounding may become the next FP8 value.
    torch.float32: Tolerance(3e-2, 3e-2),
    torch.bfloat16: Tolerance(6e-2, 6e-2),
    torch.float16: Tolerance(3e-2, 3e-2),
}


def _cost(desc: OpDesc) -> Cost:
    return cost_of_call(Call(*(value for _, value in desc.args)))


OP = SemanticOp(
    name="fused_moe",
    reference=signed(_reference, parameters_of(Call), results=1),
    fake=_fake,
    cases=_cases,
    cost=_cost,
    implementations=(
        on_gpu("cuda", _cuda, _cuda_supports, launches=_launches, runs=_cuda_runs),
        on_gpu("triton", _triton, supports, launches=_launches, runs=_runs),
        Implementation("native", _reference, on_host=True),
    ),
    tolerances={**GATED, torch.bfloat16: Tolerance(5e-2, 5e-2)},
)
