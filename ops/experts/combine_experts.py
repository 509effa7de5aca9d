"""``combine_experts`` adds what a token's experts made, by their weights, with a shared expert and
the residual stream.

The order of the sum is that in which the router chose, so it is the same at every batch size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..core.desc import Case, Cost, Draw, OpDesc, TensorDesc, drawn
from ..core.launch import Launches
from ..core.op import Implementation, SemanticOp, dispatched, triton
from ..launches import experts as plans


@dispatched
def combine_experts(
    y: Tensor,
    topk_weights: Tensor,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The weighted sum of each token's experts (Shazeer et al., 2017, eq. 1).

    Args:
        y: [num_tokens * top_k, hidden], floating point: the results of ``expert_linear``.
        topk_weights: [num_tokens, top_k] float32.
        shared: [num_tokens, hidden] like y, or None: the result of experts that all tokens have.
        shared_gate: [num_tokens, 1] like y, or None: ``shared`` is multiplied by its sigmoid.
        residual: [num_tokens, hidden] like y, or None: is added to the rounded sum.

    Returns:
        [num_tokens, hidden] in y's dtype, contiguous.  Sums are float32, in the order of places,
        and rounded once; once more after a residual.

    Raises:
        ValueError: shapes or dtypes are not these.
    """
    check(y, topk_weights, shared, shared_gate, residual)
    of_token = y.float().unflatten(0, topk_weights.shape)
    total = of_token[:, 0] * topk_weights[:, 0, None]
    for place in range(1, topk_weights.shape[1]):
        total = total + of_token[:, place] * topk_weights[:, place, None]
    if shared is not None:
        scale = 1.0 if shared_gate is None else shared_gate.float().sigmoid()
        total = total + shared.float() * scale
    out: Tensor = total.to(y.dtype)
    return (out if residual is None else out + residual).contiguous()


def check(y: Any, topk_weights: Any, shared: Any, shared_gate: Any, residual: Any) -> None:
    """Raises ValueError: shapes or dtypes do not fit; names what was expected."""
    if len(topk_weights.shape) != 2 or topk_weights.dtype != torch.float32:
        raise ValueError(
            f"topk_weights are {topk_weights.dtype} {[*topk_weights.shape]}, expected "
            "torch.float32 [num_tokens, top_k]"
        )
    tokens, top_k = topk_weights.shape
    if len(y.shape) != 2 or y.shape[0] != tokens * top_k or not y.dtype.is_floating_point:
        raise ValueError(
            f"y is {y.dtype} {[*y.shape]}, expected floating-point rows of {tokens} tokens' "
            f"{top_k} choices"
        )
    hidden = y.shape[1]
    given = {"shared": (shared, hidden), "shared_gate": (shared_gate, 1)}
    for name, (tensor, width) in {**given, "residual": (residual, hidden)}.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != (tokens, width) or tensor.dtype != y.dtype:
            raise ValueError(
                f"{name} is {tensor.dtype} {[*tensor.shape]}, expected {y.dtype} "
                f"[{tokens}, {width}]"
            )
    if shared is None and shared_gate is not None:
        raise ValueError("shared_gate is given without shared, which it would scale")


def _fake(y: Tensor, topk_weights: Tensor, *rest: Any) -> Tensor:
    check(y, topk_weights, *rest, *[None] * (3 - len(rest)))
    return y.new_empty((topk_weights.shape[0], y.shape[1]))


def _launches(y: Tensor, topk_weights: Tensor, *rest: Any) -> Launches[Tensor]:
    given = (*rest, *[None] * (3 - len(rest)))
    check(y, topk_weights, *given)
    return plans.combine(y, topk_weights, *given)


@drawn
def _cases(draw: Draw) -> Iterator[Case]:
    def randn(*shape: int) -> Tensor:
        return draw.randn(*shape).to(draw.dtype)

    def call(label: str, tokens: int, top_k: int, hidden: int, given: str = "") -> Case:
        weights = draw.rand(tokens, top_k)
        shapes = {"shared": hidden, "gate": 1, "residual": hidden}
        rest = (randn(tokens, n) if name in given else None for name, n in shapes.items())
        return Case(label, (randn(tokens * top_k, hidden), weights, *rest))

    yield call("one token", 1, 2, 64)
    yield call("8 experts, residual", 5, 8, 96, "residual")
    yield call("shared", 3, 4, 40, "shared")
    yield call("gated shared, residual", 7, 2, 129, "shared, gate, residual")
    yield call("wide", 2, 3, 2500, "shared, gate")
    y, weights, *_ = call("", 4, 2, 80).args
    yield Case("slices", (y[:, 16:64], weights, None, None, randn(4, 90)[:, 5:53]))
    yield call("no tokens", 0, 2, 32, "residual")


def _cost(call: OpDesc) -> Cost:
    y, weights = call["y"], call["topk_weights"]
    written = weights.shape[0] * y.shape[1]
    read = sum(value.nbytes for _, value in call.args if isinstance(value, TensorDesc))
    added = sum(call[name] is not None for name in ("shared", "shared_gate", "residual"))
    return Cost(bytes=read + written * y.dtype.itemsize, flops=2 * y.numel + added * written)


OP = SemanticOp(
    reference=combine_experts,
    fake=_fake,
    cases=_cases,
    cost=_cost,
    implementations=(triton(_launches), Implementation("native", combine_experts, inline=True)),
)
