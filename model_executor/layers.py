"""Layers with their sharding rule: which slice of a checkpoint tensor a rank holds, and where.

Parameters are made on the meta device; ``loader`` gives them memory and fills them by the rules.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import ops


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor inside a fused parameter.

    ``size`` is its length along the sharded dimension over all ranks, made of ``units`` that stay
    whole (heads).  With ``replicate``, more ranks than units share a unit (KV heads).
    """

    name: str
    size: int
    units: int
    replicate: bool = False


@dataclass(frozen=True)
class Placement:
    """``length`` rows (columns for ``dim`` 1) of a checkpoint tensor from ``source_start`` on go to
    the parameter from ``dest_start`` on."""

    dim: int
    source_start: int
    dest_start: int
    length: int


@dataclass(frozen=True)
class ShardRule:
    """A parameter is its parts joined along ``dim``; each part is split over the ranks, or, when
    ``split`` is false, held whole by every rank."""

    dim: int
    parts: tuple[Part, ...]
    split: bool = True

    def place(self, part_name: str, rank: int, world: int) -> Placement:
        """The slice of one part that ``rank`` of ``world`` holds.

        Raises:
            ValueError: the part's units cannot be spread evenly over the ranks.
        """
        dest_start = 0
        for part in self.parts:
            source_start, length = self._slice(part, rank, world)
            if part.name == part_name:
                return Placement(self.dim, source_start, dest_start, length)
            dest_start += length
        raise KeyError(f"no part {part_name!r}; parts: {[p.name for p in self.parts]}")

    def local_size(self, world: int) -> int:
        """Length along ``dim`` of one rank's parameter."""
        return sum(self._slice(part, 0, world)[1] for part in self.parts)

    def _slice(self, part: Part, rank: int, world: int) -> tuple[int, int]:
        if not self.split:
            return 0, part.size
        unit_size = part.size // part.units
        if part.units % world == 0:
            length = part.size // world
            return rank * length, length
        if part.replicate and world % part.units == 0:
            return rank // (world // part.units) * unit_size, unit_size
        raise ValueError(
            f"{part.units} units of {part.name or 'a weight'} do not spread over {world} ranks"
        )


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, device="meta"), requires_grad=False)


class Linear(nn.Module):
    """``x @ weight.T + bias``; made by the functions below, which differ in the rule only."""

    def __init__(self, in_features: int, out_features: int, rule: ShardRule, bias: bool) -> None:
        super().__init__()
        self.weight = _parameter(out_features, in_features)
        self.bias = _parameter(out_features) if bias else None
        # The bias of a row-split layer is added once, after the sum over ranks.
        whole = ShardRule(0, (Part("", out_features, 1),), split=False)
        self.rules = {"weight": rule, "bias": rule if rule.dim == 0 else whole}

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        return ops.linear(x, self.weight, self.bias)


def column_linear(in_features: int, out_features: int, *, bias: bool = False) -> Linear:
    """Output features are split over the ranks."""
    rule = ShardRule(0, (Part("", out_features, out_features),))
    return Linear(in_features, out_features, rule, bias)


def row_linear(
    in_features: int, out_features: int, *, bias: bool = False, units: int | None = None
) -> Linear:
    """Input features are split over the ranks, ``units`` (heads) staying whole."""
    rule = ShardRule(1, (Part("", in_features, units or in_features),))
    return Linear(in_features, out_features, rule, bias)


def replicated_linear(in_features: int, out_features: int, *, bias: bool = False) -> Linear:
    """Every rank holds all of it."""
    rule = ShardRule(0, (Part("", out_features, 1),), split=False)
    return Linear(in_features, out_features, rule, bias)


def qkv_linear(
    hidden: int, num_heads: int, num_kv_heads: int, head_dim: int, *, bias: bool = False
) -> Linear:
    """Query, key and value projections in one matrix, split by head."""
    kv_size = num_kv_heads * head_dim
    parts = (
        Part("q", num_heads * head_dim, num_heads),
        Part("k", kv_size, num_kv_heads, replicate=True),
        Part("v", kv_size, num_kv_heads, replicate=True),
    )
    return Linear(hidden, num_heads * head_dim + 2 * kv_size, ShardRule(0, parts), bias)


def gate_up_linear(hidden: int, intermediate: int, *, bias: bool = False) -> Linear:
    """Gate and up projections in one matrix; a rank's gate half precedes its up half."""
    parts = tuple(Part(name, intermediate, intermediate) for name in ("gate", "up"))
    return Linear(hidden, 2 * intermediate, ShardRule(0, parts), bias)


class RMSNorm(nn.Module):
    """RMS normalization over the last dimension, the same on every rank."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = _parameter(size)
        self.eps = eps
        self.rules = {"weight": ShardRule(0, (Part("", size, 1),), split=False)}

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


class Embedding(nn.Module):
    """Token embedding, split by vocabulary."""

    def __init__(self, vocab_size: int, hidden: int) -> None:
        super().__init__()
        self.weight = _parameter(vocab_size, hidden)
        self.rules = {"weight": ShardRule(0, (Part("", vocab_size, vocab_size),))}

    def forward(self, ids: Tensor) -> Tensor:
        """[num_tokens] int32 -> [num_tokens, hidden]."""
        return ops.embedding(ids, self.weight)


class LMHead(nn.Module):
    """Hidden states to logits, split by vocabulary; ``tied`` shares the embedding's parameter."""

    def __init__(self, vocab_size: int, hidden: int, tied: Embedding | None = None) -> None:
        super().__init__()
        self.weight = tied.weight if tied is not None else _parameter(vocab_size, hidden)
        self.rules = {"weight": ShardRule(0, (Part("", vocab_size, vocab_size),))}

    def forward(self, hidden: Tensor) -> Tensor:
        """[num_seqs, hidden] -> [num_seqs, vocab_size] in the weight's dtype."""
        return ops.linear(hidden, self.weight, None)
