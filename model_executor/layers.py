"""Layers with their sharding rule: which slice of a checkpoint tensor a rank holds, and where.

Parameters are made on the meta device; ``loader`` gives them memory and fills them by the rules.
Their dtype is the model's, but for FP8 weights; scales are float32 buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm

import torch
from torch import Tensor, nn

from .. import ops
from ..ops._float8 import E4M3
from .quant.scheme import BLOCK, FORMATS, QuantKind


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


def _parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"), requires_grad=False)


class Linear(nn.Module):
    """``x @ weight.T + bias``; made by the functions below, which differ in the rule only.

    With ``quant`` the weight is FP8 and x is quantized before the matmul.  Scales are zero until
    they are loaded; ``input_scale`` is there for a static format alone.
    """

    weight_scale: Tensor
    input_scale: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rule: ShardRule,
        bias: bool,
        quant: QuantKind | None = None,
    ) -> None:
        super().__init__()
        self.quant = FORMATS[quant] if quant else None
        self.weight = _parameter(out_features, in_features, dtype=E4M3 if quant else None)
        self.bias = _parameter(out_features) if bias else None
        # The bias of a row-split layer is added once, after the sum over ranks.
        whole = ShardRule(0, (Part("", out_features, 1),), split=False)
        self.rules = {"weight": rule, "bias": rule if rule.dim == 0 else whole}
        if self.quant is None:
            return
        shape = self.quant.scale_shape(out_features, in_features)
        self.register_buffer("weight_scale", torch.zeros(shape))
        if self.quant.static:
            self.register_buffer("input_scale", torch.zeros(1, 1))
        if self.quant.rows:
            each_row = self.rules["bias"]
            self.rules["weight_scale"] = _by_block(rule) if self.quant.blocks else each_row

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]."""
        if self.quant is None:
            return ops.linear(x, self.weight, self.bias)
        if self.quant.static:
            quantized, scale = ops.quant_fp8_static(x, self.input_scale), self.input_scale
        else:
            quantized, scale = ops.quant_fp8_dynamic(x, self.quant.columns)
        return ops.linear(quantized, self.weight, self.bias, scale, self.weight_scale, x.dtype)


def _by_block(rule: ShardRule) -> ShardRule:
    """A weight's rule, counted in blocks: the units that stay whole are whole blocks too."""

    def counted(part: Part) -> Part:
        together = lcm(part.size // part.units, BLOCK)
        units = max(1, part.size // together)
        return replace(part, size=-(-part.size // BLOCK), units=units)

    return replace(rule, parts=tuple(counted(part) for part in rule.parts))


def column_linear(
    in_features: int, out_features: int, *, bias: bool = False, quant: QuantKind | None = None
) -> Linear:
    """Output features are split over the ranks."""
    rule = ShardRule(0, (Part("", out_features, out_features),))
    return Linear(in_features, out_features, rule, bias, quant)


def row_linear(
    in_features: int,
    out_features: int,
    *,
    bias: bool = False,
    units: int | None = None,
    quant: QuantKind | None = None,
) -> Linear:
    """Input features are split over the ranks, ``units`` (heads) staying whole."""
    rule = ShardRule(1, (Part("", in_features, units or in_features),))
    return Linear(in_features, out_features, rule, bias, quant)


def replicated_linear(in_features: int, out_features: int, *, bias: bool = False) -> Linear:
    """Every rank holds all of it."""
    rule = ShardRule(0, (Part("", out_features, 1),), split=False)
    return Linear(in_features, out_features, rule, bias)


def qkv_linear(
    hidden: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    bias: bool = False,
    quant: QuantKind | None = None,
) -> Linear:
    """Query, key and value projections in one matrix, split by head."""
    kv_size = num_kv_heads * head_dim
    parts = (
        Part("q", num_heads * head_dim, num_heads),
        Part("k", kv_size, num_kv_heads, replicate=True),
        Part("v", kv_size, num_kv_heads, replicate=True),
    )
    return Linear(hidden, num_heads * head_dim + 2 * kv_size, ShardRule(0, parts), bias, quant)


def gate_up_linear(
    hidden: int, intermediate: int, *, bias: bool = False, quant: QuantKind | None = None
) -> Linear:
    """Gate and up projections in one matrix; a rank's gate half precedes its up half."""
    parts = tuple(Part(name, intermediate, intermediate) for name in ("gate", "up"))
    return Linear(hidden, 2 * intermediate, ShardRule(0, parts), bias, quant)


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
