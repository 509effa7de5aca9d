"""Gated activations become one op, wherever gate and up are the halves of one tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright.passes import build_passes, run_passes
from tests.passes.graphs import capture, hidden, targets


def _silu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _silu_other_order(x: Tensor) -> Tensor:
    gate, up = torch.chunk(x, 2, 1)
    return up * F.silu(gate)


def _gelu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("fn", "op"),
    [
        (_silu, "silu_mul.default"),
        (_silu_other_order, "silu_mul.default"),
        (_gelu, "gelu_tanh_mul.default"),
    ],
)
def test_gated_activation_becomes_one_op(
    fn: Callable[[Tensor], Tensor], op: str, dtype: torch.dtype
) -> None:
    gm = capture(fn, x=hidden(dtype=dtype))
    (report,) = run_passes(gm, build_passes(["fuse_act"]), verify=True)
    assert report.matched == 1 and not report.missed
    assert targets(gm) == [op]


def _swapped(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(up) * gate


def _three(x: Tensor) -> Tensor:
    gate, up, _ = x.chunk(3, dim=-1)
    return F.silu(gate) * up


def _rows(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=1)
    return F.silu(gate).t() * up.t()


def _twice(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    act = F.silu(gate)
    return act * up + act


def _odd(x: Tensor) -> Tensor:
    gate, up = x[:, :31].chunk(2, dim=-1)
    return F.silu(gate[:, :15]) * up


def _sum(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) + up


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (_swapped, "gate and up are not the two halves of one tensor"),
        (_three, "chunk(3, dim=-1) does not halve the last dimension"),
        (_rows, "the activation feeds t, not a product"),
        (_twice, "the activation has 2 users, not one product"),
        (_odd, "gate and up are not the two halves of one tensor"),
        (_sum, "the activation feeds add, not a product"),
    ],
)
def test_what_cannot_be_fused_is_left_and_explained(
    fn: Callable[[Tensor], Tensor], reason: str
) -> None:
    gm = capture(fn, x=hidden(size=48))
    before = targets(gm)
    (report,) = run_passes(gm, build_passes(["fuse_act"]), verify=True)
    assert [site.reason for site in report.missed] == [reason]
    assert targets(gm) == before


def test_exact_gelu_is_no_site() -> None:
    gm = capture(lambda x: F.gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], x=hidden())
    (report,) = run_passes(gm, build_passes(["fuse_act"]))
    assert report.sites == []
