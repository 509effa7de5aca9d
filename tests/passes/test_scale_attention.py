"""A number that multiplies queries becomes part of attention's scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright import ops
from fusewright.passes import run_passes
from fusewright.passes.raising.scale_attention import SCALE_ATTENTION
from tests.passes.graphs import capture

HEADS = [-1, 2, 16]


def attention(x: Tensor, cache: Tensor, *, scale: float, twice: bool = False) -> Tensor:
    """Two sequences of one token each, whose keys and values lie in the cache."""
    q = (x * scale).view(HEADS)
    out = torch.empty_like(q)
    table, lens = torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor([3, 2]).int()
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    ops.paged_attention(q, cache, table, lens, starts, out, 0.5, 0, 0.0)
    return out.view(-1, 32) + q.view(-1, 32) if twice else out.view(-1, 32)


def scaled(**how: Any) -> Any:
    x, cache = torch.randn(2, 32), torch.randn(2, 2, 4, 2, 16)
    gm = capture(lambda x, cache: attention(x, cache, **how), x=x, cache=cache)
    (report,) = run_passes(gm, [SCALE_ATTENTION], verify=True)
    (call,) = gm.graph.find_nodes(op="call_function", target=torch.ops.fw.paged_attention.default)
    return report, call.args[6]


def test_the_product_is_part_of_the_scale() -> None:
    report, scale = scaled(scale=0.25)
    assert report.matched == 1 and not report.missed
    assert scale == 0.125


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"scale": -0.25}, "multiplied by -0.25, attention's scale is positive"),
        ({"scale": 0.25, "twice": True}, "is also read by"),
    ],
)
def test_a_miss_says_why(how: dict[str, Any], reason: str) -> None:
    report, scale = scaled(**how)
    (site,) = report.missed
    assert reason in site.reason and scale == 0.5
