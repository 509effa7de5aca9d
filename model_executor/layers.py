"""Layers with their sharding rule: which slice of a checkpoint tensor a rank holds, and where.

Parameters are made on the meta device; ``loader`` gives them memory and fills them by the rules.
Their dtype is the model's, but for quantized weights; scales and zero points are buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import lcm

import torch
from torch import Tensor, nn

from .. import ops
from ..config.weight_format import StoredFormat
from ..ops.core.float8 import E4M3
from ..ops.linear.formats import dtype_of
from .parallel import GROUP
from .quant.scheme import BLOCK, FORMATS, QuantKind
from .sharding import Part as Part, Placement as Placement, ShardRule as ShardRule, stored_rule


def rules_of(module: nn.Module | None) -> Mapping[str, ShardRule]:
    """The rules of a module's own parameters and scales, by their names; none for other modules."""
    rules: Mapping[str, ShardRule] = getattr(module, "rules", {})
    return rules


def _parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta"), requires_grad=False)


class Linear(nn.Module):
    """``x @ weight.T + bias``; made by the functions below, which differ in the rule only.

    With ``quant`` the weight is FP8 and x is quantized before the matmul, or the weight is stored
    in an admitted format, which may quantize x too.  FP8 scales are zero until they are loaded, as
    is ``input_scale``, which is there for a static format alone.  With ``reduce`` the results are
    summed over the ranks.

    ``shape`` and ``weight_rule`` are those of this rank's weight as a matrix of numbers, whatever
    it is stored as.
    """

    weight_scale: Tensor
    input_scale: Tensor
    weight_zero: Tensor
    weight_row_scale: Tensor
    x_order: Tensor | None
    """The order in which the columns of x are multiplied; None: as they are."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rule: ShardRule,
        bias: bool,
        quant: QuantKind | None = None,
        world: int = 1,
        reduce: bool = False,
    ) -> None:
        """Sizes are those of the whole layer, of which ``world`` ranks hold a part each."""
        super().__init__()
        self.quant = FORMATS[quant] if quant else None
        self.reduce = reduce and world > 1
        whole = ShardRule(0, (Part("", out_features, 1),), split=False)
        each_row = rule if rule.dim == 0 else whole
        # One rank adds the bias of a split sum, so that the sum over ranks goes straight to a norm.
        bias_rule = each_row if rule.dim == 0 else replace(whole, once=True)
        sizes, rows = [out_features, in_features], out_features
        sizes[rule.dim] = rule.local_size(world)
        out_features, in_features = self.shape = (sizes[0], sizes[1])
        self.weight_rule = rule
        self.bias = _parameter(out_features) if bias else None
        self.register_buffer("x_order", None)
        if isinstance(self.quant, StoredFormat):
            stored = self.quant.tensors.items()
            self.rules = {name: stored_rule(rule, tensor, rows) for name, tensor in stored}
            self.rules["bias"] = bias_rule
            self._store(self.quant)
            return
        self.weight = _parameter(out_features, in_features, dtype=E4M3 if quant else None)
        self.rules = {"weight": rule, "bias": bias_rule}
        if self.quant is None:
            return
        shape = self.quant.scale_shape(out_features, in_features)
        self.register_buffer("weight_scale", torch.zeros(shape))
        if self.quant.static:
            self.register_buffer("input_scale", torch.zeros(1, 1))
        if self.quant.rows:
            self.rules["weight_scale"] = _by_block(rule) if self.quant.blocks else each_row

    def _store(self, form: StoredFormat) -> None:
        """Make the tensors of a stored weight."""
        for name, tensor in form.tensors.items():
            shape, dtype = tensor.shape(*self.shape), dtype_of(tensor)
            if name == "weight":
                self.weight = _parameter(*shape, dtype=dtype)
            else:
                self.register_buffer(name, torch.empty(shape, dtype=dtype, device="meta"))
        if form.static:
            self.register_buffer("input_scale", torch.zeros(1, 1))

    def gather_input(self) -> None:
        """Have an ``x_order``, [in_features] int64; loading sets it."""
        self.register_buffer("x_order", torch.arange(self.shape[1]))

    def share(self, expert: int | None) -> tuple[Linear, bool]:
        """The layer, and that no other rank has it; a layer of experts has a share for each."""
        return self, False

    def shares(self) -> tuple[Linear, ...]:
        """The layer alone; a layer of experts has a share for each."""
        return (self,)

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] -> [num_tokens, out_features]; the library of a captured model
        has a batch ahead, which ops that quantize do not take."""
        if self.quant is not None and x.dim() > 2:
            return self(x.flatten(0, -2)).unflatten(0, x.shape[:-1])  # type: ignore[no-any-return]
        y = self._matmul(x)
        return ops.all_reduce(y, GROUP) if self.reduce else y

    def _matmul(self, x: Tensor) -> Tensor:
        if self.quant is None:
            return ops.linear(x, self.weight, self.bias)
        if isinstance(self.quant, StoredFormat):
            return self._matmul_stored(x, self.quant)
        known = self.input_scale if self.quant.static else None
        quantized, scale = ops.quantize_operand(x, "float8_e4m3fn", known, self.quant.columns)
        return ops.linear(quantized, self.weight, self.bias, scale, self.weight_scale, x.dtype)

    def _matmul_stored(self, x: Tensor, form: StoredFormat) -> Tensor:
        if self.x_order is not None:
            x = x.index_select(-1, self.x_order)
        operand, scale, dtype = x, None, None
        if form.x_dtype:
            known = self.input_scale if form.static else None
            operand, scale = ops.quantize_operand(x, form.x_dtype, known, form.x_columns)
            dtype = x.dtype
        zero = None if form.zero is None else self.weight_zero
        weight = (self.weight, self.bias, scale, self.weight_scale, dtype)
        rows = None if form.row_scale is None else self.weight_row_scale
        return ops.linear(operand, *weight, None, None, zero, form.name, rows)


def _by_block(rule: ShardRule) -> ShardRule:
    """The rule for a weight's block scales: its sizes and units are counted in blocks."""

    def counted(part: Part) -> Part:
        together = lcm(part.size // part.units, BLOCK)
        units = max(1, part.size // together)
        return replace(part, size=-(-part.size // BLOCK), units=units)

    return replace(rule, parts=tuple(counted(part) for part in rule.parts))


def row_linear(
    in_features: int,
    out_features: int,
    *,
    bias: bool = False,
    units: int | None = None,
    quant: QuantKind | None = None,
    world: int = 1,
    reduce: bool = True,
) -> Linear:
    """A layer whose input features are split over the ranks; none of ``units`` (heads) is cut.
    Without ``reduce`` the caller sums over the ranks."""
    rule = ShardRule(1, (Part("", in_features, units or in_features),))
    return Linear(in_features, out_features, rule, bias, quant, world, reduce)


def replicated_linear(
    in_features: int, out_features: int, quant: QuantKind | None = None
) -> Linear:
    """A layer of which every rank holds the whole weight."""
    rule = ShardRule(0, (Part("", out_features, 1),), split=False)
    return Linear(in_features, out_features, rule, bias=False, quant=quant)


def qkv_linear(
    hidden: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    bias: bool = False,
    quant: QuantKind | None = None,
    world: int = 1,
) -> Linear:
    """Query, key and value projections in one matrix, split by head."""
    kv_size = num_kv_heads * head_dim
    parts = (
        Part("q", num_heads * head_dim, num_heads),
        Part("k", kv_size, num_kv_heads, replicate=True),
        Part("v", kv_size, num_kv_heads, replicate=True),
    )
    out_features = num_heads * head_dim + 2 * kv_size
    return Linear(hidden, out_features, ShardRule(0, parts), bias, quant, world)


def gate_up_linear(
    hidden: int,
    intermediate: int,
    *,
    bias: bool = False,
    quant: QuantKind | None = None,
    world: int = 1,
) -> Linear:
    """Gate and up projections in one matrix; a rank's gate half precedes its up half."""
    parts = tuple(Part(name, intermediate, intermediate) for name in ("gate", "up"))
    return Linear(hidden, 2 * intermediate, ShardRule(0, parts), bias, quant, world)


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
    """Token embedding, split by vocabulary.  ``first_id`` is the id of the rank's first row: a
    buffer, so that all ranks run the same code."""

    first_id: Tensor | None

    def __init__(self, vocab_size: int, hidden: int, world: int = 1) -> None:
        super().__init__()
        self.rules = {"weight": ShardRule(0, (Part("", vocab_size, vocab_size),))}
        self.weight = _parameter(self.rules["weight"].local_size(world), hidden)
        self.register_buffer("first_id", torch.zeros(1, dtype=torch.int32) if world > 1 else None)

    def forward(self, ids: Tensor) -> Tensor:
        """[num_tokens] int32 -> [num_tokens, hidden]."""
        if self.first_id is None:
            return ops.embedding(ids, self.weight)
        return ops.all_reduce(ops.embedding(ids, self.weight, self.first_id), GROUP)


class LMHead(nn.Module):
    """Hidden states to logits, split by vocabulary; ``tied`` shares the embedding's parameter."""

    def __init__(
        self, vocab_size: int, hidden: int, tied: Embedding | None = None, world: int = 1
    ) -> None:
        super().__init__()
        self.world = world
        self.rules = {"weight": ShardRule(0, (Part("", vocab_size, vocab_size),))}
        rows = self.rules["weight"].local_size(world)
        self.weight = tied.weight if tied is not None else _parameter(rows, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        """[num_seqs, hidden] -> [num_seqs, vocab_size] in the weight's dtype."""
        logits = ops.linear(hidden, self.weight, None)
        return ops.all_gather(logits, self.world, GROUP) if self.world > 1 else logits
