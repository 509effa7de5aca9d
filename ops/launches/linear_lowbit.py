"""Describes the launches of GEMMs by low-bit weights, of formats that ``why_not_words``
(``config/weight_format.py``) admits.  Tiles and splits follow from rows, columns and groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...config.weight_format import StoredFormat, StoredTensor
from ..core.launch import Launch, Launches
from ..core.tiles import cdiv, dense_rows, next_power_of_2
from .linear_fp8 import Tile, splits_of, tiling
from .stored import bits_of, kind_of, offset_of

_LINES_AHEAD = 2
# By most rows of x.  None of these tiles has run on a GPU; their shapes are those of the FP8 GEMM.
_TILES = {
    8: Tile(8, 64, 128, stages=6, swapped=True, least_steps=4, an_sm=3),
    16: Tile(16, 64, 128, stages=6, swapped=True, least_steps=4, an_sm=3),
    32: Tile(32, 64, 128, stages=5, swapped=True, least_steps=4, an_sm=3),
    64: Tile(64, 64, 128, swapped=True, least_steps=8),
    128: Tile(128, 64, 128, warps=8, swapped=True, least_steps=8, an_sm=1),
    1 << 62: Tile(128, 128, 64, warps=8, swapped=True, stages=3),
}
# For float32, which runs on the plain cores.
_WIDE = Tile(32, 32, 32, swapped=True)
# One tile whatever the number of rows, unsplit, so that a row's sum does not depend on others.
_INVARIANT = Tile(64, 64, 128, swapped=True)
_BY_FIELD_ROWS = 32
"""Up to so many rows, a step multiplies one field of all words at a time."""
_DEQUANTIZED_ROWS, _DEQUANTIZED_WORDS = 16, 64


@dataclass(frozen=True)
class LowBit:
    """The tensors of a weight that is stored in words.

    Attributes:
        stored: the format.
        weight, scale, zero, row_scale: as of ``StoredFormat.tensors``.
    """

    stored: StoredFormat
    weight: Tensor
    scale: Tensor
    zero: Tensor | None = None
    row_scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the weight."""
        return self.weight.shape[0], self.weight.shape[1] * self.stored.weight.packed

    def fits(self) -> bool:
        """Whether the weight can be read as words where it lies."""
        w = self.weight
        aligned = w.data_ptr() % 4 == 0 and w.stride(0) * w.itemsize % 4 == 0
        return w.stride(1) == 1 and aligned

    def operands(self) -> dict[str, Any]:
        """The kernels' arguments of the weight."""
        words = self.weight if self.weight.itemsize == 4 else self.weight.view(torch.int32)
        scale, zero = bits_of(self.scale), self.zero
        row, group = _strides(self.stored.scale, scale)
        zero_row, zero_group = (None, None)
        if zero is not None and self.stored.zero is not None:
            zero_row, zero_group = _strides(self.stored.zero, zero)
        return {
            "weight_ptr": words,
            "weight_stride": words.stride(0),
            "scale_ptr": scale,
            "scale_row_stride": row,
            "scale_group_stride": group,
            "zero_ptr": zero,
            "zero_row_stride": zero_row,
            "zero_group_stride": zero_group,
            "row_scale_ptr": self.row_scale,
        }

    def constants(self) -> dict[str, Any]:
        """What the format fixes in the kernels' code."""
        stored, weight = self.stored, self.stored.weight
        return {
            "ZERO_OFFSET": float(stored.zero_offset),
            "FIELDS": _fields(weight),
            "BITS": weight.bits,
            "KIND": kind_of(stored),
            "OFFSET": offset_of(stored),
            "GROUP": stored.scale.unit[1] or self.shape[1],
        }


@dataclass(frozen=True)
class AddedNorm:
    """An RMS norm of a sum: its weight, what is added to that, or None, and its eps."""

    weight: Tensor
    offset: float | None
    eps: float


@dataclass(frozen=True)
class Normed:
    """What the norm of some rows is found by: sums of squares [rows, parts], and eps."""

    squares: Tensor
    eps: float


_UNJOINED: dict[str, Any] = dict.fromkeys(
    (
        *("bias_ptr", "norm_ptr", "norm_parts", "norm_eps", "add_ptr", "add_weight"),
        *("add_offset", "add_total", "add_squares", "out_ptr"),
    )
)
"""The kernel's arguments of what may be joined to a layer, in its order."""


def _strides(tensor: StoredTensor, held: Tensor) -> tuple[int, int]:
    """Steps in memory to the next row's and the next group's number."""
    return held.stride(tensor.dim(0)), held.stride(tensor.dim(1))


def _fields(weight: StoredTensor) -> int:
    """The field that holds each column of a word, a hexadecimal digit each, the first lowest."""
    an_element = weight.packed
    order = (weight.packing.order if weight.packing else ()) or tuple(range(an_element))
    columns = range(32 // weight.bits)
    fields = [c // an_element * an_element + order.index(c % an_element) for c in columns]
    return sum(field << (4 * column) for column, field in enumerate(fields))


def tile_of(m: int, itemsize: int) -> Tile:
    """The tile for ``m`` rows of x, whose numbers have ``itemsize`` bytes."""
    if itemsize > 2:
        return _WIDE
    return next(tile for most, tile in _TILES.items() if m <= most)


def linear(
    x: Tensor,
    weight: LowBit,
    bias: Tensor | None,
    activation: str | None,
    norm: Normed | None = None,
    *,
    invariant: bool = False,
) -> Launches[Tensor]:
    """``norm``: x lacks the scale that a norm finds.  ``invariant``: a row has the same bits
    whatever the other rows are."""
    gates = activation in ("silu", "gelu_tanh")
    width = weight.shape[0] // 2 if gates else weight.shape[0]
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    more: dict[str, Any] = {**_UNJOINED, "bias_ptr": bias, "out_ptr": out}
    if norm is not None:
        more |= {"norm_ptr": norm.squares, "norm_parts": norm.squares.shape[1]}
        more["norm_eps"] = norm.eps
    return [_launch(x, weight, more, activation, invariant)], out


def linear_add(
    x: Tensor, weight: LowBit, bias: Tensor | None, residual: Tensor, norm: AddedNorm
) -> Launches[tuple[Tensor, Tensor, Normed]]:
    """A layer, the add of a residual and the norm of the sum but for its scale.

    Returns:
        the sum times the norm's weight, the sum, both like the residual, and what the next layer's
        ``norm`` is.
    """
    n, m = weight.shape[0], residual.numel() // max(weight.shape[0], 1)
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    parts = cdiv(n, tile_of(m, x.dtype.itemsize).columns)
    squares = torch.empty((m, parts), dtype=torch.float32, device=x.device)
    more = _UNJOINED | {
        "bias_ptr": bias,
        "add_ptr": residual,
        "add_weight": norm.weight,
        "add_offset": norm.offset,
        "add_total": total,
        "add_squares": squares,
        "out_ptr": out,
    }
    return [_launch(x, weight, more, None, False)], (out, total, Normed(squares, norm.eps))


def _launch(
    x: Tensor, weight: LowBit, more: dict[str, Any], activation: str | None, invariant: bool
) -> Launch:
    n, k = weight.shape
    rows, constants = dense_rows(x).reshape(-1, k), weight.constants()
    m, narrow = rows.shape[0], x.dtype.itemsize <= 2
    tile = _INVARIANT if invariant and narrow else tile_of(m, x.dtype.itemsize)
    by_field = m <= _BY_FIELD_ROWS and not invariant and narrow
    splits = 1 if invariant else splits_of(tile, m, n, k)
    how = tiling(tile, (m, n, k), x.device, splits=splits, lines_ahead=_LINES_AHEAD)
    group = constants["GROUP"]
    scaling = "sums" if group == k else "words" if group % tile.depth else "numbers"
    if scaling == "numbers" and by_field:  # few sums, which are rounded less
        scaling = "steps"
    return Launch(
        kernel="lowbit:_linear_lowbit_kernel",
        grid=how.grid,
        args={
            "x_ptr": rows,
            "x_stride": rows.stride(0) if m > 1 else k,
            **weight.operands(),
            **more,
            **how.args,
        },
        constexprs={
            **constants,
            "SCALING": scaling,
            "ACTIVATION": activation,
            "GATES": activation in ("silu", "gelu_tanh"),
            "BY_FIELD": by_field,
            "SQUARES": next_power_of_2(more["norm_parts"] or 1),
            **how.constexprs,
        },
        num_warps=tile.warps,
        num_stages=tile.stages,
        dynamic=("M", "splits"),
    )


def dequantize(weight: LowBit, dtype: torch.dtype) -> Launches[Tensor]:
    """The weight's numbers, [rows, columns] of ``dtype``."""
    n, k = weight.shape
    out = torch.empty((n, k), dtype=dtype, device=weight.weight.device)
    words = min(next_power_of_2(k * weight.stored.weight.bits // 32), _DEQUANTIZED_WORDS)
    columns = words * 32 // weight.stored.weight.bits
    launch = Launch(
        kernel="lowbit:_dequantize_kernel",
        grid=(cdiv(n, _DEQUANTIZED_ROWS) * cdiv(k, columns),),
        args={**weight.operands(), "out_ptr": out, "N": n, "K": k},
        constexprs={**weight.constants(), "ROWS": _DEQUANTIZED_ROWS, "WORDS": words},
        num_warps=4,
    )
    return [launch], out
