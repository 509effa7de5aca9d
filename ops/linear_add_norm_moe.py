"""``linear_add_norm_moe`` is a projection into the residual stream, a norm, and the experts.  In
all layers but a model's last one it includes the next norm and the projection that follows.

It is one op for the same reason as ``linear_add_norm_linear``: the number of tokens decides where
sums and norms are best computed.  For few tokens, five kernels do everything, and each norm is
applied where its result is read.  For many tokens, one kernel adds the experts' results and the
residual, and normalizes the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _moe_cuda as csrc
from ._desc import Case, Cost, Draw, OpDesc, Tolerance, drawn
from ._launch import Launch, Launches, run_all
from ._linear_desc import LinearDesc, describe
from ._linear_kernels import STREAM, Target, here, why_not_streamed
from ._moe import (
    Call as Experts,
    Planned,
    check as check_experts,
    cost_of_call,
    kernel_names,
    plan_layers,
    plan_sum,
    plan_sum_and_norm,
)
from ._op import Implementation, SemanticOp, on_gpu, parameters_of, signed
from .fused_moe import OP as FUSED_MOE, moe_args, supports_call
from .launches import norm
from .linear import OP as LINEAR
from .linear_add_norm_linear import LinearAddNorm
from .norm import ADD_RMS_NORM

Results = tuple[Tensor, Tensor]
# Plans a choice of experts and both of their layers.
Layers = Callable[[Experts], Planned]


# The arguments of ``fused_moe`` for FP8 weights and a shared expert, which this op does not take.
_PLAIN = (None, None, None, None, 0, None, None)


class Call(NamedTuple):
    """The arguments of a call.

    Attributes:
        head: the first layer, with x a matrix, and the norm before the experts.
        experts: the arguments of ``fused_moe``, on the residual in place of the norm.
        next_norm_weight, next_eps: of the norm after the experts.  In a model's last layer,
            ``next_norm_weight``, ``next_weight`` and ``next_bias`` are None.
        next_weight, next_bias: of the second linear layer, [out_features, hidden] and
            [out_features]; the bias may be None.
    """

    head: LinearAddNorm
    experts: Experts
    next_norm_weight: Tensor | None
    next_eps: float
    next_weight: Tensor | None
    next_bias: Tensor | None

    @classmethod
    def of(cls, args: Iterable[Any]) -> Call:
        """The call with these arguments, in the order of ``_PARAMETERS``."""
        args = tuple(args)
        head = LinearAddNorm(*args[:6])
        experts = Experts._make((head.residual, *args[6:10], *_PLAIN, *args[10:17], None))
        return cls(head, experts, *args[17:])

    @property
    def is_last(self) -> bool:
        """Whether nothing follows the experts."""
        return self.next_norm_weight is None


_EXPERTS = parameters_of(Experts)
_PARAMETERS = (
    *parameters_of(LinearAddNorm),
    *(*_EXPERTS[1:5], *_EXPERTS[12:19]),
    *parameters_of(Call)[2:],
)


def _reference(*args: Any) -> Results:
    """``linear``, ``add_rms_norm``, ``fused_moe``, and again ``add_rms_norm`` and ``linear``.

    Returns:
        (y, residual_out), contiguous.  y is [num_tokens, out_features], and ``residual_out`` is the
        sum that the last norm reads.  Without ``next_norm_weight``, y is the experts' result, and
        ``residual_out`` is the sum before the experts; y is not added to it.

    Raises:
        ValueError: shapes are not these.
    """
    call = Call.of(args)
    first = LINEAR.reference(*call.head.layer)
    normed, total = ADD_RMS_NORM.reference(*call.head.between(first))
    y = FUSED_MOE.reference(*call.experts._replace(x=normed))
    if call.is_last:
        return y, total
    normed, total = ADD_RMS_NORM.reference(y, total, call.next_norm_weight, call.next_eps)
    return LINEAR.reference(normed, call.next_weight, call.next_bias), total


def check(call: Call) -> None:
    """Raises ValueError: shapes do not fit; names what was expected."""
    call.head.check_matrix("linear_add_norm_moe")
    if (call.next_norm_weight is None) is not (call.next_weight is None):
        raise ValueError(
            "linear_add_norm_moe: one of next_norm_weight and next_weight is given, expected both "
            "or none"
        )
    check_experts(call.experts)


def _fake(*args: Any) -> Results:
    call = Call.of(args)
    check(call)
    total = LINEAR.fake(*call.head.layer)
    if call.is_last:
        return torch.empty_like(total), total
    return LINEAR.fake(total, call.next_weight, call.next_bias), total


def _linear(*args: Any) -> Tensor:
    """A plain layer by the kernel that the table of linear layers selects."""
    y: Tensor = LINEAR.implementation("skinny").fn(*args)
    return y


def _streams(call: Call) -> bool:
    """Whether csrc's kernels for few tokens serve the whole call, dense layers and experts."""
    x, tensors = call.head.x, call.head[:5] + call.experts[1:5]
    if x.device.type != "meta" and not all(
        t is None or (t.is_contiguous() and t.data_ptr() % 16 == 0) for t in tensors
    ):
        return False
    if why_not_streamed(_layers(call), x.shape[0], here(x.device)):
        return False
    return csrc.streams(call.experts)


def _layers(call: Call) -> list[LinearDesc]:
    """Describes the dense layers: the first adds a residual, the second reads a norm."""
    found = [replace(describe(*call.head.layer), add=True)]
    if not call.is_last:
        behind = describe(call.head.residual, call.next_weight, call.next_bias)
        found.append(replace(behind, prologue="norm"))
    return found


def _cuda(*args: Any) -> Results:
    """Few tokens run five kernels, each of which streams weights.  More run the ops in turn, some
    with csrc's router, many with its grouped GEMM for the experts."""
    call = Call.of(args)
    if not _streams(call):
        return _in_turn(call, _cuda_layers)
    weighted, total, squares = torch.ops.fw_cuda.skinny_linear_add.default(*call.head[:5])
    experts = call.experts._replace(x=weighted)
    made = csrc.route_and_gate_up(experts, squares, float(call.head.eps))
    if call.next_norm_weight is None:
        return csrc.down(experts, made), total
    total, weighted, squares = csrc.down_add_norm(experts, made, total, call.next_norm_weight)
    y = torch.ops.fw_cuda.skinny_norm_linear.default(
        weighted, squares, float(call.next_eps), call.next_weight, call.next_bias
    )
    return y, total


def _cuda_runs(*args: Any) -> tuple[str, ...]:
    call = Call.of(args)
    if not _streams(call):
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
    why = why_not_streamed(_layers(call), 1, target)
    return why or csrc.why_not_streamed(experts, 1, target)


def _triton(*args: Any) -> Results:
    return _in_turn(Call.of(args), _triton_layers)


def _cuda_layers(experts: Experts) -> Planned:
    return csrc.layers(experts, _logits)


def _triton_layers(experts: Experts) -> Planned:
    return plan_layers(experts, _logits(experts))


def _logits(experts: Experts) -> Tensor:
    return _linear(experts.x, experts.router_weight, None)


def _in_turn(call: Call, layers: Layers) -> Results:
    """Runs the ops in turn; the kernel that sums the experts also applies the norm that follows."""
    y = _linear(*call.head.layer)
    launches, (normed, total) = norm.norm(*call.head.between(y))
    run_all(launches)
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
    first, then, results = _planned(Call.of(args))
    return [*first, *then], results


def _runs(*args: Any) -> tuple[str, ...]:
    call = Call.of(args)
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
    return supports_call(call.experts, desc)


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
        **given: Any,
    ) -> Case:
        randn = draw.randn
        made = Experts(*moe_args(draw, tokens, experts, top_k, hidden, inner, **given))
        # The norm reads the tokens of ``moe_args``: no rounding changes their choice of experts.
        first = randn(tokens, hidden) * 1e-3
        x, weight = (t.to(dtype) for t in (randn(tokens, k), randn(hidden, k) * 1e-3 * k**-0.5))
        biases = [randn(size).to(dtype) if bias else None for size in (hidden, n)]
        biases = [None if biases[0] is None else biases[0] * 1e-3, biases[1]]
        head = (x, weight, biases[0], (made.x.float() + first).to(dtype))
        norms = [(1 + randn(hidden) / 1000).to(dtype), (1 + randn(hidden) / 4).to(dtype)]
        tail: tuple[Any, ...] = (None, 0.0, None, None)
        if n:
            tail = (norms[1], 1e-5, (randn(n, hidden) * hidden**-0.5).to(dtype), biases[1])
        return Case(label, (*head, norms[0], 1e-6, *made[1:5], *made[12:19], *tail))

    yield call("one token", 1, 4, 2, 64, 32, 48, 40)
    yield call("last layer, sorted", 11, 6, 3, 64, 48, 32, 0)
    grouped = ("sigmoid", True, 4, 2, 2.5)
    yield call("biases, groups", 3, 16, 3, 64, 32, 40, 24, bias=True, biased=True, routing=grouped)
    yield call("sorted", 10, 4, 2, 96, 32, 64, 48)
    yield call("no tokens", 0, 4, 2, 32, 16, 32, 16)
    if draw.device.type == "cuda":  # too large to interpret
        for tokens in (1, 7, 64, 600, 2048):
            yield call(f"{tokens} tokens of 64 experts", tokens, 64, 8, 2048, 384, 4096, 2560)
        for tokens in (3, 600):
            yield call(f"{tokens} tokens, last", tokens, 64, 8, 2048, 384, 4096, 0)


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
    reference=signed(_reference, _PARAMETERS, results=2),
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
