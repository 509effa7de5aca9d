"""Weight formats of linear layers: how the numbers of a weight and of x are held, and read again.

Plain formats and FP8 are known by dtypes and shapes alone.  A stored format (``StoredFormat`` in
``config/weight_format.py``) has a name, which is an argument of ``linear``; ``dequantize`` defines
what it means.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import ceil
from typing import Any

import torch
from torch import Tensor

from ...config.weight_format import AXES, STORED_FORMATS, StoredFormat, StoredTensor
from ..core.float8 import E4M3
from ..core.tiles import cdiv

BLOCK = 128
"""Columns of x, and rows and columns of a weight, that share a scale of the format "fp8 block"."""
OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SMALLEST = 1e-12
"""Taken as the largest value where all are zero, so that no scale is zero."""


def dtype_of(tensor: StoredTensor) -> torch.dtype:
    """The dtype of a stored tensor's elements."""
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return dtype


@dataclass(frozen=True)
class WeightFormat:
    """How the numbers of a weight [N, K], and of the x [M, K] beside it, are held.

    Attributes:
        name: of the format, also in device tables.
        dtype: of both operands; of the weight alone where only that is scaled, beside an x of the
            result's dtype.
        x_scale, weight_scale: the rows and columns that share a float32 scale, 0 for all of them;
            None for an operand without scales.
        stored: how the weight is stored, if the format is admitted by name.
    """

    name: str
    dtype: torch.dtype
    x_scale: tuple[int, int] | None = None
    weight_scale: tuple[int, int] | None = None
    stored: StoredFormat | None = None

    @classmethod
    def of(cls, stored: StoredFormat) -> WeightFormat:
        """The format of weights that are stored so."""
        x_scale = (0 if stored.static else 1, stored.x_columns) if stored.x_dtype else None
        return cls(stored.name, dtype_of(stored.weight), x_scale, stored.scale.unit, stored)

    @property
    def scaled(self) -> bool:
        return self.weight_scale is not None

    @property
    def quantizes_x(self) -> bool:
        """Whether x has scales too."""
        return self.x_scale is not None

    def scale_shapes(self, m: Any, n: int, k: int) -> tuple[tuple[Any, int], tuple[int, int]]:
        """Shapes of the scales of x [m, k] and weight [n, k], both of which are scaled."""
        assert self.x_scale and self.weight_scale
        return _shape(self.x_scale, m, k), _shape(self.weight_scale, n, k)


def _shape(unit: tuple[int, int], rows: Any, columns: int) -> tuple[Any, int]:
    rows_a_scale, columns_a_scale = unit
    return (
        1 if not rows_a_scale else rows if rows_a_scale == 1 else cdiv(rows, rows_a_scale),
        1 if not columns_a_scale else cdiv(columns, columns_a_scale),
    )


WEIGHT_FORMATS: dict[str, WeightFormat] = {
    found.name: found
    for found in (
        *(WeightFormat(str(d).removeprefix("torch."), d) for d in (*OUT_DTYPES, torch.float64)),
        *map(WeightFormat.of, STORED_FORMATS.values()),
        WeightFormat("fp8 tensor", E4M3, (0, 0), (0, 0)),
        WeightFormat("fp8 token", E4M3, (1, 0), (1, 0)),
        WeightFormat("fp8 block", E4M3, (1, BLOCK), (BLOCK, BLOCK)),
        WeightFormat("fp8 weight", E4M3, None, (1, 0)),
        WeightFormat("fp8 block weight", E4M3, None, (BLOCK, BLOCK)),
    )
}


def describe_stored(
    name: str, x: Any, x_scale: Any, tensors: dict[str, Any]
) -> tuple[WeightFormat, tuple[int, int]]:
    """The format of this name, and the shape of the weight, which its tensors must fit.

    Args:
        tensors: by name, as of ``StoredFormat.tensors``; None for those that are not given.

    Raises:
        ValueError: no such format is admitted, a tensor is missing or has another dtype or shape.
    """
    found = WEIGHT_FORMATS.get(name)
    if found is None or found.stored is None:
        known = ", ".join(repr(f.name) for f in WEIGHT_FORMATS.values() if f.stored)
        raise ValueError(
            f"linear: weight_format is {name!r}, expected one of {known}; admit_weight_format "
            "admits another"
        )
    stored = found.stored
    if given := [n for n, t in tensors.items() if t is not None and n not in stored.tensors]:
        raise ValueError(f"linear of {name}: {given[0]} is given, but the format has none")
    weight, in_features = tensors["weight"], int(x.shape[-1])
    rows = weight.shape[stored.weight.dim(0)] * (stored.weight.steps[0] or 1)
    for argument, tensor in stored.tensors.items():
        held, dtype = tensors[argument], dtype_of(tensor)
        try:
            shape = tensor.shape(rows, in_features)
        except ValueError as error:
            raise ValueError(f"linear of {name} by x {[*x.shape]}: {error}") from error
        if held is None:
            raise ValueError(
                f"linear of {name}: {argument} is missing, expected {dtype} {[*shape]}"
            )
        if held.dtype != dtype or tuple(held.shape) != shape:
            raise ValueError(
                f"linear of {name}: {argument} is {held.dtype} {[*held.shape]}, expected {dtype} "
                f"{[*shape]} for a weight {[rows, in_features]}"
            )
    _check_x(stored, x, x_scale)
    return found, (rows, in_features)


def _check_x(stored: StoredFormat, x: Any, x_scale: Any) -> None:
    if not stored.x_dtype:
        if x.dtype not in OUT_DTYPES or x_scale is not None:
            scaled = "without" if x_scale is None else "with"
            raise ValueError(
                f"linear of {stored.name}: x is {x.dtype} {scaled} x_scale, expected a "
                "floating-point dtype without: the weight alone is quantized"
            )
        return
    columns = cdiv(x.shape[-1], stored.x_columns) if stored.x_columns else 1
    shape = (1 if stored.static else x.shape[0], columns)
    if (
        x.dtype != getattr(torch, stored.x_dtype)
        or x_scale is None
        or x_scale.dtype != torch.float32
        or tuple(x_scale.shape) != shape
    ):
        scale = "no x_scale" if x_scale is None else f"x_scale {x_scale.dtype} {[*x_scale.shape]}"
        raise ValueError(
            f"linear of {stored.name}: x is {x.dtype} with {scale}, expected torch."
            f"{stored.x_dtype} with torch.float32 {[*shape]}"
        )


def dequantize(
    stored: StoredFormat,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> Tensor:
    """The numbers of a stored weight, [out_features, in_features] in float32: the definition of the
    format."""
    units = _units(unpack(stored.weight, weight), scales := unpack(stored.scale, scale))
    if stored.values:
        numbers = _look_up(units, stored.values)
    else:
        # Integers of up to 16 bits and their differences are exact in float32.
        numbers = units.to(torch.float32 if stored.weight.bits <= 16 else torch.float64)
        if stored.zero is not None and zero is not None:
            zeros = unpack(stored.zero, zero).to(numbers.dtype) + stored.zero_offset
            numbers -= zeros[:, None, :, None]
        elif stored.offset:
            numbers -= stored.offset
        numbers = numbers.float()
    numbers *= scales[:, None, :, None]
    numbers = numbers.flatten(2).flatten(0, 1)
    return numbers if row_scale is None else numbers.mul_(row_scale.float())


def unpack(tensor: StoredTensor, elements: Tensor) -> Tensor:
    """The numbers of a stored tensor, each by itself, [rows, columns]: integers in a dtype that
    holds them, one of 8 bits if that is enough, others in float32."""
    elements = elements.t() if tensor.transposed else elements
    if elements.is_floating_point():
        return elements.float()
    packing = tensor.packing
    if packing is None:
        return elements
    # The stack is several times as large as the elements, so its numbers are narrow.
    if elements.dtype not in (torch.uint8, torch.int64):
        elements = elements.to(torch.int32)
    narrow = torch.int8 if packing.signed else torch.uint8
    narrow = narrow if packing.bits <= 8 else elements.dtype
    mask, half = 2**packing.bits - 1, 2 ** (packing.bits - 1) if packing.signed else 0
    fields = [(elements >> packing.bits * field) & mask for field in field_order(tensor)]
    if half:
        fields = [(field ^ half) - half for field in fields]
    axis = AXES.index(packing.along)
    stacked = torch.stack([field.to(narrow) for field in fields], axis + 1)
    return stacked.flatten(axis, axis + 1)


def pack(tensor: StoredTensor, numbers: Tensor) -> Tensor:
    """The stored tensor of numbers [rows, columns]: the inverse of ``unpack``."""
    if (packing := tensor.packing) is not None:
        axis, mask = AXES.index(packing.along), 2**packing.bits - 1
        wide = torch.uint8 if tensor.dtype == "uint8" and not packing.signed else torch.int64
        fields = numbers.to(wide).unflatten(axis, (-1, tensor.packed)).unbind(axis + 1)
        numbers = torch.zeros_like(fields[0])
        for field, values in zip(field_order(tensor), fields, strict=True):
            numbers |= (values & mask) << (packing.bits * field)
    elements = numbers.to(dtype_of(tensor))
    return elements.t().contiguous() if tensor.transposed else elements


def quantize(stored: StoredFormat, weight: Tensor) -> dict[str, Tensor]:
    """The tensors of a weight [rows, columns] in a format, rounded to nearest.  Scales reach the
    largest number of their unit; with zero points, the smallest and the largest."""
    sizes = stored.scale.unit[0], stored.scale.unit[1] or weight.shape[1]
    units = weight.float().unflatten(1, (-1, sizes[1])).unflatten(0, (-1, sizes[0]))
    low = -(2 ** (stored.weight.bits - 1)) if stored.weight.signed else 0
    high = low + 2**stored.weight.bits - 1
    largest = units.abs().amax((1, 3), keepdim=True).clamp(min=_SMALLEST)
    tensors: dict[str, Tensor] = {}
    if stored.row_scale is not None:
        ranges = largest.amax(2, keepdim=True) / max(map(abs, stored.values))
        row_scale = (ranges / torch.finfo(dtype_of(stored.scale)).max).float()
        tensors["weight_row_scale"] = pack(stored.row_scale, row_scale[:, 0, 0])
        units, largest = units / row_scale, largest / row_scale
    if stored.zero is not None:
        least, most = (f((1, 3), keepdim=True) for f in (units.amin, units.amax))
        least, most = least.clamp(max=0), most.clamp(min=0)
        scale = _stored_scale(stored, (most - least).clamp(min=_SMALLEST) / (high - low))
        zero = (low - least / scale).round().clamp(low, high)
        tensors["weight_zero"] = pack(stored.zero, (zero - stored.zero_offset)[:, 0, :, 0])
    elif stored.values:
        scale = _stored_scale(stored, largest / max(map(abs, stored.values)))
        integers = _nearest(units / scale, stored.values)
    else:
        scale = _stored_scale(stored, largest / (high - stored.offset))
    if not stored.values:
        shift = zero if stored.zero is not None else stored.offset
        integers = (units / scale).round_().add_(shift).clamp_(low, high)
    tensors["weight"] = pack(stored.weight, integers.flatten(2).flatten(0, 1))
    tensors["weight_scale"] = pack(stored.scale, scale[:, 0, :, 0])
    return tensors


def field_order(tensor: StoredTensor) -> list[int]:
    """The field of an element that holds each of the neighbours in it."""
    assert tensor.packing is not None
    order = tensor.packing.order or range(tensor.packed)
    return [order.index(neighbour) for neighbour in range(tensor.packed)]


def _units(integers: Tensor, scales: Tensor) -> Tensor:
    """[units, rows of one, units, columns of one]: the integers by the scale that they share."""
    rows, columns = (n // units for n, units in zip(integers.shape, scales.shape, strict=True))
    units: Tensor = integers.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return units


def _look_up(codes: Tensor, values: Sequence[float]) -> Tensor:
    """The value of each code.  The table is made of numbers in the code: a traced graph could hold
    no copy of a tensor."""
    table = torch.stack(
        [torch.full((), value, dtype=torch.float32, device=codes.device) for value in values]
    )
    return table.index_select(0, codes.int().flatten()).view(codes.shape)


def _nearest(numbers: Tensor, values: tuple[float, ...]) -> Tensor:
    """The code of the value nearest to each number, of two as near that of the lower one."""
    fine, table = _nearest_codes(values)
    place = (numbers * fine).ceil_().int() + len(table) // 2
    place.clamp_(0, len(table) - 1)
    # A number for each multiple of the grid: many times as fast as a search among the values.
    codes = torch.tensor(table, dtype=torch.uint8, device=numbers.device)
    return codes.index_select(0, place.flatten()).view(numbers.shape)


@cache
def _nearest_codes(values: tuple[float, ...]) -> tuple[int, tuple[int, ...]]:
    """(multiples of a grid in 1, the code of the value nearest to each multiple): between two of
    them all numbers have the same nearest value.  A grid that is too coarse for the values, finer
    than which no table is, moves the borders between them by a 4096th of the largest."""
    order = sorted(range(len(values)), key=values.__getitem__)
    borders = [(values[a] + values[b]) / 2 for a, b in pairwise(order)]
    most = max(map(abs, values))
    fine, finest = 1, max(1, int(4096 / most))
    while fine < finest and not all((border * fine).is_integer() for border in borders):
        fine *= 2
    half = ceil(most * fine)
    places = (bisect_left(borders, at / fine) for at in range(-half, half + 1))
    return fine, tuple(order[place] for place in places)


def _stored_scale(stored: StoredFormat, scale: Tensor) -> Tensor:
    """Scales as the format can hold them; powers of two are rounded up, so that nothing is cut."""
    if stored.scale.dtype == "float8_e8m0fnu":
        scale = torch.exp2(scale.log2().ceil())
        return scale.to(torch.float8_e8m0fnu).float()
    dtype = dtype_of(stored.scale)
    least = torch.finfo(dtype).tiny * torch.finfo(dtype).eps  # the least that is not zero
    return scale.clamp(min=least).to(dtype).float()
