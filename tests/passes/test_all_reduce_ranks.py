"""A decoder split over ranks: fused, lowered and unfused give the same bits, and those of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.model_executor.parallel import GROUP
from tests.passes.sharded import KINDS, graphs, runner, sharded, steps_of, whole
from tests.ranks import in_ranks, name_world

KINDS_OF = {2: [kind for kind in KINDS if kind != "fp8_block"], 4: ["fp8_block"]}
DRIFT = {None: 0.03, "fp8_static": 0.1, "fp8": 0.1, "fp8_block": 0.1}
"""Relative error (L2) of logits against one rank's: bfloat16 sums are rounded once a rank, and a
rank finds the scales of its own part of a row."""


def prepare(world: int) -> None:
    for quant in KINDS_OF[world]:
        graphs(quant, world)


def run(rank: int, world: int) -> dict[Any, list[Tensor]]:
    """Logits of each kind of model by the graph as traced; asserts which graphs agree."""
    name_world(GROUP)
    logits = {}
    for quant in KINDS_OF[world]:
        model = sharded(quant, rank, world)
        traced, pairs = graphs(quant, world)
        for what, before, after in pairs:
            want = steps_of(model, runner(traced, before, model))
            got = steps_of(model, runner(traced, after, model))
            for a, b in zip(want, got, strict=True):
                assert torch.equal(a, b), f"{quant}, {what}, rank {rank} of {world}"
            logits.setdefault(quant, want[:3])
    return logits


@pytest.mark.product
@pytest.mark.slow
@pytest.mark.parametrize("world", KINDS_OF)
def test_ranks_agree_with_each_other_and_with_one(world: int, tmp_path: Path) -> None:
    results = in_ranks(run, world, tmp_path)
    for quant in KINDS_OF[world]:
        alone = steps_of(whole(quant))[:3]
        for step, want in enumerate(alone):
            got, *others = [of_rank[quant][step] for of_rank in results]
            assert all(torch.equal(got, other) for other in others), "every rank has all logits"
            error = float((got - want).norm() / want.norm())
            assert 0 < error < DRIFT[quant], f"{quant}, step {step}"
