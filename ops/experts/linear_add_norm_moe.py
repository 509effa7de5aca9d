"""``linear_add_norm_moe`` is a projection into the residual stream, a norm, and the experts.  In
all layers but a model's last one it includes the next norm and the projection that follows.

It is one op for the same reason as ``linear_add_norm_linear``: the number of tokens decides where
sums and norms are best computed.  For few tokens, five kernels do everything, and each norm is
applied where its result is read.  For many tokens, one kernel adds the experts' results and the
residual, and normalizes the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..core import in_turn as turns
from ..core.desc import Case, Cost, Draw, OpDesc, Tolerance, drawn
from ..core.float8 import E4M3
from ..core.launch import Launch, Launches, run_all
from ..core.op import Implementation, SemanticOp, on_gpu, signed
from ..core.target import Target, here
from ..core.tiles import cdiv
from ..launches import norm
from ..linear.desc import BLOCK, LinearDesc
from ..linear.kernels import LIBRARY, STREAM, why_not_streamed
from ..linear.linear import OP as LINEAR
from ..norm.norm import ADD_RMS_NORM
from . import _moe_cuda as csrc
from ._moe_chain import (
    ADD_NORM_QUANTIZE,
    PARAMETERS,
    QUANTIZE_ROWS,
    Call,
    Results,
    check,
    in_turn,
    streamed_layers,
)
from .fused_moe import OP as FUSED_MOE, moe_args, supports_call
from .moe import (
    Call as Experts,
    Planned,
    cost_of_call,
    kernel_names,
    plan_layers,
    plan_sum,
    plan_sum_and_norm,
)

# Plans a choice of experts and both of their layers.
Layers = Callable[[Experts], Planned]


def _reference(*args: Any) -> Results:
    """``linear``, ``add_rms_norm``, ``fused_moe``, and again ``add_rms_norm`` and ``linear``; with
    scales, x is quantized before each linear layer.

    Returns:
        (y, residual_out), contiguous.  y is [num_tokens, out_features], and ``residual_out`` is the
        sum that the last norm reads.  Without ``next_norm_weight``, y is the experts' result, and
        ``residual_out`` is the sum before the experts; y is not added to it.  The kernels for few
        tokens do not quantize activations: their y is nearer to the layers of unquantized x.

    Raises:
        ValueError: shapes are not these.
    """
    call = Call.of(args)
    check(call)
    return in_turn(call, turns.reference)


def _fake(*args: Any) -> Results:
    call = Call.of(args)
    check(call)
    return in_turn(call, turns.fake)


def _linear(*args: Any) -> Tensor:
    """Compute a linear layer with the kernel that the table of linear layers selects."""
    y: Tensor = LINEAR.implementation("skinny").fn(*args)
    return y


def _streams(call: Call) -> bool:
    """Whether csrc's kernels for few tokens serve the whole call, dense layers and experts."""
    x, tensors = call.head.x, (*call.head[:5], *call.experts[1:5], *call[2:])
    if x.device.type != "meta" and not all(
        not isinstance(t, Tensor) or (t.is_contiguous() and t.data_ptr() % 16 == 0) for t in tensors
    ):
        return False
    if why_not_streamed(streamed_layers(call), x.shape[0], here(x.device)):
        return False
    return csrc.streams(call.experts)


def _cuda(*args: Any) -> Results:
    """Few tokens run five kernels, each of which streams weights.  More run the ops in turn, some
    with csrc's router, many with its grouped GEMM for the experts."""
    call = Call.of(args)
    if not _streams(call):
        return _run_in_turn(call, "cuda")
    add = torch.ops.fw_cuda.skinny_linear_add.default
    weighted, total, squares = add(*call.head[:5], call.weight_scale)
    experts = call.experts._replace(x=weighted)
    made = csrc.route_and_gate_up(experts, squares, float(call.head.eps))
    if call.next_norm_weight is None:
        return csrc.down(experts, made), total
    total, weighted, squares = csrc.down_add_norm(experts, made, total, call.next_norm_weight)
    norm_linear = torch.ops.fw_cuda.skinny_norm_linear.default
    behind = (call.next_weight, call.next_bias, None, call.next_scale)
    return norm_linear(weighted, squares, float(call.next_eps), *behind), total


def _cuda_runs(*args: Any) -> tuple[str, ...]:
    call = Call.of(args)
    if not _streams(call):
        if call.is_fp8:
            return turns.names(in_turn, call, _parts(call, "cuda"))
        return csrc.names(call.experts, _runs(*args))
    names = (f"{STREAM.name}, add", *csrc.STREAMED)
    return names if call.is_last else (*names[:-1], f"{names[-1]}, add", f"norm, {STREAM.name}")


def _cuda_supports(desc: OpDesc) -> str:
    if reason := _supports(desc):
        return reason
    call, target = Call.of([value for _, value in desc.args]), Target.of(desc)
    experts = call.experts
    if not csrc.why_not_grouped(experts, csrc.MANY_TOKENS, target):
        return ""
    # Where only the dense layers cannot be streamed, those of FP8 are computed in turn.
    why = "" if call.is_fp8 else why_not_streamed(streamed_layers(call), 1, target)
    return why or csrc.why_not_streamed(experts, 1, target)


def _triton(*args: Any) -> Results:
    return _run_in_turn(Call.of(args), "triton")


def _cuda_layers(experts: Experts) -> Planned:
    return csrc.layers(experts, _logits)


def _triton_layers(experts: Experts) -> Planned:
    return plan_layers(experts, _logits(experts))


def _logits(experts: Experts) -> Tensor:
    return _linear(experts.x, experts.router_weight, None)


def _parts(call: Call, name: str) -> turns.Part:
    """Choose the implementations of FP8 layers that are computed op by op."""
    scheme = "fp8 block" if call.experts.group_size else "fp8 token"
    dense = _dense_part(tuple(streamed_layers(call)), scheme, call.head.x.device)
    named = {LINEAR.name: dense, FUSED_MOE.name: name}
    return lambda op: op.implementation(named.get(op.name, "triton"))


@lru_cache(4096)
def _dense_part(layers: tuple[LinearDesc, ...], scheme: str, device: torch.device) -> str:
    """The implementation of the dense layers.  Shapes that the library refuses, such as blocks of
    256 columns, are Triton's for any number of tokens."""
    for layer in layers:
        plain = replace(layer, weight_format=scheme, add=False, prologue="")
        if LIBRARY.refuses(plain, 1, here(device)):
            return "triton"
    return "skinny"


def _run_in_turn(call: Call, name: str) -> Results:
    """Runs the ops in turn.  The kernel that sums the experts also applies the norm that follows;
    in FP8 that norm's kernel quantizes instead."""
    if call.is_fp8:
        made: Results = turns.run(in_turn, call, _parts(call, name))
        return made
    y = _linear(*call.head.layer)
    launches, (normed, total) = norm.norm(*call.head.between(y))
    run_all(launches)
    layers = _cuda_layers if name == "cuda" else _triton_layers
    launches, results = _plan_experts(call, normed, total, layers)
    run_all(launches)
    if call.is_last:
        return results[0], total
    return _linear(results[0], call.next_weight, call.next_bias), results[1]


def _plan_experts(
    call: Call, normed: Tensor, total: Tensor, layers: Layers
) -> Launches[tuple[Tensor, ...]]:
    """The launches that follow the first norm, with their results: the experts' sum in a model's
    last layer, otherwise (the norm, the sum that was normalized)."""
    experts = call.experts._replace(x=normed)
    made = layers(experts)
    if call.next_norm_weight is None:
        launches, y = plan_sum(experts, made)
        return launches, (y,)
    return plan_sum_and_norm(experts, made, total, call.next_norm_weight, float(call.next_eps))


def _planned(call: Call) -> tuple[list[Launch], list[Launch], Results]:
    """The Triton launches before the router's layer, those after it, and the results."""
    y = LINEAR.fake(*call.head.layer)
    first, (normed, total) = norm.norm(*call.head.between(y))
    logits = LINEAR.fake(normed, call.experts.router_weight, None)
    then, results = _plan_experts(call, normed, total, partial(plan_layers, logits=logits))
    if call.is_last:
        return first, then, (results[0], total)
    return first, then, (LINEAR.fake(results[0], call.next_weight, call.next_bias), results[1])


def _launches(*args: Any) -> Launches[Results]:
    """The launches that must be compiled: all but the GEMMs of dense layers."""
    call = Call.of(args)
    if call.is_fp8:
        return turns.plan(in_turn, call, _parts(call, "triton"))
    first, then, results = _planned(call)
    return [*first, *then], results


def _runs(*args: Any) -> tuple[str, ...]:
    call = Call.of(args)
    if call.is_fp8:
        return turns.names(in_turn, call, _parts(call, "triton"))
    first, then, _ = _planned(call)
    of_linear = LINEAR.implementation("skinny").runs
    assert of_linear is not None
    rest = (None,) * 5
    names = of_linear(*call.head.layer)
    names += (*kernel_names(first), "cuBLAS", *kernel_names(then))
    if call.is_last:
        return names
    return (*names, *of_linear(call.head.residual, call.next_weight, call.next_bias, *rest))


def _supports(desc: OpDesc) -> str:
    call = Call.of([value for _, value in desc.args])
    part = OpDesc(desc.op, (("x", desc["residual"]),), desc.device, desc.sm)
    if reason := ADD_RMS_NORM.implementation("triton").supports(part):
        return reason
    if call.is_fp8 and (reason := _refuses_fp8(call, desc)):
        return reason
    return supports_call(call.experts, desc)


def _refuses_fp8(call: Call, desc: OpDesc) -> str:
    """Why what quantizes for dense layers does not serve a call, or nothing."""
    group_size = ("group_size", call.experts.group_size)
    for op, x in ((QUANTIZE_ROWS, call.head.x), (ADD_NORM_QUANTIZE, call.head.residual)):
        part = OpDesc(op.name, (("x", x), group_size), desc.device, desc.sm)
        if reason := op.implementation("triton").supports(part):
            return reason
    return ""


# An x that is rounded to a neighbour in FP8 of the reference's, or not to FP8 at all, moves the
# results of both layers of experts and of the layer behind them.
_FP8 = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), Tolerance(0.25, 0.1))


@drawn
def _cases(draw: Draw) -> Iterator[Case]:
    dtype = draw.dtype

    def call(
        label: str,
        tokens: int,
        experts: int,
        top_k: int,
        hidden: int,
        inner: int,
        k: int,
        n: int,
        bias: bool = False,
        fp8: str = "",
        **given: Any,
    ) -> Case:
        randn = draw.randn
        made = Experts(*moe_args(draw, tokens, experts, top_k, hidden, inner, fp8=fp8, **given))
        # The norm reads the tokens of ``moe_args``: no rounding changes their choice of experts.
        first = randn(tokens, hidden) * 1e-3
        x = randn(tokens, k).to(dtype)
        weight, scale = layer(hidden, k, fp8, 1e-3)
        behind, next_scale = layer(n, hidden, fp8)
        biases = [randn(size).to(dtype) if bias else None for size in (hidden, n)]
        biases = [None if biases[0] is None else biases[0] * 1e-3, biases[1]]
        head = (x, weight, biases[0], (made.x.float() + first).to(dtype))
        norms = [(1 + randn(hidden) / 1000).to(dtype), (1 + randn(hidden) / 4).to(dtype)]
        tail: tuple[Any, ...] = (
            (norms[1], 1e-5, behind, biases[1]) if n else (None, 0.0, None, None)
        )
        scales = (scale, made.gate_up_scale, made.down_scale, next_scale if n else None)
        args = (*head, norms[0], 1e-6, *made[1:5], *made[12:19], *tail, *scales, made.group_size)
        return Case(label, args, _FP8 if fp8 else None)

    def layer(n: int, k: int, fp8: str, size: float = 1.0) -> tuple[Tensor, Tensor | None]:
        """A random weight, with scales if FP8; an x of size 1 gives results of ``size``."""
        if not fp8:
            return (draw.randn(n, k) * size * k**-0.5).to(dtype), None
        rows, columns = (n, 1) if fp8 == "token" else (cdiv(n, BLOCK), cdiv(k, BLOCK))
        scale = (0.75 + draw.rand(rows, columns) / 2) * size / (100 * k**0.5)
        return (draw.randn(n, k) * 100).clamp(-448, 448).to(E4M3), scale

    yield call("one token", 1, 4, 2, 64, 32, 48, 40)
    yield call("last layer, sorted", 11, 6, 3, 64, 48, 32, 0)
    grouped = ("sigmoid", True, 4, 2, 2.5)
    yield call("biases, groups", 3, 16, 3, 64, 32, 40, 24, bias=True, biased=True, routing=grouped)
    yield call("sorted", 10, 4, 2, 96, 32, 64, 48)
    yield call("no tokens", 0, 4, 2, 32, 16, 32, 16)
    for fp8 in ("token", "block"):
        yield call(f"FP8 {fp8}", 3, 4, 2, 128, 128, 128, 128, fp8=fp8)
        yield call(f"FP8 {fp8}, sorted, last", 10, 4, 2, 128, 128, 256, 0, bias=True, fp8=fp8)
    if draw.device.type == "cuda":  # too large to interpret
        for tokens in (1, 7, 64, 600, 2048):
            yield call(f"{tokens} tokens of 64 experts", tokens, 64, 8, 2048, 384, 4096, 2560)
        for tokens in (3, 600):
            yield call(f"{tokens} tokens, last", tokens, 64, 8, 2048, 384, 4096, 0)
        for tokens, fp8 in product((1, 2, 8, 40), ("token", "block")):
            sizes = (tokens, 64, 8, 2048, 384, 4096, 4096)
            yield call(f"{tokens} tokens, FP8 {fp8}", *sizes, bias=tokens == 2, fp8=fp8)
        yield call("1 token, FP8 block, last", 1, 64, 8, 2048, 384, 4096, 0, fp8="block")


def _cost(desc: OpDesc) -> Cost:
    call = Call.of([value for _, value in desc.args])
    normed = desc["residual"]
    experts = cost_of_call(call.experts)
    held: list[Any] = [t for t in (*call.head, *call[2:]) if hasattr(t, "nbytes")]
    rows, hidden = normed.shape
    columns = hidden if call.is_last else desc["next_weight"].shape[0]
    moved = sum(t.nbytes for t in held) + experts.bytes - 2 * normed.nbytes
    flops = 2 * desc["x"].numel * hidden + experts.flops + 5 * normed.numel
    if not call.is_last:
        flops += 5 * normed.numel + 2 * rows * hidden * columns
    written = (rows * columns + normed.numel) * normed.dtype.itemsize
    return Cost(bytes=moved + written, flops=flops)


OP = SemanticOp(
    name="linear_add_norm_moe",
    reference=signed(_reference, PARAMETERS, results=2),
    fake=_fake,
    cases=_cases,
    cost=_cost,
    implementations=(
        on_gpu("cuda", _cuda, _cuda_supports, launches=_launches, runs=_cuda_runs),
        on_gpu("triton", _triton, _supports, launches=_launches, runs=_runs),
        Implementation("native", _reference, on_host=True),
    ),
    tolerances={
        torch.float32: Tolerance(1e-4, 1e-4),
        torch.bfloat16: Tolerance(6e-2, 6e-2),
        torch.float16: Tolerance(1e-2, 1e-2),
    },
)
