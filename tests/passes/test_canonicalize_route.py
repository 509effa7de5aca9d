"""Routers as ``transformers`` spells them become ``route``; others stay, with their reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright import ops
from fusewright.passes import build_passes, run_passes
from fusewright.passes.raising.canonicalize_linear import CANONICALIZE_LINEAR
from fusewright.passes.raising.canonicalize_route import CANONICALIZE_ROUTE, SHARE_EXPERTS
from tests.passes.graphs import dispatched, targets

HIDDEN, INNER, EXPERTS, TOP_K, GROUPS, INSIDE = 24, 16, 16, 3, 4, 4
Route = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits, bias) -> (weights, ids)."""


def softmax_first(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = logits.softmax(-1, dtype=torch.float).topk(TOP_K, dim=-1)
    return weights.to(logits.dtype), ids


def renormalized_in_place(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = logits.float().softmax(1).topk(TOP_K)
    weights /= weights.sum(dim=-1, keepdim=True)
    return weights, ids


def softmax_of_chosen(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    best, ids = logits.topk(TOP_K, dim=-1)
    return best.softmax(-1), ids


def sigmoid_of_one(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    best, ids = logits.topk(1, dim=-1)
    return best.sigmoid(), ids


def sigmoid_first(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = logits.sigmoid().topk(TOP_K, dim=-1)
    return weights / weights.sum(-1, keepdim=True), ids


def biased_softmax(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1)
    _, ids = (scores + bias).topk(TOP_K, dim=-1)
    weights = scores.gather(-1, ids)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-12), ids


def biased_sigmoid(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.float().sigmoid()
    ids = (scores + bias).topk(TOP_K, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, ids


def masked(choice: Tensor, worth: Tensor, fill: float) -> Tensor:
    best = worth.topk(2, dim=-1, sorted=False)[1]
    kept = torch.zeros_like(worth).scatter_(1, best, 1)
    spread = kept.unsqueeze(-1).expand(-1, GROUPS, INSIDE).reshape(-1, EXPERTS)
    return choice.masked_fill(~spread.bool(), fill)


def groups_by_best(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1)
    worth = scores.view(-1, GROUPS, INSIDE).max(dim=-1).values
    weights, ids = masked(scores, worth, 0.0).topk(TOP_K, dim=-1, sorted=False)
    return weights * 16.0, ids


def groups_by_two(logits: Tensor, bias: Tensor, fill: float = -torch.inf) -> Any:
    scores = logits.sigmoid()
    choice = scores + bias
    worth = choice.view(-1, GROUPS, INSIDE).topk(2, dim=-1)[0].sum(dim=-1)
    ids = masked(choice, worth, fill).topk(TOP_K, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    weights /= weights.sum(-1, keepdim=True) + 1e-20
    return weights * 2.5, ids


def biased_logits(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    ids = (logits + bias).topk(TOP_K, dim=-1)[1]
    return logits.gather(1, ids).sigmoid(), ids


def bounded(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = logits.softmax(-1).topk(TOP_K)
    return weights / weights.sum(-1, keepdim=True).clamp(min=0.5), ids


def raw(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return logits.topk(TOP_K)


def others_sum(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1)
    weights, ids = scores.topk(TOP_K)
    return weights / scores.sum(-1, keepdim=True), ids


def zeros_beside_a_bias(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return groups_by_two(logits, bias, 0.0)  # type: ignore[no-any-return]


def smallest(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    return logits.softmax(-1).topk(TOP_K, largest=False)


def experts(x: Tensor, logits: Tensor, bias: Tensor, flat: Tensor, route: Route) -> Tensor:
    weights, ids = route(logits, bias)
    ids = ids.to(torch.int32)
    gate_up, down = flat.split([2 * INNER, INNER], dim=1)
    gate, up = ops.expert_linear(x, gate_up, ids).chunk(2, dim=-1)
    inner = F.silu(gate) * up
    return ops.combine_experts(ops.expert_linear(inner, down.transpose(1, 2), ids), weights.float())


def captured(
    behind: Callable[[Tensor, Tensor], Tensor],
    route: Route = softmax_first,
    routed: Callable[[Tensor, Tensor], Tensor] = ops.linear,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """A model of experts; ``behind`` takes x and their sum."""

    def model(x: Tensor, router: Tensor, bias: Tensor, flat: Tensor) -> Tensor:
        return behind(x, experts(x, routed(x, router), bias, flat, route))

    given = {
        "x": torch.randn(7, HIDDEN).to(dtype),
        "router": torch.randn(EXPERTS, HIDDEN).to(dtype),
        "bias": torch.randn(EXPERTS),
        "flat": torch.randn(EXPERTS, 3 * INNER, HIDDEN).to(dtype),
    }
    gm = dispatched(model, "router", "bias", "flat", **given)
    gm.graph.eliminate_dead_code()  # as ``Cleanup`` does ahead of the pass
    return gm


def alone(x: Tensor, total: Tensor) -> Tensor:
    return total


def attributes(gm: Any) -> list[tuple[Any, ...]]:
    routes = gm.graph.find_nodes(op="call_function", target=torch.ops.fw.route.default)
    return [(node.args[1] is not None, *node.args[2:]) for node in routes]


@pytest.mark.parametrize(
    ("route", "how"),
    [
        (softmax_first, (False, 3, "softmax", False, 1, 1, 1.0)),
        (renormalized_in_place, (False, 3, "softmax", True, 1, 1, 1.0)),
        (softmax_of_chosen, (False, 3, "softmax", True, 1, 1, 1.0)),
        (sigmoid_of_one, (False, 1, "sigmoid", False, 1, 1, 1.0)),
        (sigmoid_first, (False, 3, "sigmoid", True, 1, 1, 1.0)),
        (biased_softmax, (True, 3, "softmax", True, 1, 1, 1.0)),
        (biased_sigmoid, (True, 3, "sigmoid", True, 1, 1, 2.5)),
        (groups_by_best, (False, 3, "softmax", False, 4, 2, 16.0)),
        (groups_by_two, (True, 3, "sigmoid", True, 4, 2, 2.5)),
    ],
)
def test_spellings_of_routers_become_the_op(route: Route, how: tuple[Any, ...]) -> None:
    gm = captured(alone, route)
    (report,) = run_passes(gm, [CANONICALIZE_ROUTE], verify=True)
    assert (report.matched, report.missed) == (1, [])
    assert attributes(gm) == [how]
    assert not {"topk.default", "gather.default", "scatter.value"} & {*targets(gm)}


@pytest.mark.parametrize(
    ("route", "reason"),
    [
        (biased_logits, "the bias is added to logits, the op's to the sigmoid"),
        (bounded, "clamp bounds the sum of the weights by 0.5"),
        (raw, "the weights are logits, not scores"),
        (others_sum, "the weights are divided by sum, not by their sum"),
        (zeros_beside_a_bias, "experts outside of the best groups count 0.0"),
        (smallest, "does not take the largest of each token's"),
    ],
)
def test_a_router_that_chooses_otherwise_is_left_with_its_reason(route: Route, reason: str) -> None:
    gm = captured(alone, route)
    (report,) = run_passes(gm, [CANONICALIZE_ROUTE], verify=True)
    assert [reason in site.reason for site in report.missed] == [True], report.missed
    assert report.matched == 0 and not attributes(gm)


def test_scores_that_are_rounded_before_the_choice_are_no_router() -> None:
    gm = captured(alone, lambda logits, bias: logits.sigmoid().topk(TOP_K), dtype=torch.bfloat16)
    (report,) = run_passes(gm, [CANONICALIZE_ROUTE])
    assert "scores in torch.bfloat16, which tie by rounding" in report.missed[0].reason


def test_a_number_that_scales_the_sum_scales_the_weights() -> None:
    gm = captured(lambda x, total: total * 0.25, biased_sigmoid)
    (report,) = run_passes(gm, [CANONICALIZE_ROUTE], verify=True)
    assert report.matched == 1
    assert attributes(gm)[0][-1] == 2.5 * 0.25
    assert "mul" not in targets(gm)[-2:]


def test_a_router_in_float32_beside_experts_in_16_bits_is_fused() -> None:
    """Its logits are not rounded, as in the model's code."""
    gm = captured(
        alone,
        groups_by_two,
        lambda x, router: F.linear(x.float(), router.float()),
        torch.bfloat16,
    )
    raised = [CANONICALIZE_LINEAR, CANONICALIZE_ROUTE]
    fused = build_passes(["fuse_act", "fuse_gated_linear", "fuse_moe"])
    reports = run_passes(gm, [*raised, *fused], verify=True)
    assert [report.matched for report in reports] == [1, 1, 1, 1, 1]
    (call,) = gm.graph.find_nodes(op="call_function", target=torch.ops.fw.fused_moe.default)
    assert call.args[1].op == "placeholder" and call.args[-1] is True


@pytest.mark.parametrize(
    ("behind", "taken"),
    [
        (lambda x, total: total + ops.linear(x, x.new_ones(HIDDEN, HIDDEN)), 1),
        (
            lambda x, total: (
                torch.sigmoid(x[:, :1]) * ops.linear(x, x.new_ones(HIDDEN, HIDDEN)) + total
            ),
            2,
        ),
        (lambda x, total: x + total, 0),
    ],
)
def test_a_shared_expert_joins_the_sum_and_a_residual_does_not(
    behind: Callable[[Tensor, Tensor], Tensor], taken: int
) -> None:
    gm = captured(behind)
    _, report = run_passes(gm, [CANONICALIZE_ROUTE, SHARE_EXPERTS], verify=True)
    assert (report.matched, report.missed) == (min(taken, 1), [])
    (call,) = gm.graph.find_nodes(op="call_function", target=torch.ops.fw.combine_experts.default)
    assert len(call.args) == 2 + taken
