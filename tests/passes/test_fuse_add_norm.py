"""The residual add and the norm after it become one op, wherever that is the same computation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusewright import ops
from fusewright.passes import build_passes, run_passes
from tests.passes.graphs import capture, hidden, targets


def block(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    residual = residual + x
    return ops.rms_norm(residual, weight, 1e-5), residual


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_and_norm_become_one_op_and_no_bit_changes(dtype: torch.dtype) -> None:
    inputs = [hidden(dtype=dtype), hidden(dtype=dtype), torch.randn(32).to(dtype)]
    gm = capture(block, x=inputs[0], residual=inputs[1], weight=inputs[2])
    (report,) = run_passes(gm, build_passes(["fuse_add_norm"]), verify=True)
    assert report.matched == 1 and not report.missed
    assert "add_rms_norm.default" in targets(gm) and "rms_norm.default" not in targets(gm)
    x, residual, weight = inputs
    for want, got in zip(block(x, residual, weight), _run(gm, inputs), strict=True):
        assert torch.equal(want, got)


def test_chained_blocks_all_fuse_and_a_norm_without_a_sum_is_no_site() -> None:
    def model(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        normed = ops.rms_norm(x, weight, 1e-5)
        normed, residual = block(normed * y, x, weight)
        return block(normed * y, residual, weight)[0]

    gm = capture(model, x=hidden(), y=hidden(), weight=torch.randn(32))
    (report,) = run_passes(gm, build_passes(["fuse_add_norm"]), verify=True)
    assert report.matched == 2 and not report.missed
    assert targets(gm).count("rms_norm.default") == 1


def _broadcast(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return ops.rms_norm(x + y[:1], weight, 1e-5)


def _mixed(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return ops.rms_norm(x + y.double().float().to(torch.float64), weight.double(), 1e-5)


def _scaled(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return ops.rms_norm(torch.add(x, y, alpha=2), weight, 1e-5)


def _early(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    total = x + y
    return ops.rms_norm(total, weight * total.sum(), 1e-5)


def _scalar(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    return ops.rms_norm(x + 1.0, weight * y[0], 1e-5)


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (_broadcast, "the add broadcasts"),
        (_mixed, "the add mixes torch.float32 and torch.float64"),
        (_scaled, "the add scales by alpha=2"),
        (_early, "the sum is used before the norm, by"),
        (_scalar, "the add is not of two tensors"),
    ],
)
def test_what_cannot_be_fused_is_left_and_explained(fn: object, reason: str) -> None:
    gm = capture(fn, x=hidden(), y=hidden(), weight=torch.randn(32))  # type: ignore[arg-type]
    before = targets(gm)
    (report,) = run_passes(gm, build_passes(["fuse_add_norm"]), verify=True)
    assert report.matched == 0
    assert report.missed[0].reason.startswith(reason)
    assert targets(gm) == before


def _run(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Call a captured graph: sizes come first where Dynamo put them."""
    values = iter(inputs)
    args = [
        inputs[0].shape[0] if isinstance(n.meta["example_value"], torch.SymInt) else next(values)
        for n in gm.graph.find_nodes(op="placeholder")
    ]
    return gm(*args)
