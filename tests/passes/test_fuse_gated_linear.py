"""A product and the gated activation of its result become one op where nothing else reads it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusewright import ops
from fusewright.passes import build_passes, run_passes
from tests.passes.graphs import capture, hidden, targets

Model = Callable[[Tensor, Tensor], Tensor]


def silu(x: Tensor, weight: Tensor) -> Tensor:
    return ops.silu_mul(ops.linear(x, weight, None))


def gelu(x: Tensor, weight: Tensor) -> Tensor:
    return ops.gelu_tanh_mul(ops.linear(x, weight, None))


def with_bias(x: Tensor, weight: Tensor) -> Tensor:
    return ops.silu_mul(ops.linear(x, weight, weight[:, 0].contiguous()))


def read_twice(x: Tensor, weight: Tensor) -> Tensor:
    y = ops.linear(x, weight, None)
    return ops.silu_mul(y) * y.sum()


def no_product(x: Tensor, weight: Tensor) -> Tensor:
    return ops.silu_mul(x * weight[0, 0])


def inputs() -> tuple[Tensor, Tensor]:
    """x, and the weight flat: of two dimensions its first would be captured as dynamic."""
    return hidden(dtype=torch.bfloat16), torch.randn(48 * 32).bfloat16()


def shaped(model: Model) -> Model:
    return lambda x, weight: model(x, weight.view(48, 32))


@pytest.mark.parametrize("model", [silu, gelu])
def test_they_become_one_op_and_no_bit_changes(model: Model) -> None:
    x, weight = inputs()
    gm = capture(shaped(model), x=x, weight=weight)
    (report,) = run_passes(gm, build_passes(["fuse_gated_linear"]), verify=True)
    assert report.matched == 1 and not report.missed
    assert [t for t in targets(gm) if t.endswith(".default")] == ["gated_linear.default"]
    sizes = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    values = iter((weight, x))  # in the order in which the model reads them
    (got,) = gm(*(s.node.hint if isinstance(s, torch.SymInt) else next(values) for s in sizes))
    assert torch.equal(got, shaped(model)(x, weight))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (with_bias, "the product has a bias"),
        (read_twice, "has 2 users, not the activation alone"),
        (no_product, "not from a linear layer"),
    ],
)
def test_a_miss_says_why(model: Model, reason: str) -> None:
    x, weight = inputs()
    gm = capture(shaped(model), x=x, weight=weight)
    (report,) = run_passes(gm, build_passes(["fuse_gated_linear"]), verify=True)
    (site,) = report.missed
    assert reason in site.reason
