"""Calls csrc's kernels for experts whose weights have four bits a number.

Weights are read as they are stored, and x stays bfloat16.  ``moe_packed_linear`` computes a layer
for few rows an expert.  Up to eight tokens it finds the choices of each expert by itself; above,
Triton has sorted them.  Where a norm's scale is still to come, it multiplies its sums by it.  For
more rows ``moe_packed_grouped`` is the grouped GEMM, which makes bfloat16 of a weight's numbers
while it fills its stages.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...config.weight_format import STORED_FORMATS
from ..core.cuda import why_not_built
from ..core.gate import read_spelled
from ..core.launch import run_all
from ..core.target import Target
from ..core.tiles import cdiv
from ..norm.gated_act import ACTIVATIONS
from .kernels import MOST_UNSORTED
from .moe import Call, Planned, Routed

LINEAR, GROUPED, SUM = "moe_packed_linear", "moe_packed_grouped", "moe_sum_norm"
"""The names by which ``explain`` calls the launches."""
MANY_ROWS = 32
"""Rows an expert on average up to which ``moe_packed_linear`` is faster, and from which on the
grouped GEMM is faster than Triton's kernels."""
FORMATS = ("mxfp4", "int4_g32", "int4_g64", "int4_g128")
MOST_FEATURES = 16384
_MOST_EXPERTS, _MOST_TOP_K = 512, 16
# An entry of moe_packed_linear (csrc/moe/packed.h) is an expert with eight of its rows or more.
_MOST_SLOTS, _MOST_ENTRIES, _ENTRY_ROWS, _FEWEST_COLUMNS = 8192, 512, 8, 704
_MOST_BYTES, _STEP, _WARPS, _STAGES = 218 << 10, 128, 16, 6
_SORTED = ((8, _STAGES), (16, 4))
"""Rows that a warp multiplies at once, with the stages of its ring beside them."""


def why_not_weights(call: Call) -> str:
    """Why the kernel does not read these weights, or an empty string."""
    if call.weight_format not in FORMATS:
        return f"weights of {call.weight_format or call.gate_up.dtype}"
    name, gate = read_spelled(call.activation)
    if name not in ACTIVATIONS or (name != "silu" and gate.alpha != 1):
        return f"the activation is {call.activation}"
    experts, both, hidden = *call.gate_up.shape[:2], call.x.shape[1]
    inner = both // 2
    if hidden % 64 or inner % 64 or max(hidden, inner) > MOST_FEATURES:
        return f"{hidden} and {inner} features: not multiples of 64 up to {MOST_FEATURES}"
    if experts > _MOST_EXPERTS or call.top_k > _MOST_TOP_K:
        return f"top {call.top_k} of {experts} experts: at most {_MOST_TOP_K} of {_MOST_EXPERTS}"
    return ""


def why_not_few(call: Call, rows: int, target: Target) -> str:
    """Why ``moe_packed_linear`` does not serve few tokens, whose slots are not sorted, or an empty
    string; reads no data."""
    return _why_not_widths(call, rows, _STAGES) or why_not_built(target.csrc, LINEAR)


def why_not_sorted(call: Call, rows: int, target: Target) -> str:
    """Why neither kernel serves more tokens, or an empty string; reads no data."""
    each = rows * call.top_k / call.gate_up.shape[0]
    reason = _why_not_linear(call, rows)
    if reason and each < MANY_ROWS:
        return reason
    return why_not_built(target.csrc, GROUPED if reason else LINEAR)


def _why_not_linear(call: Call, rows: int) -> str:
    """Why ``moe_packed_linear`` does not compute sorted slots, or an empty string."""
    slots, experts = rows * call.top_k, call.gate_up.shape[0]
    if slots > MANY_ROWS * experts:
        return f"{rows} tokens, {slots / experts:g} an expert: fastest up to {MANY_ROWS}"
    if slots > _MOST_SLOTS or experts + slots // _ENTRY_ROWS > _MOST_ENTRIES:
        return f"{slots} choices of {experts} experts: too many"
    few, more = (_why_not_widths(call, *how) for how in _SORTED)
    return few or more


def _why_not_widths(call: Call, rows: int, stages: int) -> str:
    for columns in (call.x.shape[1], call.gate_up.shape[1] // 2):
        if columns < _FEWEST_COLUMNS:
            return f"{columns} columns: at least {_FEWEST_COLUMNS}"
        if (most := _rows_that_fit(columns, call.weight_format or "", stages)) < rows:
            return f"{columns} columns: shared memory holds {most} rows of x, of {rows}"
    return ""


@lru_cache
def _rows_that_fit(columns: int, name: str, stages: int) -> int:
    """The rows of x that fit beside the rings of a block's warps (csrc/moe/packed.cuh)."""
    form = STORED_FORMATS[name]
    scale = 1 if form.values else 2
    warp = stages * 1024 + 2 * 16 * (columns // form.scale.unit[1]) * scale + 512
    return max(0, _MOST_BYTES - _WARPS * warp) // (cdiv(columns, _STEP) * 256 + 64)


def layers(call: Call, routed: Routed) -> Planned:
    """Run what ``plan_experts`` plans: the result has no launches left.  x is contiguous."""
    launches, topk_weights, ids, by_expert = routed
    run_all(launches)
    chosen: tuple[Tensor, Tensor | None] = (ids, None)
    if by_expert is not None:
        chosen = by_expert
    op = _op(call)
    h = gate_up(call, *chosen, op=op)
    return Planned([], down(call, h, *chosen, op=op), topk_weights)


def gate_up(
    call: Call,
    chosen: Tensor,
    offsets: Tensor | None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    op: str = LINEAR,
) -> Tensor:
    """The activations of each slot, in the order of the sort if ``op`` is the grouped GEMM.
    ``chosen``: ids, or with ``offsets`` slots by expert."""
    name, gate = read_spelled(call.activation)
    how: tuple[Any, ...] = (name, gate.alpha, gate.limit, gate.up_offset, gate.interleaved)
    held = (call.gate_up, call.gate_up_scale, call.gate_up_bias)
    if op == LINEAR:
        how = (*how, squares, eps)
    return _run(op, call, call.x, (*held, chosen, offsets), how)


def down(call: Call, h: Tensor, chosen: Tensor, offsets: Tensor | None, op: str = LINEAR) -> Tensor:
    """The second layer's results, a row for each slot."""
    held = (call.down, call.down_scale, call.down_bias)
    return _run(op, call, h, (*held, chosen, offsets), ())


def sum_norm(
    call: Call, y: Tensor, weights: Tensor, residual: Tensor, norm_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(the sum plus a residual, that times the norm's weight, the sums of its squares)."""
    run = torch.ops.fw_cuda.moe_sum_norm.default
    total, weighted, squares = run(y, weights, norm_weight, residual, call.shared)
    return total, weighted, squares


def _run(op: str, call: Call, x: Tensor, operands: tuple[Any, ...], how: tuple[Any, ...]) -> Tensor:
    floats = bool(STORED_FORMATS[call.weight_format or ""].values)
    y: Tensor = getattr(torch.ops.fw_cuda, op).default(x, *operands, call.top_k, floats, *how)
    return y


def _op(call: Call) -> str:
    """The kernel of a call that one of the two serves."""
    rows = call.x.shape[0]
    return GROUPED if rows > MOST_UNSORTED and _why_not_linear(call, rows) else LINEAR


def names(call: Call, of_triton: tuple[str, ...]) -> tuple[str, ...]:
    """The names of Triton's launches, with the kernel that replaces its GEMM."""
    op = _op(call)
    return tuple(op if name == "_expert_linear_kernel" else name for name in of_triton)
