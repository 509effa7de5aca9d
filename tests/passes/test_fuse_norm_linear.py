"""The add and the norm between two linear layers join them where nothing else reads the parts."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright import ops
from fusewright.passes import build_passes, run_passes
from tests.passes.graphs import capture, hidden, targets

SIZE = 32
Model = Callable[[Tensor, Tensor, Tensor, Tensor], Any]
PASSES = ["fuse_add_norm", "fuse_gated_linear", "fuse_norm_linear"]


def plain(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = r + ops.linear(x, w, None)
    return ops.linear(ops.rms_norm(total, nw, 1e-5), w, nw), total * 2


def swapped_sum(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = ops.linear(x, w, None) + r
    return ops.linear(ops.rms_norm(total, nw, 1e-5), w, None), total


def gated(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    normed = ops.rms_norm(r + ops.linear(x, w, None), nw, 1e-6)
    return ops.gelu_tanh_mul(ops.linear(normed, w, None))


def chain(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    for _ in range(3):
        r = r + ops.linear(x, w, None)
        x = ops.linear(ops.rms_norm(r, nw, 1e-5), w, None)
    return x, r


def first_bias(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    return ops.linear(ops.rms_norm(r + ops.linear(x, w, nw), nw, 1e-5), w, None)


def offset(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    return ops.linear(ops.rms_norm(r + ops.linear(x, w, None), nw, 1e-5, 1.0), w, None)


def doubled(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    y = ops.linear(x, w, None)
    return ops.linear(ops.rms_norm(y + y, nw, 1e-5), w, None), r * 2


def no_linear(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    return ops.linear(ops.rms_norm(r + x * 2, nw, 1e-5), w, None)


def linear_read(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    y = ops.linear(x, w, None)
    return ops.linear(ops.rms_norm(r + y, nw, 1e-5), w, None), y.sum()


def normed_read(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    y = ops.rms_norm(r + ops.linear(x, w, None), nw, 1e-5)
    return ops.linear(y, w, None), y * 2


def early_sum(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = r + ops.linear(x, w, None)
    y, half = ops.rms_norm(total, nw, 1e-5), total / 2
    return ops.linear(y, w, None) + half


def write_between(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = r + ops.linear(x, w, None)
    y = ops.rms_norm(total, nw, 1e-5)
    x.mul_(2)
    return ops.linear(y, w, None)


def fp8_static(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = r + ops.linear(x, w, None)
    scale = nw[:1].float().view(1, 1)
    q = ops.quant_fp8_static(ops.rms_norm(total, nw, 1e-5), scale)
    return ops.linear(q, w.to(torch.float8_e4m3fn), None, scale, scale, torch.float32), total


def inputs() -> dict[str, Tensor]:
    """The weight flat: of two dimensions its first would be captured as dynamic."""
    return {
        "x": hidden(dtype=torch.bfloat16, size=SIZE),
        "r": hidden(dtype=torch.bfloat16, size=SIZE),
        "w": torch.randn(SIZE * SIZE).bfloat16() / 6,
        "nw": torch.randn(SIZE).bfloat16(),
    }


def fused(model: Model) -> tuple[Any, Any, dict[str, Tensor]]:
    def shaped(**given: Tensor) -> Any:
        return model(**given | {"w": given["w"].view(SIZE, SIZE)})

    given = inputs()
    gm = capture(shaped, **given)
    *_, report = run_passes(gm, build_passes(PASSES), verify=True)
    return gm, report, given


@pytest.mark.parametrize(
    ("model", "sites"), [(plain, 1), (swapped_sum, 1), (gated, 1), (first_bias, 1), (chain, 3)]
)
def test_they_become_one_op_and_no_bit_changes(model: Model, sites: int) -> None:
    gm, report, given = fused(model)
    assert report.matched == sites and not report.missed
    called = [t for t in targets(gm) if t.endswith(".default")]
    assert called.count("linear_add_norm_linear.default") == sites
    assert "add_rms_norm.default" not in called
    values: list[Any] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        index = re.fullmatch(r"l_args_(\d+)_", node.name.lower())
        fake = node.meta["example_value"]
        values.append([*given.values()][int(index[1])] if index else fake.node.hint)
    want = model(**given | {"w": given["w"].view(SIZE, SIZE)})
    for got, expected in zip(gm(*values), want if isinstance(want, tuple) else [want], strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (offset, "weight has an offset"),
        (doubled, "is added to itself"),
        (no_linear, "not from a linear layer"),
        (linear_read, "is also read by"),
        (normed_read, "is also read by"),
        (early_sum, "the sum is used before"),
        (write_between, "writes to memory between"),
        (fp8_static, "the layer is FP8: the fused op takes what is normed as it is"),
    ],
)
def test_a_miss_says_why(model: Model, reason: str) -> None:
    _, report, _ = fused(model)
    (site,) = report.missed
    assert reason in site.reason


def test_views_of_a_result_are_known_as_views_of_it() -> None:
    """Else a piece with such a view would go to a compiler."""

    def model(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
        total = r + ops.linear(x, w, None)
        q, k = ops.linear(ops.rms_norm(total, nw, 1e-5), w, None).split([24, 8], dim=-1)
        return q * 2, k * 3, total * 2

    gm, _, _ = fused(model)
    (split,) = (node for node in gm.graph.nodes if node.target == "split")
    source = split.args[0].meta["example_value"].untyped_storage()
    assert split.args[0].target is operator.getitem
    for part in split.meta["example_value"]:
        assert part.untyped_storage()._cdata == source._cdata
