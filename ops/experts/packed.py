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
MOST_LINEAR_ROWS = 32
"""Most rows an expert on average for which ``moe_packed_linear`` runs where slots are sorted."""
FORMATS = ("mxfp4", "int4_g32", "int4_g64", "int4_g128")
_MOST_EXPERTS, _MOST_TOP_K, _MOST_SLOTS, _MOST_ENTRIES = 512, 16, 8192, 512
_BLOCK_ROWS = 16
"""Rows that a warp of ``moe_packed_linear`` multiplies at once, where slots are sorted."""
_MOST_BYTES, _STEP, _WARPS = 218 << 10, 128, 16


def why_not_weights(call: Call) -> str:
    """Why the kernel does not read these weights, or an empty string."""
    if call.weight_format not in FORMATS:
        return f"weights of {call.weight_format or call.gate_up.dtype}"
    name, gate = read_spelled(call.activation)
    if name not in ACTIVATIONS or (name != "silu" and gate.alpha != 1):
        return f"the activation is {call.activation}"
    experts, both, hidden = *call.gate_up.shape[:2], call.x.shape[1]
    inner = both // 2
    if hidden % 64 or inner % 64:
        return f"{hidden} and {inner} features: not multiples of 64"
    if experts > _MOST_EXPERTS or call.top_k > _MOST_TOP_K:
        return f"top {call.top_k} of {experts} experts: at most {_MOST_TOP_K} of {_MOST_EXPERTS}"
    return ""


def why_not_few(call: Call, rows: int, target: Target) -> str:
    """Why the kernels do not serve few tokens, whose slots are not sorted, or an empty string;
    reads no data."""
    for columns in _widths(call):
        if (most := _rows_that_fit(columns, call.weight_format, few=True)) < rows:
            return f"{columns} columns: shared memory holds {most} rows of x, of {rows}"
    return why_not_built(target.csrc, LINEAR)


def _widths(call: Call) -> tuple[int, int]:
    return call.x.shape[1], call.gate_up.shape[1] // 2


def _is_linear(call: Call) -> bool:
    """Whether ``moe_packed_linear`` computes sorted slots, or else the grouped GEMM."""
    slots, experts = call.x.shape[0] * call.top_k, call.gate_up.shape[0]
    return (
        slots <= min(MOST_LINEAR_ROWS * experts, _MOST_SLOTS)
        and experts + slots // _BLOCK_ROWS <= _MOST_ENTRIES
        and all(
            _rows_that_fit(columns, call.weight_format, few=False) >= _BLOCK_ROWS
            for columns in _widths(call)
        )
    )


@lru_cache
def _rows_that_fit(columns: int, name: str, *, few: bool) -> int:
    """The rows of x that fit beside the rings of a block's warps (csrc/moe/packed.cu)."""
    form = STORED_FORMATS[name]
    scale = 1 if form.values else 2
    stages, steps = 6 if few else 4, cdiv(columns, _STEP)
    buffers = 2 + (stages - 1) // steps
    warp = stages * 1024 + buffers * 16 * (columns // form.scale.unit[1]) * scale + 512
    return max(0, _MOST_BYTES - _WARPS * warp) // (steps * 256 + 64)


def layers(call: Call, routed: Routed) -> Planned:
    """Run what ``plan_experts`` plans: the result has no launches left.  x is contiguous."""
    launches, topk_weights, ids, by_expert = routed
    run_all(launches)
    if by_expert is None:
        chosen, op = (ids, None), LINEAR
    else:
        chosen, op = by_expert, LINEAR if _is_linear(call) else GROUPED
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


def names(call: Call, of_triton: tuple[str, ...]) -> tuple[str, ...]:
    """The names of Triton's launches, with the kernel that replaces its GEMM."""
    op = LINEAR if call.x.shape[0] <= MOST_UNSORTED or _is_linear(call) else GROUPED
    return tuple(op if name == "_expert_linear_kernel" else name for name in of_triton)
