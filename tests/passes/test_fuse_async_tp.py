"""Linear layers on both sides of a sum over ranks join it where nothing else reads the parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright import ops
from fusewright.passes import build_passes, run_passes
from tests.passes.graphs import capture, hidden, targets
from tests.passes.models import GROUP, SIZE, reduced_between_linears

RULES = [
    *("fuse_add_norm", "fuse_gated_linear", "fuse_norm_linear", "fuse_norm_quant"),
    *("fuse_all_reduce_norm", "fuse_async_tp"),
]
FUSED = "linear_all_reduce_add_norm_linear.default"


def gated(x: Tensor, r: Tensor, w: Tensor, wn: Tensor, w2: Tensor) -> Any:
    w = w.view(SIZE, SIZE)
    total = ops.all_reduce(ops.linear(x, w, wn), GROUP) + r
    normed = ops.rms_norm(total, wn, 1e-6)
    return ops.silu_mul(ops.linear(normed, w, None)), total


def other_source(x: Tensor, r: Tensor, w: Tensor, wn: Tensor, w2: Tensor) -> Any:
    total = r + ops.all_reduce(x * 2, GROUP)
    return ops.linear(ops.rms_norm(total, wn, 1e-5), w.view(SIZE, SIZE), None), w2


def offset(x: Tensor, r: Tensor, w: Tensor, wn: Tensor, w2: Tensor) -> Any:
    w = w.view(SIZE, SIZE)
    total = r + ops.all_reduce(ops.linear(x, w, None), GROUP)
    return ops.linear(ops.rms_norm(total, wn, 1e-5, 1.0), w, None), w2


def read_twice(x: Tensor, r: Tensor, w: Tensor, wn: Tensor, w2: Tensor) -> Any:
    w = w.view(SIZE, SIZE)
    total = r + ops.all_reduce(ops.linear(x, w, None), GROUP)
    normed = ops.rms_norm(total, wn, 1e-5)
    return ops.linear(normed, w, None), normed * 2, w2


def residual_of_a_layer(x: Tensor, r: Tensor, w: Tensor, wn: Tensor, w2: Tensor) -> Any:
    """The residual comes from a linear layer, what is summed does not."""
    w = w.view(SIZE, SIZE)
    total = ops.linear(r, w, None) + ops.all_reduce(x, GROUP)
    return ops.linear(ops.rms_norm(total, wn, 1e-5), w, None), w2


def fp8(x: Tensor, r: Tensor, w: Tensor, wn: Tensor, w2: Tensor) -> Any:
    weight = w.view(SIZE, SIZE)
    total = r + ops.all_reduce(ops.linear(x, weight, None), GROUP)
    q, scale = ops.quant_fp8_dynamic(ops.rms_norm(total, wn, 1e-5), 0)
    of_rows = weight[:, :1].abs().float() + 0.5
    weight = weight.to(torch.float8_e4m3fn)
    return ops.linear(q, weight, None, scale, of_rows, torch.bfloat16), total


def inputs() -> dict[str, Tensor]:
    """The weight flat: of two dimensions its first would be captured as dynamic."""
    return {
        "x": hidden(dtype=torch.bfloat16, size=SIZE),
        "r": hidden(dtype=torch.bfloat16, size=SIZE),
        "w": torch.randn(SIZE * SIZE).bfloat16() / SIZE**0.5,
        "wn": torch.randn(SIZE).bfloat16(),
        "w2": torch.randn(SIZE).bfloat16(),
    }


@pytest.mark.parametrize("model", [reduced_between_linears, gated])
def test_they_become_one_op(model: Any) -> None:
    """Verified: both sides have the same bits on two ranks of each group."""
    gm = capture(model, **inputs())
    *_, report = run_passes(gm, build_passes(RULES), verify=True)
    assert report.matched == 1 and not report.missed
    found = targets(gm)
    assert FUSED in found and "all_reduce_add_rms_norm.default" not in found
    (call,) = (node for node in gm.graph.nodes if str(node.target).endswith(FUSED))
    assert call.args[-2:] == ("silu" if model is gated else None, GROUP)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (other_source, "comes from mul, not from a linear layer"),
        (residual_of_a_layer, "not from a linear layer"),
        (offset, "the norm's weight has an offset"),
        (read_twice, "is also read by mul"),
        (fp8, "the layer is FP8"),
    ],
)
def test_what_is_left_alone_says_why(model: Any, reason: str) -> None:
    gm = capture(model, **inputs())
    *_, report = run_passes(gm, build_passes(RULES))
    assert report.matched == 0 and FUSED not in targets(gm)
    (site,) = report.missed
    assert reason in site.reason
