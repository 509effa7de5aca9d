"""Views and copies that lead back to where they started are dropped, unless a write would show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusewright.passes import run_passes
from fusewright.passes.cleanup import Cleanup
from fusewright.passes.raising.fold_views import FoldViews
from tests.passes.graphs import dispatched, run_dispatched, targets


def views(x: Tensor) -> Tensor:
    return (x * 2).transpose(0, 1).transpose(0, 1) + x.unsqueeze(0).select(0, 0)


def copies(x: Tensor) -> Tensor:
    return (x * 2).transpose(0, 1).contiguous().transpose(0, 1).contiguous() + 1


def another_order(x: Tensor) -> Tensor:
    return (x * 2).view(-1, 4, 2).transpose(1, 2).contiguous().view(-1, 8) + 1


def written_to(x: Tensor) -> Tensor:
    doubled = x * 2
    first = doubled[0]
    copy = doubled.transpose(0, 1).contiguous().transpose(0, 1).contiguous()
    doubled.add_(1)
    return copy + first


@pytest.mark.parametrize(
    ("fn", "left"),
    [
        (views, []),
        (copies, []),
        (another_order, ["view", "transpose", "contiguous", "view"]),
        (written_to, ["select", "transpose", "contiguous", "transpose", "contiguous"]),
    ],
)
def test_what_leads_back_is_dropped(fn: Callable[[Tensor], Tensor], left: list[str]) -> None:
    x = torch.randn(7, 8)
    gm = dispatched(fn, x=x)
    run_passes(gm, [FoldViews(), Cleanup()], verify=True)
    arithmetic = ("mul", "add", "add_.Tensor")
    assert [name for name in targets(gm) if name not in arithmetic] == left
    assert torch.equal(run_dispatched(gm, 7, x=x), fn(x))
