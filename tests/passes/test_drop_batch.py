"""A batch of one is carried as none, from op to op, and no value changes by it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from fusewright.passes import run_passes
from fusewright.passes.cleanup import Cleanup
from fusewright.passes.raising.drop_batch import DropBatch
from fusewright.passes.raising.fold_views import FoldViews
from tests.passes.graphs import dispatched, run_dispatched, targets

TOKENS, HEADS, DIM = 7, 4, 8


def inputs() -> dict[str, Tensor]:
    return {"x": torch.randn(TOKENS, HEADS * DIM), "w": torch.randn(HEADS * DIM)}


def batched(gm: fx.GraphModule) -> list[str]:
    """The values that have a batch: three or more dimensions, the first of one element."""
    values = {node.name: node.meta.get("example_value") for node in gm.graph.nodes}
    return [
        n for n, v in values.items() if isinstance(v, Tensor) and v.dim() > 2 and v.shape[0] == 1
    ]


def heads(x: Tensor, w: Tensor) -> Tensor:
    """Rotates heads as a layer of attention does, and joins them again."""
    q = (x.unsqueeze(0) * w).view(1, -1, HEADS, DIM).transpose(1, 2)
    first, second = q.split(DIM // 2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    mean = turned.float().pow(2).mean(-1, keepdim=True)
    return (turned * torch.rsqrt(mean + 1e-6))[0].transpose(0, 1)


def one_head(x: Tensor, w: Tensor) -> Tensor:
    """The first dimension of what the batch is taken from is one too, and no batch."""
    key = (x.unsqueeze(0) * w).view(1, -1, 1, HEADS * DIM).transpose(1, 2)
    return key[0].transpose(0, 1) + 1


def complex_numbers(x: Tensor, w: Tensor) -> Tensor:
    """Rotates as Llama 4 does, by numbers that are made of the angles of each token."""
    angles = (x * w).view(-1, HEADS, DIM)[..., : DIM // 2]
    turns = torch.polar(torch.ones_like(angles), angles).unsqueeze(0)
    pairs = (x.unsqueeze(0) + w).view(1, -1, HEADS, DIM // 2, 2)
    numbers = torch.view_as_complex(pairs) * turns
    return torch.view_as_real(numbers).view(1, -1, HEADS * DIM).squeeze(0)


def view_to_batch(x: Tensor, w: Tensor) -> Tensor:
    """As experts do: rows without a batch are given one again."""
    rows = (x.unsqueeze(0) + w).view(-1, HEADS * DIM)
    return (rows * 2).view(1, -1, HEADS * DIM).squeeze(0) + 1


def of_tokens(x: Tensor, w: Tensor) -> Tensor:
    """An op over the tokens, which is not known."""
    return (x.unsqueeze(0) + w).cumsum(1).squeeze(0)


def run(fn: Callable[..., Tensor]) -> tuple[fx.GraphModule, list[str], bool]:
    """(the graph, reasons of misses, whether its result is the function's)."""
    given = inputs()
    gm = dispatched(fn, "w", **given)
    report, *_ = run_passes(gm, [DropBatch(), FoldViews(), Cleanup()], verify=True)
    equal = torch.equal(run_dispatched(gm, TOKENS, **given), fn(**given))
    return gm, [site.reason for site in report.missed], equal


@pytest.mark.parametrize("fn", [heads, complex_numbers, view_to_batch])
def test_a_batch_is_dropped_up_to_where_it_is_taken_away(fn: Callable[..., Tensor]) -> None:
    gm, missed, equal = run(fn)
    assert not missed and equal
    assert not batched(gm) and "unsqueeze" not in targets(gm)


def test_one_kv_head_is_no_batch() -> None:
    gm, missed, equal = run(one_head)
    assert not missed and equal
    assert "unsqueeze" not in targets(gm)


def test_an_op_that_is_not_known_keeps_its_batch() -> None:
    gm, missed, equal = run(of_tokens)
    assert missed == ["it is not known to keep a batch apart"] and equal
    assert "cumsum.default" in targets(gm)
