"""What overwrites a tensor that is read no more makes a new one, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.passes.graphs import dispatched, run_dispatched, targets


def read_as_result(x: Tensor) -> Tensor:
    y = x.exp()
    y /= y.sum(-1, keepdim=True)
    return y.t() * 2


def read_before_it_changes(x: Tensor) -> Tensor:
    y = x.exp()
    z = y + 1
    y.add_(x)
    return y * z


def view_read(x: Tensor) -> Tensor:
    y = x.exp()
    y[:, 2:].mul_(3)
    return y + 1


def input_written(x: Tensor) -> Tensor:
    return x.mul_(2) + 1


def rounded_to_its_dtype(x: Tensor) -> Tensor:
    y = x.half()
    y.mul_(x)
    return y.float()


@pytest.mark.parametrize(
    ("fn", "kept"),
    [
        (read_as_result, ""),
        (read_before_it_changes, ""),
        (view_read, "mul_.Tensor"),
        (input_written, "mul_.Tensor"),
        (rounded_to_its_dtype, "mul_.Tensor"),
    ],
)
def test_writes_to_memory_that_is_read_no_more_are_none(
    fn: Callable[[Tensor], Tensor], kept: str
) -> None:
    x = torch.randn(5, 4)
    gm = dispatched(fn, x=x)
    assert [name for name in targets(gm) if "_." in name] == ([kept] if kept else [])
    assert torch.equal(run_dispatched(gm, 5, x=x.clone()), fn(x.clone()))
