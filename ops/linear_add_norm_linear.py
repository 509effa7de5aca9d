"""``linear_add_norm_linear`` is one projection into the residual stream and the next one out of it.

It is one op, and not a linear layer with a residual and a norm with a linear layer, because where
the sum is best made depends on the number of rows, which is known only when a program runs.  With
few rows the first linear layer's kernel adds, and the second's normalizes; with many rows, one
kernel between the two library GEMMs adds and normalizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._launch import Launch
from ._op import Case, Cost, Implementation, OpDesc, SemanticOp, TensorDesc, Tolerance
from ._skinny import refuses_bf16, rows_to_stream
from .gated_linear import OP as GATED_LINEAR
from .gated_linear import runs_in_turn
from .launches import activation as kernels
from .launches import norm
from .linear import OP as LINEAR
from .norm import ADD_RMS_NORM

Results = tuple[Tensor, Tensor]


def linear_add_norm_linear(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    next_weight: Tensor,
    next_bias: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    """A linear layer, the residual add, RMSNorm, and the linear layer that follows.

    Args:
        x: [..., in_features], floating point.
        weight: [hidden, in_features], same dtype, as all that follow.
        residual: [..., hidden].
        norm_weight: [hidden].
        eps: added to the mean square.
        next_weight: [out_features, hidden]; with an activation gate rows, then as many up rows.
        next_bias: [out_features], or None; None with an activation.
        activation: None, or "silu" or "gelu_tanh", as of ``gated_linear``.

    Returns:
        (y, residual_out), contiguous.  ``residual_out`` is [..., hidden]: ``x @ weight.T`` rounded,
        plus ``residual``, rounded.  y is [..., out_features], with an activation half of that:
        ``linear`` or ``gated_linear`` of the norm of ``residual_out``.  The streaming kernels scale
        sums where the norm scales what is summed: y has a rounding less than by the ops in turn.

    Raises:
        ValueError: shapes that are not these (native: PyTorch's RuntimeError), or a bias with an
            activation.
    """
    return torch.ops.fw.linear_add_norm_linear.default(  # type: ignore[no-any-return]
        x, weight, residual, norm_weight, eps, next_weight, next_bias, activation
    )


def _reference(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    next_weight: Tensor,
    next_bias: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    _refuse_bias(next_bias, activation)
    product = F.linear(x, weight)
    normed, total = ADD_RMS_NORM.reference(product, residual, norm_weight, eps)
    if activation is None:
        return F.linear(normed, next_weight, next_bias), total
    return GATED_LINEAR.reference(normed, next_weight, activation), total


def _refuse_bias(next_bias: Tensor | None, activation: str | None) -> None:
    if activation is not None and next_bias is not None:
        raise ValueError(
            f"linear_add_norm_linear: next_bias with activation {activation!r}, expected one of "
            "them"
        )


def _fake(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    next_weight: Tensor,
    next_bias: Tensor | None,
    activation: str | None,
) -> Results:
    _refuse_bias(next_bias, activation)
    total = LINEAR.fake(x, weight, None)
    if total.shape != residual.shape or norm_weight.shape != total.shape[-1:]:
        raise ValueError(
            f"linear_add_norm_linear: x {list(x.shape)} times weight {list(weight.shape)} is "
            f"{list(total.shape)}: expected a residual like it, found {list(residual.shape)}, and "
            f"a norm of {total.shape[-1]}, found {list(norm_weight.shape)}"
        )
    if activation is None:
        return LINEAR.fake(total, next_weight, next_bias), total
    return GATED_LINEAR.fake(total, next_weight, activation), total


def _in_turn(linear: str, gated: str) -> Callable[..., Results]:
    """One op after the other, by these implementations of the products."""

    def run(
        x: Tensor,
        weight: Tensor,
        residual: Tensor,
        norm_weight: Tensor,
        eps: float,
        next_weight: Tensor,
        next_bias: Tensor | None,
        activation: str | None,
    ) -> Results:
        _refuse_bias(next_bias, activation)
        product = LINEAR.implementation(linear).fn
        add_norm = ADD_RMS_NORM.implementation("triton").fn
        normed, total = add_norm(product(x, weight, None), residual, norm_weight, eps)
        if activation is None:
            return product(normed, next_weight, next_bias), total
        return GATED_LINEAR.implementation(gated).fn(normed, next_weight, activation), total

    return run


def _skinny(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    next_weight: Tensor,
    next_bias: Tensor | None,
    activation: str | None,
) -> Results:
    """Two streaming kernels for few rows, else the ops in turn."""
    rows, rest = rows_to_stream(x, weight, next_weight), (eps, next_weight, next_bias, activation)
    if rows is None:
        return _OPS_OF_SKINNY(x, weight, residual, norm_weight, *rest)
    added = residual.reshape(rows.shape[0], -1).contiguous()
    y, total = torch.ops.fw_cuda.skinny_linear_add_norm_linear.default(
        rows, weight, added, norm_weight.contiguous(), *rest
    )
    return y.view(*x.shape[:-1], y.shape[1]), total.view(residual.shape)


_OPS_OF_SKINNY = _in_turn("skinny", "skinny")


def _supports(desc: OpDesc) -> str:
    return ADD_RMS_NORM.implementation("triton").supports(_part(desc, x=desc["residual"]))


def _skinny_supports(desc: OpDesc) -> str:
    return _supports(desc) or refuses_bf16(desc) or refuses_bf16(desc, "next_weight")


def _launches(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    next_weight: Tensor,
    next_bias: Tensor | None,
    activation: str | None,
) -> tuple[list[Launch], Results]:
    """The launches that must be compiled: those of the add and norm, and of the activation."""
    product = LINEAR.fake(x, weight, None)
    planned, (_, total) = norm.norm(product, residual, norm_weight, eps)
    y = LINEAR.fake(total, next_weight, None)
    if activation is not None:
        more, y = kernels.gated_activation(y, None, activation)
        planned += more
    return planned, (y, total)


def _runs(*args: Any) -> tuple[str, ...]:
    x, weight, *_, next_weight, _, activation = args
    if rows_to_stream(x, weight, next_weight) is None:
        return _runs_in_turn(*args)
    gated = "" if activation is None else "gated_"
    return "skinny_linear, add", f"norm, skinny_{gated}linear"


def _runs_in_turn(*args: Any) -> tuple[str, ...]:
    last = ("cuBLAS",) if args[-1] is None else runs_in_turn()
    return "cuBLAS", "_rms_norm_kernel", *last


def _cases(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Iterator[Case]:
    def call(
        label: str,
        rows: tuple[int, ...],
        k: int,
        hidden: int,
        n: int,
        activation: str | None = None,
        bias: bool = False,
    ) -> Case:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=gen, device=device)

        residual = randn(*rows, hidden)
        residual[randn(*rows, hidden) > 3] *= 20  # the residual stream has outliers
        weights = randn(hidden, k) * k**-0.5, randn(n, hidden) * hidden**-0.5
        made = (randn(*rows, k), weights[0], residual, 1 + randn(hidden) / 4)
        added = randn(n).to(dtype) if bias else None
        args = (*(t.to(dtype) for t in made), 1e-5, weights[1].to(dtype), added, activation)
        return Case(label, args)

    yield call("one row", (1,), 64, 96, 80)
    yield call("SiLU", (5,), 40, 64, 2 * 48, "silu")
    yield call("bias, odd sizes", (19,), 37, 77, 31, bias=True)
    yield call("three dimensions, GELU", (2, 3), 32, 40, 2 * 24, "gelu_tanh")
    yield call("no rows", (0,), 16, 32, 16)
    if device.type == "cuda":  # large enough for the streaming kernels
        yield call("1 row, 8 MiB", (1,), 2048, 2048, 4096)
        yield call("7 rows, bias", (7,), 4096, 2048, 2049, bias=True)
        yield call("13 rows of three dimensions, SiLU", (1, 13), 2048, 3072, 2 * 1501, "silu")
        yield call("16 rows, GELU", (16,), 8192, 1024, 2 * 4096, "gelu_tanh")
        yield call("17 rows", (17,), 2048, 2048, 2048)


def _cost(desc: OpDesc) -> Cost:
    x, weight, residual = desc["x"], desc["weight"], desc["residual"]
    first = LINEAR.cost(_part(desc, x=x, weight=weight, bias=None))
    then = _part(desc, x=residual, weight=desc["next_weight"], bias=desc["next_bias"])
    second = (LINEAR if desc["activation"] is None else GATED_LINEAR).cost(then)
    return Cost(
        bytes=first.bytes + residual.nbytes + desc["norm_weight"].nbytes + second.bytes,
        flops=first.flops + 5 * residual.numel + second.flops,
    )


def _part(desc: OpDesc, **args: TensorDesc | None) -> OpDesc:
    """Describe a part of the call by some of its arguments, to ask that part's op about it."""
    return OpDesc(desc.op, tuple(args.items()), desc.device, desc.sm)


OP = SemanticOp(
    name="linear_add_norm_linear",
    reference=_reference,
    fake=_fake,
    cases=_cases,
    cost=_cost,
    implementations=(
        Implementation(
            "skinny",
            _skinny,
            _skinny_supports,
            devices=("cuda",),
            launches=_launches,
            runs=_runs,
        ),
        Implementation(
            "triton",
            _in_turn("native", "triton"),
            _supports,
            devices=("cuda",),
            launches=_launches,
            runs=_runs_in_turn,
        ),
        Implementation("native", _reference, inline=True),
    ),
    # Those of gated_linear, wider in bfloat16: the streaming kernels leave out a rounding.
    tolerances={**GATED_LINEAR.tolerances, torch.bfloat16: Tolerance(5e-2, 5e-2)},
)
