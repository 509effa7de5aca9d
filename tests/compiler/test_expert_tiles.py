"""The tiles that the tuner of experts measures, those of the rule, and how they are measured."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from fusewright import ops
from fusewright.compiler.lowering import tune_experts
from fusewright.compiler.lowering.tune_experts import TOKENS, ExpertMeasure, candidates, rule_tile
from fusewright.config.arch import HOPPER
from fusewright.config.expert_tables import Experts, ExpertTile
from fusewright.ops import Variant
from fusewright.ops.experts.kernels import MOST_UNSORTED

QWEN = Experts(128, 768, 2048, 8, "bfloat16")
COUNTS = {
    "bfloat16": {1: 28, 64: 28, 256: 60, 1024: 128, 4096: 68},
    "fp8": {1: 34, 64: 34, 256: 78, 1024: 180, 4096: 102},
    "fp8 block": {1: 8, 64: 8, 256: 16, 1024: 44, 4096: 28},
}


@pytest.mark.parametrize(
    ("kind", "tokens", "num_tiles"),
    [(kind, tokens, num) for kind, row in COUNTS.items() for tokens, num in row.items()],
)
def test_candidates_are_few_and_fit_a_block(kind: str, tokens: int, num_tiles: int) -> None:
    experts = replace(QWEN, kind=kind)
    found = list(candidates(experts, tokens))
    assert len(set(found)) == len(found) == num_tiles
    of_expert = tokens * QWEN.top_k / QWEN.experts
    for tile in found:
        sums = tile.rows * tile.columns
        assert tile.shared_bytes(experts.itemsize) <= HOPPER.shared_bytes
        assert sums // (32 * tile.warps) <= 128 and (tile.warps == 4 or sums >= 8192)
        assert tile.rows == 16 or tile.rows <= 2 * of_expert
        assert tile.rows == 128 or 4 * tile.rows >= of_expert
        assert {x.bit_count() for x in (tile.rows, tile.columns, tile.depth, tile.warps)} == {1}


@pytest.mark.parametrize("sizes", [(16, 32), (48, 64), (192, 128)])
def test_no_candidate_is_wider_or_deeper_than_the_weights(sizes: tuple[int, int]) -> None:
    inner, hidden = sizes
    found = list(candidates(Experts(8, inner, hidden, 2, "bfloat16"), 256))
    assert all(tile.depth <= hidden and tile.columns < 4 * inner for tile in found)
    assert {tile.depth for tile in found} == {d for d in (64, 128, 256) if d <= hidden}


def test_numbers_of_tokens_double() -> None:
    assert TOKENS[0] == 1 and {b / a for a, b in pairwise(TOKENS)} == {2} and TOKENS[-1] == 4096


def test_the_rules_tile_follows_the_rows_of_an_expert_and_of_its_weight() -> None:
    def rule(tokens: int, intermediate: int) -> ExpertTile:
        return rule_tile(Experts(128, intermediate, 2048, 8, "bfloat16"), tokens)

    assert [rule(tokens, 768).rows for tokens in (16, 256, 512, 1024)] == [16, 32, 64, 128]
    stages = {inner: [rule(tokens, inner).stages for tokens in (256, 1024)] for inner in (768, 192)}
    assert stages == {768: [5, 4], 192: [3, 4]}


@pytest.mark.parametrize("kind", ["bfloat16", "fp8", "fp8 block"])
@pytest.mark.parametrize("tokens", [4, 64])
def test_each_tile_that_compiles_is_timed(
    tokens: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without a GPU: without values, a compiler and a clock."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(tune_experts, "graph_us", lambda fns, *, calls: 5.0 * len(fns))
    refused, asked = set[int](), list[set[Variant]]()

    def precompile(variants: set[Variant], sm: int) -> None:
        assert sm == 89
        asked.append(variants)
        if refused & {v.num_stages for v in variants if "_expert_linear" in v.kernel}:
            raise RuntimeError("ptxas: too much shared memory")

    monkeypatch.setattr(ops.KERNELS, "precompile", precompile)
    experts = Experts(8, 128, 256, 2, kind)
    tiles = [*candidates(experts, 64)][:3]
    assert len({tile.stages for tile in tiles}) == 3
    measure = ExpertMeasure(experts, torch.device("meta"))
    assert measure(tokens, tiles) == [5.0, 5.0, 5.0] and len(asked) == 1
    kernels = {variant.kernel for variant in asked[0]}
    assert any("sort" in kernel for kernel in kernels) == (tokens > MOST_UNSORTED), kernels
    refused.add(tiles[1].stages)
    assert measure(tokens, tiles) == [5.0, torch.inf, 5.0]
    measure.free()
