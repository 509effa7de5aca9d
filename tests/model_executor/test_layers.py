"""Sharding rules: ranks together hold every checkpoint row, fused parameters stay in part order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusewright.model_executor.layers import (
    Embedding,
    Linear,
    LMHead,
    Part,
    Placement,
    RMSNorm,
    ShardRule,
    gate_up_linear,
    qkv_linear,
    replicated_linear,
    row_linear,
)

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 8, 2, 4, 6


def shard(rule: ShardRule, parts: dict[str, Tensor], rank: int, world: int) -> Tensor:
    """The parameter of one rank, filled part by part as the loader does."""
    shape = list(next(iter(parts.values())).shape)
    shape[rule.dim] = rule.local_size(world)
    param = torch.full(shape, float("nan"))
    for name, tensor in parts.items():
        at = rule.place(name, rank, world)
        source = tensor.narrow(at.dim, at.source_start, at.length)
        param.narrow(at.dim, at.dest_start, at.length).copy_(source)
    assert not param.isnan().any()
    return param


def qkv() -> tuple[Linear, dict[str, Tensor]]:
    layer = qkv_linear(HIDDEN, HEADS, KV_HEADS, HEAD_DIM, bias=True)
    sizes = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    return layer, {name: torch.randn(size, HIDDEN) for name, size in sizes.items()}


def test_one_rank_holds_the_parts_in_order() -> None:
    layer, parts = qkv()
    full = shard(layer.rules["weight"], parts, 0, 1)
    assert full.shape == layer.weight.shape
    assert torch.equal(full, torch.cat([parts["q"], parts["k"], parts["v"]]))


def test_qkv_gives_each_of_two_ranks_its_heads() -> None:
    layer, parts = qkv()
    for rank in range(2):
        q, k, v = shard(layer.rules["weight"], parts, rank, 2).split([16, 4, 4])
        assert torch.equal(q, parts["q"][16 * rank :][:16])
        assert torch.equal(k, parts["k"][4 * rank :][:4])
        assert torch.equal(v, parts["v"][4 * rank :][:4])


def test_kv_heads_are_replicated_when_ranks_outnumber_them() -> None:
    layer, parts = qkv()
    for rank in range(4):
        q, k, v = shard(layer.rules["weight"], parts, rank, 4).split([8, 4, 4])
        kv_head = rank // 2
        assert torch.equal(q, parts["q"][8 * rank :][:8])
        assert torch.equal(k, parts["k"][4 * kv_head :][:4])
        assert torch.equal(v, parts["v"][4 * kv_head :][:4])


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_every_query_head_sits_with_the_kv_head_it_reads(world: int) -> None:
    rule = qkv()[0].rules["weight"]
    q_of_rank, group = HEADS // world, HEADS // KV_HEADS
    for rank in range(world):
        k = rule.place("k", rank, world)
        kv_heads = range(k.source_start // HEAD_DIM, (k.source_start + k.length) // HEAD_DIM)
        q_heads = range(rank * q_of_rank, (rank + 1) * q_of_rank)
        assert {head // group for head in q_heads} == set(kv_heads)


def test_the_bias_is_split_like_the_weight_rows() -> None:
    layer, _ = qkv()
    assert layer.rules["bias"].place("k", 1, 2) == Placement(0, 4, 16, 4)


def test_gate_up_keeps_a_rank_s_gate_before_its_up() -> None:
    layer = gate_up_linear(HIDDEN, 8)
    parts = {name: torch.randn(8, HIDDEN) for name in ("gate", "up")}
    for world in (2, 4):
        rows = 8 // world
        for rank in range(world):
            gate, up = shard(layer.rules["weight"], parts, rank, world).chunk(2)
            assert torch.equal(gate, parts["gate"][rank * rows :][:rows])
            assert torch.equal(up, parts["up"][rank * rows :][:rows])


@pytest.mark.parametrize("world", [2, 4])
def test_column_then_row_over_ranks_is_the_whole_matmul(world: int) -> None:
    up, down = torch.randn(8, HIDDEN), torch.randn(HIDDEN, 8)
    x = torch.randn(3, HIDDEN)
    column, row = ShardRule(0, (Part("", 8, 8),)), row_linear(8, HIDDEN)
    total = torch.zeros(3, HIDDEN)
    for rank in range(world):
        up_r = shard(column, {"": up}, rank, world)
        down_r = shard(row.rules["weight"], {"": down}, rank, world)
        assert up_r.shape == (8 // world, HIDDEN) and down_r.shape == (HIDDEN, 8 // world)
        total += x @ up_r.T @ down_r.T
    torch.testing.assert_close(total, x @ up.T @ down.T)


def test_what_is_replicated_is_whole_on_every_rank() -> None:
    bias_of_row = row_linear(8, HIDDEN, bias=True).rules["bias"]
    linear = replicated_linear(8, HIDDEN).rules["weight"]
    norm = RMSNorm(HIDDEN, 1e-5).rules["weight"]
    for rule in (bias_of_row, linear, norm):
        assert {rule.place("", rank, 4) for rank in range(4)} == {Placement(0, 0, 0, HIDDEN)}
        assert rule.local_size(4) == HIDDEN


def test_vocabulary_is_split_alike_in_embedding_and_head() -> None:
    embedding, head = Embedding(16, HIDDEN), LMHead(16, HIDDEN)
    for layer in (embedding, head):
        places = [layer.rules["weight"].place("", rank, 4) for rank in range(4)]
        assert places == [Placement(0, 4 * rank, 0, 4) for rank in range(4)]


def test_heads_that_do_not_spread_are_refused() -> None:
    rule = qkv_linear(HIDDEN, 6, 2, HEAD_DIM).rules["weight"]
    with pytest.raises(ValueError, match="6 units of q do not spread over 4 ranks"):
        rule.place("q", 0, 4)
    with pytest.raises(ValueError, match="2 units of k do not spread over 3 ranks"):
        rule.place("k", 0, 3)
    with pytest.raises(KeyError, match="no part 'gate'"):
        rule.place("gate", 0, 1)


def test_parameters_start_on_meta_and_tied_heads_share_theirs() -> None:
    embedding = Embedding(16, HIDDEN)
    assert embedding.weight.is_meta
    assert LMHead(16, HIDDEN, tied=embedding).weight is embedding.weight
    assert LMHead(16, HIDDEN).weight is not embedding.weight
