"""A gated activation of 16 bits whose product is wider."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright.passes import build_passes, run_passes
from tests.passes.graphs import aten, hidden


def names(fn: Any) -> Any:
    return getattr(fn, "__name__", None)


def gates_a_norm(gate: Tensor, up: Tensor) -> Tensor:
    """As Mamba2."""
    wide = up.float() * F.silu(gate.float())
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)


def gates_a_wide_scan(gate: Tensor, up: Tensor) -> Tensor:
    """As Mamba."""
    return (up.float().cumsum(0) * F.silu(gate)).sum(0)


@pytest.mark.parametrize("fn", [gates_a_norm, gates_a_wide_scan], ids=names)
def test_a_product_that_goes_on_in_float32_is_no_site(fn: Any) -> None:
    for dtype, sites in ((torch.bfloat16, 0), (torch.float32, 1)):
        gm = aten(fn, gate=hidden(dtype=dtype), up=hidden(dtype=dtype))
        (report,) = run_passes(gm, build_passes(["fuse_act"]), verify=True)
        assert (len(report.sites), report.matched) == (sites, sites)


def test_a_product_that_is_rounded_to_another_dtype_is_a_miss() -> None:
    def fn(gate: Tensor, up: Tensor) -> Tensor:
        return (up.float() * F.silu(gate.float())).half()

    given = {name: hidden(dtype=torch.bfloat16) for name in ("gate", "up")}
    (report,) = run_passes(aten(fn, **given), build_passes(["fuse_act"]), verify=True)
    (miss,) = report.missed
    assert miss.reason == "the product is torch.float32, the gate torch.bfloat16"
