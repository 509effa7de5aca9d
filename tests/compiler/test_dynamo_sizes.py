"""Sizes that are equal only by an equation that the graph is compiled for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusewright.compiler.dynamo_backend import fusewright, reports
from tests.compiler.tiny_transformers import fresh_dynamo

fresh = pytest.fixture(autouse=True)(fresh_dynamo)


def test_a_sum_of_sizes_that_are_spelled_differently_is_verified_and_fused() -> None:
    """As in Jamba: here the graph is for an even number of rows, and one operand of the sum has
    twice half of them.  Neither is seen where sizes are compared by themselves."""

    def pairs(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        total = residual + torch.stack((x[::2], x[1::2]), dim=1).flatten(0, 1)
        normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (w * normed).view(x.shape[0], -1, 16), total

    options = {"verify": True, "rest": "eager"}
    run = torch.compile(pairs, backend=fusewright, dynamic=True, options=options)
    for rows in (4, 6):
        given = torch.randn(rows, 64), torch.randn(rows, 64), torch.randn(64)
        torch.testing.assert_close(run(*given), pairs(*given))
    (report,) = reports()
    assert report.matched("fuse_add_norm") == 1
