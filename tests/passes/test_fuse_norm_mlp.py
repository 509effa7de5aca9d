"""FP8 layers between two attentions become one op where nothing else reads what they pass on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright import ops
from fusewright.passes import build_passes, run_passes
from tests.passes.graphs import capture, hidden, targets

SIZE = 32
PASSES = [
    "fuse_add_norm",
    "fuse_gated_linear",
    "fuse_norm_quant",
    "fuse_act_quant",
    "fuse_norm_mlp",
]
Model = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


def fp8(x: Tensor, w: Tensor, bias: Tensor | None = None, dtype: Any = torch.bfloat16) -> Tensor:
    """A layer with a scale a token and one a row of the weight."""
    q, x_scale = ops.quant_fp8_dynamic(x, 0)
    w = w.view(SIZE, -1)
    scale = w[:, :1].abs().float() + 0.5
    return ops.linear(q, w.to(torch.float8_e4m3fn), bias, x_scale, scale, dtype)


def halved(w: Tensor) -> Tensor:
    return w.view(SIZE, SIZE)[:, : SIZE // 2].contiguous()


def mlp(total: Tensor, w: Tensor, nw: Tensor) -> Tensor:
    return fp8(ops.silu_mul(fp8(ops.rms_norm(total, nw, 1e-5), w)), halved(w))


def inner_layer(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = r + fp8(x, w, nw)
    total = total + mlp(total, w, nw)
    return fp8(ops.rms_norm(total, nw, 1e-6), w, nw), total * 2


def last_layer(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    """The norm behind the last layer is not quantized."""
    total = fp8(x, w) + r
    return ops.rms_norm(total + mlp(total, w, nw), nw, 1e-6)


def gelu(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = r + fp8(x, w)
    y = ops.gelu_tanh_mul(fp8(ops.rms_norm(total, nw, 1e-5), w))
    total = total + fp8(y, halved(w))
    return fp8(ops.rms_norm(total, nw, 1e-5), w)


def two_layers(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    for _ in range(2):
        r = r + fp8(x, w)
        r = r + mlp(r, w, nw)
        x = fp8(ops.rms_norm(r, nw, 1e-5), w)
    return x, r


def next_is_read_twice(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    """The norm behind goes to two layers: the first part alone is joined."""
    total = r + fp8(x, w)
    total = total + mlp(total, w, nw)
    q, scale = ops.quant_fp8_dynamic(ops.rms_norm(total, nw, 1e-5), 0)
    weight, of_rows = w.view(SIZE, SIZE).to(torch.float8_e4m3fn), torch.ones(SIZE, 1)
    return [ops.linear(q, weight, b, scale, of_rows, torch.bfloat16) for b in (None, nw)]


def sum_read_early(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = r + fp8(x, w)
    y, half = ops.rms_norm(total, nw, 1e-5), total / 2
    return fp8(ops.silu_mul(fp8(y, w)), halved(w)) + half


def norm_read_twice(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = r + fp8(x, w)
    q, scale = ops.quant_fp8_dynamic(ops.rms_norm(total, nw, 1e-5), 0)
    weight, of_rows = w.view(SIZE, SIZE).to(torch.float8_e4m3fn), torch.ones(SIZE, 1)
    y = ops.linear(q, weight, None, scale, of_rows, torch.bfloat16)
    return fp8(ops.silu_mul(y), halved(w)), q.float()


def biased(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = r + fp8(x, w)
    return fp8(ops.silu_mul(fp8(ops.rms_norm(total, nw, 1e-5), w, nw)), halved(w)), total


def not_quantized(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = r + ops.linear(x, w.view(SIZE, SIZE), None)
    return mlp(total, w, nw), total


def no_linear(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = r + x * 2
    return mlp(total, w, nw), total


def no_layer_behind(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = r + fp8(x, w)
    q, scale = ops.quant_fp8_dynamic(ops.silu_mul(fp8(ops.rms_norm(total, nw, 1e-5), w)), 0)
    return q.float(), scale, total


def activated_by_groups(x: Tensor) -> Any:
    return ops.quant_fp8_dynamic(ops.silu_mul(torch.cat((x,) * 8, -1)), 128)


def sum_over_ranks(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = r + ops.all_reduce(fp8(x, w), "tp")
    return mlp(total, w, nw), total


def given() -> dict[str, Tensor]:
    torch.manual_seed(3)
    x, r = (hidden(dtype=torch.bfloat16, size=SIZE) for _ in range(2))
    w = hidden(dtype=torch.bfloat16, size=SIZE, tokens=SIZE)
    return {"x": x, "r": r, "w": w.flatten(), "nw": torch.randn(SIZE).bfloat16()}


@cache
def fused(model: Model, verify: bool = True) -> tuple[Any, Any]:
    """The graph after the passes, and the report of the last."""
    gm = capture(model, **given())
    *_, report = run_passes(gm, build_passes(PASSES), verify=verify)
    return gm, report


@pytest.mark.parametrize(
    ("model", "count", "left"),
    [
        (inner_layer, 1, []),
        (last_layer, 1, ["add_rms_norm.default"]),
        (gelu, 1, []),
        (two_layers, 2, []),
        (next_is_read_twice, 1, ["add_rms_norm_quant_dynamic.default", *["linear.default"] * 2]),
    ],
)
def test_they_become_one_op_and_no_bit_changes(model: Model, count: int, left: list[str]) -> None:
    gm, report = fused(model)
    assert (report.matched, report.missed) == (count, [])
    found = [name for name in targets(gm) if name.endswith(".default")]
    joined = [name for name in found if name == "linear_add_norm_mlp.default"]
    assert len(joined) == count
    assert [name for name in found if name not in joined] == left


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (sum_read_early, "the sum is used before the MLP"),
        (norm_read_twice, "is also read by"),
        (biased, "has a bias, which the fused op does not add"),
        (not_quantized, "is not an FP8 linear layer"),
        (no_linear, "is not an FP8 linear layer"),
        (no_layer_behind, "is not an FP8 linear layer"),
    ],
)
def test_a_miss_has_its_reason(model: Model, reason: str) -> None:
    gm, report = fused(model, verify=False)
    (site,) = report.missed
    assert reason in site.reason
    assert "linear_add_norm_mlp.default" not in targets(gm)


def test_an_activation_with_a_scale_a_group_is_a_miss() -> None:
    gm = capture(activated_by_groups, x=given()["x"])
    *_, report = run_passes(gm, build_passes(PASSES))
    (site,) = report.missed
    assert (
        site.reason == "it quantizes by a scale for each 128 columns, the fused op by one a token"
    )


@pytest.mark.parametrize("others", [[], ["fuse_all_reduce_norm"]])
def test_layers_behind_a_sum_over_ranks_are_a_miss(others: list[str]) -> None:
    """Whether the sum is a node of its own or part of the norm."""
    gm = capture(sum_over_ranks, **given())
    *_, report = run_passes(gm, build_passes([*PASSES, *others]))
    assert report.name == "fuse_norm_mlp"
    (site,) = report.missed
    assert site.reason.startswith("a sum over ranks comes before its norm")


def behind_rounds_otherwise(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = r + fp8(x, w)
    total = total + mlp(total, w, nw)
    q, scale = ops.quant_fp8_dynamic(ops.rms_norm(total, nw, 1e-6), 0)
    weight, of_rows = w.view(SIZE, SIZE).to(torch.float8_e4m3fn), torch.ones(SIZE, 1)
    return ops.linear(q, weight, None, scale, of_rows, torch.float32), total


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (inner_layer, ""),
        (last_layer, "no norm of its sum with the residual quantizes by scales of its own"),
        (next_is_read_twice, "2 nodes read"),
        (behind_rounds_otherwise, "makes torch.float32"),
    ],
)
def test_a_layer_behind_that_is_left_out_has_its_reason(model: Model, reason: str) -> None:
    (site,) = fused(model)[1].sites
    assert site.matched and bool(site.reason) == bool(reason)
    assert reason in site.reason
