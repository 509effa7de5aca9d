"""Verification catches graphs that passes broke and rewrites that change values."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fusewright import ops
from fusewright.passes import PassReport, VerificationError, random_value, run_passes
from fusewright.passes.fuse_add_norm import FUSE_ADD_NORM
from fusewright.passes.rule import EXACT, Context, Tier, is_call
from fusewright.passes.subgraph import equal_sizes
from tests.passes.graphs import capture, hidden


def model(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    residual = residual + x
    return ops.rms_norm(residual, weight, 1e-5), residual


class WrongRule:
    """Replaces add + norm by what ``build(graph, x, residual, weight, eps)`` makes."""

    name = "wrong"

    def __init__(self, build: Callable[..., list[fx.Node]], tier: Tier = EXACT) -> None:
        self.build, self.tier = build, tier

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        (norm,) = (n for n in gm.graph.nodes if is_call(n, torch.ops.fw.rms_norm.default))
        add = norm.args[0]
        context.replace(
            self,
            norm,
            old=[add, norm],
            outputs=[norm, add],
            build=lambda graph: self.build(graph, *reversed(add.args), *norm.args[1:3]),
        )
        return PassReport(self.name)


def fused(graph: fx.Graph, x: Any, residual: Any, weight: Any, eps: float) -> list[fx.Node]:
    node = graph.call_function(torch.ops.fw.add_rms_norm.default, (x, residual, weight, eps))
    return [graph.call_function(operator.getitem, (node, i)) for i in (0, 1)]


def _wrong_eps(graph: fx.Graph, *args: Any) -> list[fx.Node]:
    return fused(graph, *args[:3], 1e-1)


def _dropped_residual(graph: fx.Graph, x: Any, residual: Any, *rest: Any) -> list[fx.Node]:
    return fused(graph, x, x, *rest)


def _swapped_outputs(graph: fx.Graph, *args: Any) -> list[fx.Node]:
    return fused(graph, *args)[::-1]


def _norm_of_x_alone(graph: fx.Graph, x: Any, residual: Any, *rest: Any) -> list[fx.Node]:
    normed = graph.call_function(torch.ops.fw.rms_norm.default, (x, *rest))
    return [normed, graph.call_function(operator.add, (residual, x))]


def _subtracted(graph: fx.Graph, x: Any, residual: Any, *rest: Any) -> list[fx.Node]:
    return fused(graph, graph.call_function(operator.neg, (x,)), residual, *rest)


WRONG = [_wrong_eps, _dropped_residual, _swapped_outputs, _norm_of_x_alone, _subtracted]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", WRONG)
def test_wrong_rewrites_are_caught(build: Any, dtype: torch.dtype) -> None:
    weight = torch.randn(32).to(dtype)
    gm = capture(model, x=hidden(dtype=dtype), residual=hidden(dtype=dtype), weight=weight)
    with pytest.raises(VerificationError, match=r"rewrite wrong at .* inputs from seed"):
        run_passes(gm, [WrongRule(build, Tier(1e-3, 1e-2))], verify=True)


def test_the_right_rewrite_passes_the_same_check() -> None:
    gm = capture(model, x=hidden(), residual=hidden(), weight=torch.randn(32))
    run_passes(gm, [WrongRule(fused)], verify=True)


def test_an_exact_rule_may_not_move_a_bit() -> None:
    def rounded_later(graph: fx.Graph, x: Any, residual: Any, *rest: Any) -> list[fx.Node]:
        wide = graph.call_method("float", (graph.call_function(operator.add, (x, residual)),))
        nudged = graph.call_function(operator.mul, (wide, 1.0 + 2**-20))
        return fused(graph, graph.call_method("to", (nudged, torch.float32)), residual, *rest)

    gm = capture(model, x=hidden(), residual=hidden(), weight=torch.randn(32))
    with pytest.raises(VerificationError, match=r"atol=0\.0, rtol=0\.0"):
        run_passes(gm, [WrongRule(rounded_later)], verify=True)


class Breaks:
    """A pass that replaces the calls of ``target`` by ``call`` of their arguments at ``places``."""

    name, tier = "breaks", EXACT

    def __init__(self, target: Any, call: Any, places: tuple[int, int]) -> None:
        self.target, self.call, self.places = target, call, places

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        for node in gm.graph.nodes:
            if is_call(node, self.target):
                node.args = tuple(node.args[place] for place in self.places)
                node.target = self.call
        return PassReport(self.name)


def test_a_changed_shape_or_dtype_is_caught_by_the_graph_check() -> None:
    gm = capture(lambda x: x + x, x=hidden())
    with pytest.raises(VerificationError, match=r"pass breaks changed .*float32.*bool"):
        run_passes(gm, [Breaks(operator.add, operator.eq, (0, 1))], verify=True)


def columns_first(a: Tensor, b: Tensor) -> Tensor:
    return (a + b).t().contiguous().t()


def test_changed_strides_are_caught_by_the_graph_check() -> None:
    gm = capture(lambda x: x + x, x=hidden())
    with pytest.raises(VerificationError, match=r"pass breaks changed .*\['32', '1'\].* became "):
        run_passes(gm, [Breaks(operator.add, columns_first, (0, 1))], verify=True)


def test_an_op_that_does_not_run_is_caught() -> None:
    gm = capture(lambda x, w: x @ w, x=hidden(), w=torch.randn(1, 32)[0])
    with pytest.raises(VerificationError, match="which does not run"):
        run_passes(gm, [Breaks(operator.matmul, operator.matmul, (0, 0))], verify=True)


def test_identical_sites_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusewright.passes import pipeline

    runs: list[set[tuple[str, str]]] = []
    real = pipeline.check_rewrite

    def counted(rewrite: Any, *, proven: set[tuple[str, str]]) -> None:
        before = len(proven)
        real(rewrite, proven=proven)
        runs.append(proven if len(proven) > before else set())

    def deep(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        for _ in range(6):
            x, residual = model(x, residual, weight)
        return x

    monkeypatch.setattr(pipeline, "check_rewrite", counted)
    gm = capture(deep, x=hidden(), residual=hidden(), weight=torch.randn(32))
    (report,) = run_passes(gm, [FUSE_ADD_NORM], verify=True)
    assert report.matched == 6 and len(runs) == 6
    assert sum(bool(r) for r in runs) == 1


def test_errors_of_each_distinct_rewrite_are_kept() -> None:
    def rounded(graph: fx.Graph, *args: Any) -> list[fx.Node]:
        normed, total = fused(graph, *args)
        return [graph.call_function(operator.mul, (normed, 1 + 2**-8)), total]

    tier = Tier(1e-3, 1e-2)
    gm = capture(model, x=hidden(), residual=hidden(), weight=torch.randn(32))
    (report,) = run_passes(gm, [WrongRule(rounded, tier)], verify=True)
    (check,) = report.checks
    assert check.max_rel == pytest.approx(2**-8, rel=1e-3) and 0 < check.max_abs < 2
    assert (check.atol, check.rtol, check.site) == (1e-3, 1e-2, "rms_norm_default")
    assert PassReport.from_json(report.to_json()) == report
    again = capture(model, x=hidden(), residual=hidden(), weight=torch.randn(32))
    (report,) = run_passes(again, [WrongRule(fused)], verify=False)
    assert report.checks == []


def test_a_weight_too_large_for_one_draw_is_filled_in_parts() -> None:
    weight = torch.empty(4100, 4096, dtype=torch.bfloat16, device="meta")
    made = random_value(torch.empty_like(weight, device="cpu"), seed=1)
    assert made.shape == weight.shape and made.dtype == torch.bfloat16
    parts = made.view(-1).float().split(1 << 24)
    assert len(parts) == 2
    for part in parts:
        assert part.abs().max() > 50 and 4 < part.std() < 6
    assert torch.equal(made, random_value(torch.empty_like(weight, device="cpu"), seed=1))


def test_sizes_are_compared_as_expressions() -> None:
    """AOTAutograd drops slices that take all, behind which a size is a minimum."""
    env = ShapeEnv()
    tokens = env.create_symbol(9, ConstantSource("tokens"))
    size = env.create_symintnode(tokens, hint=9)
    least = env.create_symintnode(sympy.Min(tokens, tokens + 3, evaluate=False), hint=9)
    assert str(size) != str(least)
    assert equal_sizes(size, least) and equal_sizes(7, 7)
    assert not equal_sizes(size, size + 1) and not equal_sizes(size, 9)
    assert not env.guards
