"""Writes to memory that others may read are neither fused away nor passed by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright import ops
from fusewright.passes import build_passes, run_passes
from tests.passes.graphs import capture, hidden, targets

PASSES = ["cleanup", "fuse_add_norm", "fuse_act"]


def added_in_place(x: Tensor, r: Tensor, w: Tensor) -> Any:
    mine = r.clone()
    total = mine.view(-1, 32)
    total += x
    return ops.rms_norm(total, w, 1e-5), mine


def overwritten_between(x: Tensor, r: Tensor, w: Tensor) -> Any:
    total = r + x
    r.mul_(2)
    return ops.rms_norm(total, w, 1e-5), total


def gated_in_place(x: Tensor) -> Any:
    gate, up = x.chunk(2, -1)
    gate = F.silu(gate)
    kept = gate.view(-1)
    kept *= up.reshape(-1)
    return gate + 1


def given(model: Callable[..., Any]) -> dict[str, Tensor]:
    inputs = {"x": hidden(), "r": hidden(), "w": torch.randn(32)}
    return inputs if model is not gated_in_place else {"x": inputs["x"]}


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (added_in_place, "which others may read"),
        (overwritten_between, "mul_ writes to memory between the add and the norm"),
        (gated_in_place, "the activation has 2 users"),
    ],
)
def test_a_write_that_others_may_read_is_left(model: Callable[..., Any], reason: str) -> None:
    gm = capture(model, **given(model))
    reports = run_passes(gm, build_passes(PASSES), verify=True)
    missed = [site for report in reports[1:] for site in report.missed]
    assert len(missed) == 1
    assert not any(t.startswith(("add_rms_norm", "silu_mul")) for t in targets(gm))
    assert reason in missed[0].reason


def test_overwriting_what_nobody_else_reads_fuses() -> None:
    def model(x: Tensor) -> Any:
        gate, up = x.chunk(2, -1)
        product = F.silu(gate)
        product *= up
        return product

    gm = capture(model, x=hidden())
    run_passes(gm, build_passes(PASSES), verify=True)
    assert targets(gm) == ["silu_mul.default"]
