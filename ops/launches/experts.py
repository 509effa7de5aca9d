"""Describes the launches of the experts: the sort of slots, the GEMMs over gathered rows, and the
weighted sum of their results.  The ops call these functions, and run what they return.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from ...config.expert_tables import ExpertTile
from ...config.weight_format import StoredFormat
from ..core.gate import read_spelled
from ..core.launch import Launch, Launches
from ..core.tiles import cdiv, dense_rows, next_power_of_2
from .stored import bits_of, stored_constexprs, words_of

MOST_EXPERTS = 1024
_GROUP_M = 8
_SORT_BLOCK = 2048
_CHUNKS_A_PROGRAM = 4
"""Number of chunks of _SORT_BLOCK slots in which one program places the slots of its expert."""
# The tile no longer changes above this many tokens, so no more variants are compiled
# (representative_sizes).
_MOST_TOKENS = 2048
# The first operand of a matrix instruction has 64 rows.  A tile with fewer is its second operand.
# So is x where a weight's numbers are made in registers, which hold first operands alone.
_LEAST_UNSWAPPED = 64


class Sorted(NamedTuple):
    """Slots sorted by expert: ``order`` [num_slots] int32, and ``offsets`` [num_experts + 1] int32,
    which says where each expert's slots begin."""

    order: Tensor
    offsets: Tensor


@dataclass(frozen=True)
class Tile:
    """The tile that a program computes.  With ``swapped``, the weight is the tensor core's first
    operand, so that less of the core idles for few rows.  The programs of ``group`` row tiles run
    before those of the next column tile, so that weight tiles stay in L2."""

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 3
    swapped: bool = False
    group: int = _GROUP_M


_RULE = {
    1: (
        (8, ExpertTile(16, 128, 128, _GROUP_M, 4, 3)),
        (64, ExpertTile(32, 128, 128, _GROUP_M, 4, 3)),
        (96, ExpertTile(64, 128, 128, _GROUP_M, 4, 3)),
        (inf, ExpertTile(128, 128, 128, _GROUP_M, 8, 4)),
    ),
    2: (
        (8, ExpertTile(16, 128, 128, _GROUP_M, 4, 3)),
        (24, ExpertTile(32, 128, 64, _GROUP_M, 4, 5)),
        (48, ExpertTile(64, 128, 64, _GROUP_M, 4, 4)),
        (inf, ExpertTile(128, 256, 64, _GROUP_M, 8, 4)),
    ),
}
"""The tile for up to so many rows an expert, by the bytes of an element of the weight.  It was
measured on an H200 (docs/decisions/expert-tiles-are-measured.md)."""


def counted_tokens(num_tokens: int) -> int:
    """The number of tokens that selects a tile: the next power of two, up to a limit."""
    return min(next_power_of_2(max(num_tokens, 1)), _MOST_TOKENS)


def tuned_tile(tile: ExpertTile, *, gated: bool) -> Tile:
    """Convert a tuned tile, whose columns count gate and up together, to a ``Tile``."""
    columns = tile.columns // 2 if gated else tile.columns
    shape = (tile.rows, columns, tile.depth)
    return Tile(*shape, tile.warps, tile.stages, tile.rows < _LEAST_UNSWAPPED, tile.group)


def rows_an_expert(num_tokens: int, top_k: int, num_experts: int) -> float:
    """The rows that an expert gets on average, of the next power of two of tokens."""
    return next_power_of_2(max(num_tokens, 1)) * top_k / num_experts


class Shape(NamedTuple):
    """The facts of a layer's experts from which the rule's tile follows: how many there are, how
    many a token chooses, the intermediate size that a rank has of each, and the bytes of a weight's
    element."""

    experts: int
    top_k: int
    intermediate: int
    itemsize: int


def _rows_of_tile(num_tokens: int, shape: Shape) -> float:
    """The rows an expert, up to the number of tokens from which the tile stays the same."""
    return rows_an_expert(counted_tokens(num_tokens), shape.top_k, shape.experts)


def rule_tile(num_tokens: int, shape: Shape) -> ExpertTile:
    """The rule's tile for weights of ``itemsize`` 1 or 2, in the form of a tuned one.  Its rows are
    about those of one expert, with the number of tokens rounded up to a power of two."""
    rows = _rows_of_tile(num_tokens, shape)
    tile = next(tile for most_rows, tile in _RULE[shape.itemsize] if rows <= most_rows)
    if tile.rows >= 128:
        return tile
    # A rank's share may have short rows in the second layer.  Stages beyond their steps lose up to
    # 8 %, but fewer than three lose more.
    steps = max(cdiv(shape.intermediate, tile.depth), 3)
    return replace(tile, stages=min(tile.stages, steps))


def tile_of(num_tokens: int, shape: Shape, *, gated: bool) -> Tile:
    """The tile for this many tokens, by the rule."""
    if shape.itemsize > 2:  # float32 runs on the plain cores: keep its tiles in registers
        return Tile(16 if _rows_of_tile(num_tokens, shape) <= 16 else 32, 32, 32)
    return tuned_tile(rule_tile(num_tokens, shape), gated=gated)


def invariant_tile(itemsize: int) -> Tile:
    """The one tile for any number of tokens: a row's sums then run in the same order whatever the
    other rows are."""
    return Tile(16, 32, 32) if itemsize > 2 else Tile(64, 64, 64)


def sort_by_expert(
    topk_ids: Tensor, num_experts: int, first_expert: Tensor | None = None
) -> Launches[Sorted]:
    """Sort slots by expert, without reading anything on the host.

    There is one launch.  Above 1024 tokens there are two, so that no program reads all ids.  With
    ``first_expert``, the slots of other ranks' experts lie outside of the offsets, and one launch
    serves any number of tokens.
    """
    num_slots = topk_ids.numel()
    ids = topk_ids.contiguous()
    order = torch.empty(num_slots, dtype=torch.int32, device=ids.device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=ids.device)
    by_expert = Sorted(order, offsets)
    if first_expert is None and counted_tokens(topk_ids.shape[0]) == _MOST_TOKENS:
        return _sort_by_counts(ids, num_experts, by_expert), by_expert
    block = min(max(next_power_of_2(num_slots), 128), 2 * _SORT_BLOCK)
    launch = Launch(
        kernel="experts:_sort_by_expert_kernel",
        grid=(num_experts,),
        args={
            "ids_ptr": ids,
            "first_ptr": first_expert,
            "order_ptr": order,
            "offsets_ptr": offsets,
            "num_slots": num_slots,
        },
        constexprs={"BLOCK": block},
        num_warps=1 if block <= 1024 else 16,
        dynamic=("num_slots",),
    )
    return [launch], by_expert


def _sort_by_counts(ids: Tensor, num_experts: int, by_expert: Sorted) -> list[Launch]:
    """Count the slots of each expert in each chunk, then place them chunk by chunk."""
    num_slots = ids.numel()
    num_chunks = cdiv(num_slots, _SORT_BLOCK)
    experts_block = max(next_power_of_2(num_experts), 32)  # tl.histogram wants a bin a lane
    counts = torch.empty((num_chunks, experts_block), dtype=torch.int32, device=ids.device)
    count = Launch(
        kernel="experts:_count_by_expert_kernel",
        grid=(num_chunks,),
        args={"ids_ptr": ids, "counts_ptr": counts, "num_slots": num_slots},
        constexprs={"EXPERTS_BLOCK": experts_block, "BLOCK": _SORT_BLOCK},
        num_warps=4,
        dynamic=("num_slots",),
    )
    place = Launch(
        kernel="experts:_place_by_expert_kernel",
        grid=(num_experts * cdiv(num_chunks, _CHUNKS_A_PROGRAM),),
        args={
            "ids_ptr": ids,
            "counts_ptr": counts,
            "order_ptr": by_expert.order,
            "offsets_ptr": by_expert.offsets,
            "num_slots": num_slots,
            "num_chunks": num_chunks,
        },
        constexprs={
            "NUM_EXPERTS": num_experts,
            "EXPERTS_BLOCK": experts_block,
            "COUNTS_BLOCK": max(1, _SORT_BLOCK // experts_block),
            "CHUNKS": _CHUNKS_A_PROGRAM,
            "BLOCK": _SORT_BLOCK,
        },
        num_warps=4,
        dynamic=("num_slots", "num_chunks"),
    )
    return [count, place]


class Weight(NamedTuple):
    """The weights of all experts of a layer: ``numbers`` [num_experts, rows, columns] as they are
    held, with their scales and zero points.

    ``scheme`` says what a scale belongs to where x has scales too: "tensor", "token" or "block";
    else it is "none".  ``stored`` is the format of weights that are stored in one.
    """

    numbers: Tensor
    scale: Tensor | None
    zero: Tensor | None = None
    scheme: str = "none"
    stored: StoredFormat | None = None


class Chosen(NamedTuple):
    """What each token chose.  ``by_expert``: the sorted slots; None makes each slot a tile of its
    own."""

    topk_ids: Tensor
    first_expert: Tensor | None
    by_expert: Sorted | None


class Epilogue(NamedTuple):
    """What happens to sums: a bias of each expert, an activation, and the dtype of the result."""

    bias: Tensor | None
    activation: str | None
    out_dtype: torch.dtype


def expert_linear(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Weight,
    chosen: Chosen,
    epilogue: Epilogue,
    tile: Tile,
) -> Launches[Tensor]:
    """The GEMM by itself."""
    numbers, topk_ids, by_expert = weight.numbers, chosen.topk_ids, chosen.by_expert
    num_experts, rows, _ = numbers.shape
    k = x.shape[1]
    name, how = read_spelled(epilogue.activation or "")
    n = rows // 2 if name else rows
    x, numbers = dense_rows(x), words_of(dense_rows(numbers), weight.stored)
    num_slots = topk_ids.numel()
    # Slots of experts that are elsewhere are not written.
    allocate = torch.empty if chosen.first_expert is None else torch.zeros
    out = allocate((num_slots, n), dtype=epilogue.out_dtype, device=x.device)
    tiles_m = num_slots
    if by_expert is not None:
        tiles_m = min(num_slots, num_slots // tile.rows + num_experts)
    scales = None if weight.scale is None else bits_of(weight.scale.contiguous())
    bias = None if epilogue.bias is None else epilogue.bias.contiguous()
    launch = Launch(
        kernel="experts:_expert_linear_kernel",
        grid=(tiles_m * cdiv(n, tile.columns),),
        args={
            "x_ptr": x,
            "x_scale_ptr": x_scale,
            "weight_ptr": numbers,
            "weight_scale_ptr": scales,
            "weight_zero_ptr": None if weight.zero is None else weight.zero.contiguous(),
            "bias_ptr": bias,
            "ids_ptr": topk_ids.contiguous() if by_expert is None else None,
            "first_ptr": chosen.first_expert,
            "order_ptr": None if by_expert is None else by_expert.order,
            "offsets_ptr": None if by_expert is None else by_expert.offsets,
            "out_ptr": out,
            "tiles_m": tiles_m,
            "N": n,
            "K": k,
            "x_stride": x.stride(0),
            # The stride of a single row is arbitrary: pass 1, as if there were more rows.
            "x_scale_row": 1 if x_scale is None or x.shape[0] == 1 else x_scale.stride(0),
            "x_scale_group": 1 if x_scale is None else x_scale.stride(1),
            "expert_stride": numbers.stride(0),
            "weight_stride": numbers.stride(1),
            "expert_scales": 1 if scales is None else scales.stride(0),
            "scales_row": 1 if scales is None else scales.stride(1),
        },
        constexprs={
            "SLOTS_A_ROW": topk_ids.shape[1] if x.shape[0] == topk_ids.shape[0] else 1,
            "NUM_EXPERTS": num_experts,
            "EXPERTS_BLOCK": next_power_of_2(num_experts),
            "SCHEME": weight.scheme,
            **stored_constexprs(weight.stored, k),
            "ACTIVATION": name or None,
            "ALPHA": how.alpha,
            "LIMIT": how.limit,
            "UP_OFFSET": how.up_offset,
            "INTERLEAVED": how.interleaved,
            "SWAPPED": tile.swapped or weight.stored is not None,
            "WHOLE_STEPS": k % tile.depth == 0,
            "GROUP_M": tile.group,
            "BLOCK_M": tile.rows,
            "BLOCK_N": tile.columns,
            "BLOCK_K": tile.depth,
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
        dynamic=("tiles_m", "x_scale_group", "x_scale_row"),
    )
    return [launch], out


def combine(
    y: Tensor,
    topk_weights: Tensor,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    residual: Tensor | None,
) -> Launches[Tensor]:
    num_tokens, top_k = topk_weights.shape
    hidden = y.shape[1]
    y = dense_rows(y)
    shared, residual = (None if t is None else dense_rows(t) for t in (shared, residual))
    out = torch.empty((num_tokens, hidden), dtype=y.dtype, device=y.device)
    block = min(next_power_of_2(max(hidden, 1)), 1024)
    parts = cdiv(hidden, block)
    launch = Launch(
        kernel="experts:_combine_experts_kernel",
        grid=(num_tokens * parts,),
        args={
            "y_ptr": y,
            "weights_ptr": topk_weights.contiguous(),
            "shared_ptr": shared,
            "gate_ptr": shared_gate,
            "residual_ptr": residual,
            "out_ptr": out,
            "hidden": hidden,
            "y_stride": y.stride(0),
            "shared_stride": None if shared is None else shared.stride(0),
            "gate_stride": None if shared_gate is None else shared_gate.stride(0),
            "residual_stride": None if residual is None else residual.stride(0),
        },
        constexprs={"TOP_K": top_k, "PARTS": parts, "BLOCK": block},
        num_warps=max(block // 256, 1),
    )
    return [launch], out


class NormOfSum(NamedTuple):
    """An RMSNorm behind the experts' sum; ``offset`` as of ``rms_norm``."""

    weight: Tensor
    eps: float
    offset: float | None = None


def combine_add_norm(
    y: Tensor,
    topk_weights: Tensor,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    residual: Tensor,
    norm: NormOfSum,
) -> Launches[tuple[Tensor, Tensor]]:
    """``combine`` and ``add_rms_norm`` in one kernel, a program a token."""
    (launch,), total = combine(y, topk_weights, shared, shared_gate, residual)
    hidden = total.shape[1]
    normed, block = torch.empty_like(total), next_power_of_2(hidden)
    fused = replace(
        launch,
        kernel="experts:_combine_add_norm_kernel",
        grid=(total.shape[0],),
        args={
            **launch.args,
            "norm_weight_ptr": norm.weight,
            "normed_ptr": normed,
            "eps": norm.eps,
        },
        constexprs={"TOP_K": topk_weights.shape[1], "OFFSET": norm.offset, "BLOCK": block},
        # More warps are faster from 256 tokens on (docs/lab/experts.md).
        num_warps=min(max(block // (512 if total.shape[0] <= 128 else 128), 1), 16),
    )
    return [fused], (normed, total)
