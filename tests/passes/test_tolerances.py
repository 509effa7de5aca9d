"""Checks refuse what is a little beyond the tolerance that a pass or an op states, and no less."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.ops import BY_NAME
from fusewright.ops.conformance import ConformanceError, compare
from fusewright.ops.core.desc import Tolerance
from fusewright.ops.oracles import check_case, few_cases
from fusewright.passes import CANONICALIZE, PassReport, Rule, VerificationError, run_passes
from fusewright.passes.canonicalize import roundings
from fusewright.passes.pipeline import PIPELINE
from fusewright.passes.rule import Context, Tier, is_call
from tests.passes.graphs import capture, hidden

FEW = (0.9, 1.5)
"""Parts of a tolerance: the first is accepted, the second refused."""


class Moves:
    """A pass that declares ``tier`` and replaces ``x * 2`` by what ``moved`` makes of it."""

    name = "moves"

    def __init__(self, tier: Tier, moved: Any) -> None:
        self.tier, self.moved = tier, moved

    def __call__(self, gm: Any, context: Context) -> PassReport:
        (product,) = (node for node in gm.graph.nodes if is_call(node, torch.mul))

        def build(graph: Any) -> list[Any]:
            doubled = graph.call_function(torch.mul, product.args)
            return [graph.call_function(self.moved, (doubled,))]

        context.replace(self, product, [product], [product], build)
        return PassReport(self.name)


def accepts(tier: Tier, moved: Any, dtype: torch.dtype = torch.float32) -> bool:
    gm = capture(lambda x: torch.mul(x, 2), x=hidden(dtype=dtype))
    try:
        run_passes(gm, [Moves(tier, moved)], verify=True)
    except VerificationError as error:
        assert "rewrite moves at mul" in str(error)
        return False
    return True


def of_row(part: float) -> Any:
    def moved(y: Tensor) -> Tensor:
        return y + part * y.abs().amax(-1, keepdim=True)

    return moved


@pytest.mark.parametrize("bound", [1e-3, 2.0**-12])
def test_a_rewrite_may_move_results_by_its_tier_and_no_more(bound: float) -> None:
    for part in FEW:
        right = part < 1
        step = part * bound
        assert accepts(Tier(0.0, bound), lambda y, s=step: y * (1 + s)) is right
        assert accepts(Tier(bound, 0.0), lambda y, s=step: y + s) is right
        assert accepts(Tier(0.0, 0.0, bound), of_row(step)) is right
    assert not accepts(Tier(0.0, 0.0), lambda y: y * (1 + 2.0**-23))


@pytest.mark.parametrize("tier", [Tier(1.0, 1.0), Tier(1.0, 0.0), Tier(0.0, 1.0)])
def test_doubles_may_be_moved_by_few_of_their_bits_by_any_tier(tier: Tier) -> None:
    scale = max(tier.rtol * 2.0**-40, 2.0**-52)
    if tier.rtol:
        assert accepts(tier, lambda y: y * (1 + scale / 2), torch.float64)
    assert not accepts(tier, lambda y: y * (1 + 2.0**-37), torch.float64)
    assert not accepts(tier, lambda y: y + 2.0**-37, torch.float64)


TIERS = {
    "cleanup": Tier(0.0, 0.0),
    "fuse_add_norm": Tier(0.0, 0.0),
    "fuse_act": Tier(1e-6, 2.0**-6),
    "fuse_gated_linear": Tier(0.0, 0.0),
    "fuse_moe": Tier(0.0, 0.0),
    "fuse_norm_quant": Tier(0.0, 0.0),
    "fuse_all_reduce_norm": Tier(0.0, 0.0),
    "fuse_act_quant": Tier(0.0, 0.0),
    "fuse_chain": Tier(0.0, 0.0),
    "fuse_attn_quant": Tier(2.0**-9, 2.0**-3),
    "fuse_rope_store": Tier(0.0, 0.0),
    "canonicalize_norm": Tier(1e-6, 2.0**-6),
    "canonicalize_rope": Tier(0.0, 0.0, 2.0**-6),
}


def test_no_pass_may_move_more_than_this() -> None:
    """A pass that widens its tier says so here too."""
    rules: tuple[Rule, ...] = (*PIPELINE, *CANONICALIZE)
    assert {rule.name: rule.tier for rule in rules} == TIERS


def test_an_implementation_may_differ_by_its_tolerance_and_no_more() -> None:
    want = torch.tensor([0.0, 2.0, -100.0])
    for part in FEW:
        near = [
            (want + part * 0.1, Tolerance(0.1, 0.0)),
            (want * (1 + part * 0.1), Tolerance(0.0, 0.1)),
            (want * (1 + part * 0.1) + part * 0.1, Tolerance(0.1, 0.1)),
        ]
        for got, tolerance in near:
            if part < 1:
                compare(got, want, tolerance, "here")
                continue
            with pytest.raises(ConformanceError, match=r"here differs in [123] of 3 elements"):
                compare(got, want, tolerance, "here")


@pytest.mark.parametrize("name", ["rms_norm", "silu_mul", "linear", "paged_attention", "route"])
def test_a_reference_may_differ_from_its_oracle_by_its_tolerance_and_no_more(name: str) -> None:
    op = BY_NAME[name]
    dtype = op.dtypes[0]
    case = next(iter(few_cases(op, dtype, 5)))
    bound = op.tolerance(case, dtype)

    def moved(*args: Any) -> Any:
        results = op.reference(*args)
        first = (
            results if isinstance(results, Tensor) else args[5] if results is None else results[0]
        )
        first += 2.5 * (bound.atol + bound.rtol * first.abs())
        return results

    check_case(op, case, dtype)
    with pytest.raises(ConformanceError, match="from its oracle"):
        check_case(op, case, dtype, moved)


def test_a_rounding_moves_a_value_by_half_a_step() -> None:
    for dtype, least in ((torch.float16, 2.0**-11), (torch.bfloat16, 1e-6)):
        step = torch.finfo(dtype).eps / 2
        assert roundings(dtype, 1) == Tier(least, step)
        assert roundings(dtype, 4) == Tier(least, 4 * step)
    assert roundings(torch.float32, 4) == Tier(1e-6, 2.0**-18)
