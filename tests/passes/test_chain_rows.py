"""What stands between two linear layers becomes one call: post-norms, products, adds and norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright import ops
from tests.passes.test_fuse_chain import (
    N1,
    SIZE,
    L,
    Model,
    N,
    chains,
    dense,
    fp8,
    fused,
    halved,
    norm,
)

layer_norm = torch.ops.fw.layer_norm.default
P, P1 = "norm(weight, eps=1e-05)", "norm(weight, eps=1e-05, offset=1.0)"


def sandwich(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    """Gemma 2's, whose norm and whose sum are read by several."""
    total = r + norm(dense(x, w), nw, 1.0)
    y = norm(total, nw, 1.0)
    return dense(y, w), y * 2, total


def post_norm(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    """OLMo 2's: layers read the sum itself."""
    total = r + norm(dense(x, w), nw)
    return dense(total, w), total * 3


def multiplied(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    """Granite's, which multiplies what it adds."""
    total = r + dense(x, w) * 0.22
    return dense(norm(total, nw), w), total


def multiplied_no_layer(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = r + 0.5 * (x + w.view(SIZE, SIZE)[:1]) * 0.22
    return norm(total, nw), total


def multiplied_sum(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    """Gemma 4's, which multiplies the sum."""
    total = (norm(dense(x, w), nw) + r) * 0.7
    return dense(norm(total, nw, 0.0), w), total


def layer_normed(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    """GPT-2's, whose norm and whose sum go on."""
    total = r + dense(x, w)
    return dense(layer_norm(total, nw, 1e-5, nw), w), total


def post_layer_normed(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = r + layer_norm(x, nw, 1e-5)
    return layer_norm(total, nw, 1e-5, nw), total


MATCHED: list[tuple[Model, list[str]]] = [
    (sandwich, [f"{P1} > {N1}"]),
    (post_norm, [f"{P} > add()"]),
    (multiplied, [f"{L} > scale(factor=0.22) > {N} > {L}"]),
    (multiplied_no_layer, [f"scale(factor=0.22) > {N}"]),
    (layer_normed, [f"{L} > add_norm(weight, bias, eps=1e-05, center=True) > {L}"]),
    (
        post_layer_normed,
        [
            "norm(weight, eps=1e-05, center=True) > add_norm(weight, bias, eps=1e-05, center=True)",
        ],
    ),
    (multiplied_sum, [f"{P} > add() > scale(factor=0.7) > {P.replace(')', ', offset=0.0)')}"]),
]


@pytest.mark.parametrize(("model", "texts"), MATCHED, ids=lambda v: getattr(v, "__name__", ""))
def test_rows_become_one_op_and_no_bit_changes(model: Model, texts: list[str]) -> None:
    """Verified: the sides before and after have the same bits."""
    gm, report = fused(model)
    assert chains(gm) == texts
    assert report.matched == sum(text.count("norm(") for text in texts) and not report.missed


def multiplied_sum_read(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = norm(dense(x, w), nw) + r
    return dense(norm(total * 0.7, nw), w), total


def post_norm_read(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    y = norm(dense(x, w), nw)
    return dense(norm(y + r, nw), w), y


def two_products(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    return norm(r + norm(dense(x, w), nw) * 0.3 * 0.2, nw)


def broadcast(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    return norm(dense(x, w), nw) + r[:1]


@pytest.mark.parametrize(
    ("model", "texts"),
    [
        (multiplied_sum_read, [f"{P} > add()"]),
        (post_norm_read, []),
        (two_products, [f"scale(factor=0.2) > {N}"]),
        (broadcast, []),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_rows_are_joined_as_far_as_one_launch_computes_them(model: Model, texts: list[str]) -> None:
    gm, _ = fused(model)
    assert chains(gm) == texts


def test_layers_before_a_sum_that_no_chain_may_hold_are_none() -> None:
    """Two layers read the sum's norm.  A kernel has the FP8 layers before it, and adds nothing."""

    def model(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
        total = r + fp8(ops.silu_mul(fp8(x, w)), halved(w))
        q, scale = ops.quant_fp8_dynamic(norm(total, nw), 0)
        weight, of_rows = w.view(SIZE, SIZE).to(torch.float8_e4m3fn), torch.ones(SIZE, 1)
        return [ops.linear(q, weight, b, scale, of_rows, torch.bfloat16) for b in (None, nw)]

    gm, report = fused(model)
    assert not chains(gm)
    assert {site.reason for site in report.missed} == {
        "add_rms_norm_quant_dynamic is also read by linear"
    }
