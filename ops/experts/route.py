"""``route`` chooses the experts of every token and how much each of them counts.

One op serves the routers of Mixtral, Qwen-MoE and DeepSeek-V2 and V3; they differ by attributes.
The choice is deterministic: of two experts with equal scores the one with the lower id is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...config.routing import Routing
from ..core.desc import Case, Cost, Draw, OpDesc, Tolerance, drawn
from ..core.launch import Launches
from ..core.op import Implementation, SemanticOp, dispatched, triton
from ..launches import route as plans

LEAST_SUM = 1e-20
"""Is added to the sum by which weights are renormalized."""


@dispatched
def route(
    router_logits: Tensor,
    correction_bias: Tensor | None,
    top_k: int,
    scoring: str = "softmax",
    renormalize: bool = True,
    num_groups: int = 1,
    topk_groups: int = 1,
    scaling: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token (Shazeer et al., 2017; grouped: DeepSeek-AI, 2024).

    Args:
        router_logits: [num_tokens, num_experts], floating point.
        correction_bias: [num_experts] float32 or None.  It is added to the scores for the choice,
            but not for the weights; a group counts by the sum of its two best (DeepSeek-V3, section
            2.1.2).  Without it a group counts by its best.
        top_k, scoring, renormalize, num_groups, topk_groups, scaling: as of ``Routing``.

    Returns:
        (topk_weights, topk_ids), [num_tokens, top_k] float32 and int32, the best first; of equal
        ones the lower id first.  NaN counts as more than any number.  Without a bias, logits are
        compared, whose order is that of the scores.

    Raises:
        ValueError: shapes or attributes are not these.
    """
    how = Routing(top_k, scoring, renormalize, num_groups, topk_groups, scaling)
    check(router_logits, correction_bias, how)
    logits = router_logits.float()
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    choice = logits if correction_bias is None else scores + correction_bias
    if num_groups > 1:
        grouped = choice.unflatten(1, (num_groups, -1))
        two = correction_bias is not None
        best = grouped.topk(2, -1).values.sum(-1) if two else grouped.amax(-1)
        chosen = best.sort(dim=-1, descending=True, stable=True).indices[:, :topk_groups]
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, chosen, True)
        choice = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
    return (weights * scaling).contiguous(), ids.to(torch.int32).contiguous()


def check(logits: Any, bias: Any, how: Routing) -> None:
    """Raises ValueError: shapes, dtypes or attributes do not fit; names what was expected."""
    if len(logits.shape) != 2 or not logits.dtype.is_floating_point:
        raise ValueError(
            f"router_logits are {logits.dtype} {list(logits.shape)}, expected floating-point "
            "[num_tokens, num_experts]"
        )
    num_experts = logits.shape[1]
    if bias is not None and (tuple(bias.shape) != (num_experts,) or bias.dtype != torch.float32):
        raise ValueError(
            f"correction_bias is {bias.dtype} {list(bias.shape)}, expected torch.float32 "
            f"[{num_experts}]"
        )
    if reason := how.why_not(num_experts):
        raise ValueError(f"route: {reason}")


def routing(args: tuple[Any, ...]) -> Routing:
    """The attributes of a call, with defaults filled in."""
    return Routing(*args[2:])


def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    logits, how = args[0], routing(args)
    check(logits, args[1], how)
    shape = (logits.shape[0], how.top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


def _launches(*args: Any) -> Launches[tuple[Tensor, Tensor]]:
    logits, bias, how = args[0], args[1], routing(args)
    check(logits, bias, how)
    return plans.route(logits, bias, how)


def _supports(desc: OpDesc) -> str:
    return plans.too_many(desc["router_logits"].shape[1])


@drawn
def _cases(draw: Draw) -> Iterator[Case]:
    dtype, rand = draw.dtype, draw.rand

    def logits(rows: int, experts: int) -> Tensor:
        return 2 * draw.randn(rows, experts)

    def biased(rows: int, experts: int) -> tuple[Tensor, Tensor]:
        """Logits and a bias with which no two sums of scores and bias are nearly equal."""
        order = rand(rows, experts).argsort(-1)
        sums = 0.3 + 0.4 * (order + 0.7 * rand(rows, experts)) / experts
        bias = 0.4 * rand(experts) - 0.2
        return torch.logit(sums - bias).to(dtype), bias

    yield Case("one token of 8 experts", (logits(1, 8).to(dtype), None, 2))
    yield Case("128 experts, top 8", (logits(5, 128).to(dtype), None, 8))
    yield Case("not renormalized, 60", (logits(7, 60).to(dtype), None, 4, "softmax", False))
    yield Case("sigmoid, scaled", (logits(3, 16).to(dtype), None, 3, "sigmoid", True, 1, 1, 2.5))
    grouped = (6, "softmax", False, 8, 3, 16.0)
    yield Case("groups by their best, 40", (logits(4, 40).to(dtype), None, *grouped))
    yield Case("groups by their two best", (*biased(6, 64), 8, "sigmoid", True, 8, 4, 2.5))
    yield Case("bias alone", (*biased(3, 24), 5, "softmax", True))
    yield Case("equal logits", ((logits(4, 32) / 2).round().to(dtype), None, 6))
    yield Case("all experts", (logits(2, 4).to(dtype), None, 4))
    wide = logits(3, 96).to(dtype)
    yield Case("slice of [3, 96]", (wide[:, 16:80], None, 2))
    yield Case("no tokens", (logits(0, 8).to(dtype), None, 2))


def _cost(desc: OpDesc) -> Cost:
    logits, bias, top_k = desc["router_logits"], desc["correction_bias"], desc["top_k"]
    written = logits.shape[0] * top_k * 8
    read = logits.nbytes + (0 if bias is None else bias.nbytes)
    return Cost(bytes=read + written, flops=4 * logits.numel)


OP = SemanticOp(
    reference=route,
    fake=_fake,
    cases=_cases,
    cost=_cost,
    implementations=(
        triton(_launches, _supports),
        Implementation("native", route, inline=True),
    ),
    tolerances=dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), Tolerance(1e-5, 1e-5)),
)
