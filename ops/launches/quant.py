"""Describes the launches of quantization to FP8 or int8, alone or after a norm or an activation.

A scheme is a static scale [1, 1], or the number of columns that share a dynamic scale; 0 means a
scale for each row.  Each function returns launches, and the tensors that they will write.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from ..core.counters import zeros_between_launches
from ..core.device_table import num_sms
from ..core.float8 import E4M3, E4M3_MAX
from ..core.launch import Launch, Launches
from ..core.tiles import cdiv, dense_rows, next_power_of_2
from .norm import check as check_norm, row_tile

# A program takes several rows if one has fewer elements than this, as in ``norm.py``.
_TILE_ELEMENTS = 1024

# A few wide rows with a scale each are split, this many columns a program.  The programs wait for
# each other, so all of them must run at once.
_SPLIT_BLOCK, _LEAST_SPLIT_WIDTH, _MAX_PARTS = 1024, 8192, 32
_MOST_PROGRAMS_WAITING, _MOST_SPLIT_ROWS = 128, 16
# More rows than this are normalized by programs that take several in turn, as many programs as run
# at once: (warps of a multiprocessor, registers of a thread).  A scale for each 128 columns or a
# residual needs "more" registers.
_MANY_ROWS = 1024
_MANY_ADDED_ROWS, _WIDEST_ADDED = 2048, 2048
_WARPS_OF_MANY = {"more": (32, 64), "few": (40, 48)}

GROUP = 128
"""Number of columns that share a scale in the block scheme."""
WHOLE_ROW = 0
"""Stands for the width of a row in place of a number of columns: each token has one scale."""

LARGEST = {E4M3: E4M3_MAX, torch.int8: 127.0}
"""The dtypes of quantized values, and what the largest magnitude of a scale's group becomes."""

Scheme: TypeAlias = Tensor | int
Quantized: TypeAlias = tuple[Tensor, ...]
"""(q,), or with dynamic scales (q, scale)."""


def empty_results(x: Tensor, width: int, scheme: Scheme, dtype: torch.dtype = E4M3) -> Quantized:
    """Empty results of ``width`` columns.  Scales are column-major, as GEMMs read them."""
    rows = x.shape[0]
    q = x.new_empty((rows, width), dtype=dtype)
    if isinstance(scheme, Tensor):
        return (q,)
    groups = width // scheme if scheme else 1
    return q, x.new_empty((groups, rows), dtype=torch.float32).t()


def _tile_rows(block: int) -> int:
    return max(_TILE_ELEMENTS // block, 1)


def _group(scheme: Scheme, block: int) -> int:
    """The kernel's GROUP: the number of columns that share a scale, or 0 for a static scale."""
    return 0 if isinstance(scheme, Tensor) else scheme or block


def quantize(
    x: Tensor, scheme: Scheme, activation: str = "none", dtype: torch.dtype = E4M3
) -> Launches[Quantized]:
    """``x``, or the gated activation of x = gate | up, quantized."""
    x = dense_rows(x)
    rows, width = x.shape[0], x.shape[1] if activation == "none" else x.shape[1] // 2
    results = empty_results(x, width, scheme, dtype)
    if not isinstance(scheme, Tensor) and scheme == 0 and x.device.type != "cpu":
        # Allocated even if these rows are not split: the next call may be captured.
        state = _split_state(x.device)
        if width >= _LEAST_SPLIT_WIDTH and rows <= _most_split_rows(width):
            return [_quantize_split(x, width, results, state, activation)], results
    elements = 512 if activation == "none" else 256  # of a warp
    block = next_power_of_2(max(width, 1))
    if isinstance(scheme, Tensor) or scheme:
        block = min(block, 8 * elements)
        divisor = width & -width
        if block > divisor >= 256:  # whole tiles: masked lanes would take as long as others
            block = divisor
    parts = cdiv(width, block)
    tile_rows = _tile_rows(block)
    launch = Launch(
        kernel="quant:_quant_kernel",
        grid=(cdiv(rows, tile_rows) * parts,),
        args={
            "x_ptr": x,
            "q_ptr": results[0],
            "scale_ptr": scheme if isinstance(scheme, Tensor) else results[1],
            "num_rows": rows,
            "width": width,
            "row_stride": x.stride(0),
        },
        constexprs={
            "ACTIVATION": activation,
            "PARTS": parts,
            "GROUP": _group(scheme, block),
            "ROWS": tile_rows,
            "BLOCK": block,
        },
        num_warps=min(max(tile_rows * block // elements, 1), 32),
        dynamic=("num_rows",),
    )
    return [launch], results


def _most_split_rows(width: int) -> int:
    """The largest power of two of rows whose programs all run at once; 0 if rows are too wide."""
    parts = cdiv(width, _SPLIT_BLOCK)
    return 0 if parts > _MAX_PARTS else 1 << ((_MOST_PROGRAMS_WAITING // parts).bit_length() - 1)


def _split_state(device: torch.device) -> Tensor:
    """The state of split rows: for each row, a word for each part and the number of the turn."""
    return zeros_between_launches(device, _MOST_SPLIT_ROWS * (_MAX_PARTS + 1), torch.int64)


def _quantize_split(
    x: Tensor, width: int, results: Quantized, state: Tensor, activation: str
) -> Launch:
    """Several programs a row.  They wait for each other, which an interpreter cannot run."""
    parts = cdiv(width, _SPLIT_BLOCK)
    return Launch(
        kernel="quant:_quant_split_kernel",
        grid=(x.shape[0] * parts,),
        args={
            "x_ptr": x,
            "q_ptr": results[0],
            "scale_ptr": results[1],
            "state_ptr": state,
            "width": width,
            "row_stride": x.stride(0),
        },
        constexprs={
            "ACTIVATION": activation,
            "PARTS": parts,
            "MAX_PARTS": _MAX_PARTS,
            "BLOCK": _SPLIT_BLOCK,
        },
        num_warps=4,
    )


def norm_quantize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    scheme: Scheme,
    dtype: torch.dtype = E4M3,
) -> Launches[Quantized]:
    """The norm of ``x [+ residual]``, quantized; with a residual, the sum comes last."""
    check_norm(x, residual, weight)
    x = dense_rows(x)
    rows, hidden = x.shape
    added = None if residual is None else dense_rows(residual)
    results = empty_results(x, hidden, scheme, dtype)
    total = None if added is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    # The tile of the unfused kernel: a sum in another order could round to other bits.
    tile, num_warps = row_tile(x, rows, added is not None)
    grid, registers = cdiv(rows, tile["ROWS"]), 0
    many = _takes_rows_in_turn(x, added)
    if many:
        tile, num_warps = row_tile(x, rows, adds=False)
        needs = "more" if added is not None or _group(scheme, 0) == GROUP else "few"
        warps, registers = _WARPS_OF_MANY[needs]
        grid = min(rows, num_sms(x.device) * (warps // num_warps))
        tile = {name: tile[name] for name in ("BLOCK", "WHOLE")}
    launch = Launch(
        kernel=f"quant:_norm_quant_{'rows_' if many else ''}kernel",
        grid=(grid,),
        args={
            "x_ptr": x,
            "x_stride": x.stride(0),
            "residual_ptr": added,
            "residual_stride": 0 if added is None else added.stride(0),
            "weight_ptr": weight,
            "q_ptr": results[0],
            "scale_ptr": scheme if isinstance(scheme, Tensor) else results[1],
            "residual_out_ptr": total,
            "num_rows": rows,
            "hidden": hidden,
            "eps": eps,
        },
        constexprs={"ADD": added is not None, "GROUP": _group(scheme, tile["BLOCK"]), **tile},
        num_warps=num_warps,
        dynamic=("num_rows",),
        max_registers=registers,
    )
    return [launch], results if total is None else (*results, total)


def _takes_rows_in_turn(x: Tensor, added: Tensor | None) -> bool:
    rows, hidden = x.shape
    widest, both = (8192, (x,)) if added is None else (_WIDEST_ADDED, (x, added))
    if rows <= (_MANY_ROWS if added is None else _MANY_ADDED_ROWS):
        return False
    # The kernel reads 16 aligned bytes at a time, in pairs of elements; a thread holds 16 of these.
    aligned = all(t.storage_offset() % 8 == t.stride(0) % 8 == 0 for t in both) and hidden % 2 == 0
    return x.dtype.itemsize == 2 and aligned and _TILE_ELEMENTS <= hidden <= widest
