"""The sum over ranks folds into the norm that reads it, whatever was folded into that before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright import ops
from fusewright.config import PASSES
from fusewright.passes import build_passes, run_passes
from tests.passes.graphs import capture, hidden, targets
from tests.passes.quantizers import Quantize, per_group, per_token, static, unquantized

GROUP, SIZE, EPS = "tp", 256, 1e-5
RULES = ["cleanup", "fuse_add_norm", "fuse_norm_quant", "fuse_all_reduce_norm"]


SUFFIX = {unquantized: "", static: "_quant_static", per_token: "_quant_dynamic"}
SUFFIX[per_group] = SUFFIX[per_token]


def inputs() -> dict[str, Tensor]:
    """In the order in which the models here first read them."""
    return {
        "s": torch.rand(1) * 0.02 + 0.01,
        "x": hidden(dtype=torch.bfloat16, size=SIZE),
        "r": hidden(dtype=torch.bfloat16, size=SIZE),
        "w": torch.randn(SIZE).bfloat16(),
    }


@pytest.mark.product
@pytest.mark.parametrize("reduced", [False, True], ids=["sum kept", "all-reduced"])
@pytest.mark.parametrize("order", ["no add", "r + sum", "sum + r"])
@pytest.mark.parametrize("quantize", SUFFIX)
def test_the_product_of_rules(quantize: Quantize, order: str, reduced: bool) -> None:
    def model(s: Tensor, x: Tensor, r: Tensor, w: Tensor) -> Any:
        scale = s.view(1, 1)
        total = ops.all_reduce(x, GROUP) if reduced else x * 2
        if order != "no add":
            total = r + total if order == "r + sum" else total + r
        normed = ops.rms_norm(total, w, EPS)
        return *quantize(normed, scale), total * 3, r - 1

    gm = capture(model, **inputs())
    *_, report = run_passes(gm, build_passes(RULES), verify=True)
    expected = f"{'' if order == 'no add' else 'add_'}rms_norm{SUFFIX[quantize]}.default"
    assert report.matched == reduced and not report.missed
    assert (f"all_reduce_{expected}" if reduced else expected) in targets(gm)
    assert not {"all_reduce.default", "quant_fp8_static.default"} & set(targets(gm))


def test_results_that_nobody_reads_are_not_missed() -> None:
    def model(x: Tensor, r: Tensor, w: Tensor) -> Any:
        return ops.rms_norm(r + ops.all_reduce(x, GROUP), w, EPS)

    gm = capture(model, **{name: inputs()[name] for name in "xrw"})
    *_, report = run_passes(gm, build_passes(RULES), verify=True)
    assert report.matched == 1 and not report.missed
    assert targets(gm) == ["all_reduce_add_rms_norm.default", "getitem", "getitem"]


@pytest.mark.parametrize("adds", [False, True])
def test_an_offset_of_the_weight_is_kept(adds: bool) -> None:
    def model(x: Tensor, r: Tensor, w: Tensor) -> Any:
        total = ops.all_reduce(x, GROUP)
        return ops.rms_norm(r + total if adds else total, w, EPS, 1.0), r * 2

    gm = capture(model, **{name: inputs()[name] for name in "xrw"})
    *_, report = run_passes(gm, build_passes(RULES), verify=True)
    assert report.matched == 1
    (call,) = (n for n in gm.graph.nodes if "all_reduce" in n.name)
    assert call.args[-2:] == (1.0, GROUP)


def test_the_second_of_two_summands_stays() -> None:
    """Parallel attention and MLP, each with a sum of its own: one is left to be the residual."""

    def model(x: Tensor, r: Tensor, w: Tensor) -> Any:
        return ops.rms_norm(ops.all_reduce(x, GROUP) + ops.all_reduce(r, GROUP), w, EPS)

    gm = capture(model, **{name: inputs()[name] for name in "xrw"})
    *_, report = run_passes(gm, build_passes(RULES), verify=True)
    assert report.matched == 1
    assert [site.reason for site in report.missed] == [
        "its sum is read by all_reduce_add_rms_norm, not by a norm"
    ]


def test_several_groups_are_kept_apart() -> None:
    def model(x: Tensor, r: Tensor, w: Tensor) -> Any:
        y = ops.rms_norm(r + ops.all_reduce(x, GROUP), w, EPS)
        return ops.rms_norm(ops.all_reduce(y, "expert-parallel"), w, EPS)

    gm = capture(model, **{name: inputs()[name] for name in "xrw"})
    *_, report = run_passes(gm, build_passes(RULES), verify=True)
    assert report.matched == 2
    calls = [n for n in gm.graph.nodes if "all_reduce" in n.name]
    assert [call.args[-1] for call in calls] == [GROUP, "expert-parallel"]


def _to_a_product(x: Tensor, r: Tensor, w: Tensor) -> Any:
    return ops.all_reduce(x, GROUP) * r, w


def _unread(x: Tensor, r: Tensor, w: Tensor) -> Any:
    ops.all_reduce(x, GROUP)
    return r * w


def _sum_read_too(x: Tensor, r: Tensor, w: Tensor) -> Any:
    total = ops.all_reduce(x, GROUP)
    return ops.rms_norm(r + total, w, EPS), total


def _early(x: Tensor, r: Tensor, w: Tensor) -> Any:
    total = ops.all_reduce(x, GROUP)
    return ops.rms_norm(total, w * total.sum(), EPS)


def _written_between(x: Tensor, r: Tensor, w: Tensor) -> Any:
    total = ops.all_reduce(x, GROUP)
    x.mul_(2)
    return ops.rms_norm(total, w, EPS), r


def _to_an_add_that_stays(x: Tensor, r: Tensor, w: Tensor) -> Any:
    return ops.rms_norm(ops.all_reduce(x, GROUP) + r[:1], w, EPS)


def _through_a_view(x: Tensor, r: Tensor, w: Tensor) -> Any:
    heads = ops.all_reduce(x, GROUP).view(-1, 1, SIZE)
    return ops.rms_norm(heads, w, EPS), r


def _as_weight(x: Tensor, r: Tensor, w: Tensor) -> Any:
    return ops.rms_norm(x * r, ops.all_reduce(w, GROUP), EPS)


def _to_itself(x: Tensor, r: Tensor, w: Tensor) -> Any:
    total = ops.all_reduce(x, GROUP)
    return ops.rms_norm(total + total, w, EPS), r


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (_to_a_product, "its sum is read by mul, not by a norm"),
        (_unread, "nobody reads its sum"),
        (_sum_read_too, "the sum is also read without the residual, by output"),
        (_early, "the sum is used before the norm, by sum"),
        (_written_between, "mul_ writes to memory between total and rms_norm"),
        (_to_an_add_that_stays, "its sum is read by add, not by a norm"),
        (_through_a_view, "its sum is read by heads, not by a norm"),
        (_as_weight, "rms_norm does not normalize the sum, or adds it to itself"),
        (_to_itself, "add_rms_norm does not normalize the sum, or adds it to itself"),
    ],
)
def test_a_miss_says_why(model: Callable[..., Any], reason: str) -> None:
    gm = capture(model, **{name: inputs()[name] for name in "xrw"})
    rules = RULES[1:] if model is _unread else RULES  # cleanup would drop it
    *_, report = run_passes(gm, build_passes(rules), verify=True)
    assert [(site.matched, site.reason) for site in report.sites] == [(False, reason)]
    assert "all_reduce.default" in targets(gm)


def test_without_an_all_reduce_there_is_no_site() -> None:
    gm = capture(lambda x, w: ops.rms_norm(x, w, EPS), x=inputs()["x"], w=inputs()["w"])
    (report,) = run_passes(gm, build_passes(["fuse_all_reduce_norm"]), verify=True)
    assert not report.sites


def test_it_runs_behind_the_fusions_that_it_builds_on() -> None:
    assert PASSES.index("fuse_add_norm") < PASSES.index("fuse_norm_quant")
    assert PASSES.index("fuse_norm_quant") < PASSES.index("fuse_all_reduce_norm")
