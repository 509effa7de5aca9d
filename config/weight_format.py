"""Describes weight formats as data: the tensors of a linear layer, and what their numbers mean.

A ``StoredFormat`` is all that loading, sharding, merging and quantizing know of a format.
``admit_weight_format`` (``ops/linear/kernels.py``) lists one here, with its kernels.  Nothing in
this file imports torch, so that a checkpoint can be refused before that is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from typing import Literal

Axis = Literal["rows", "columns"]
AXES: tuple[Axis, ...] = ("rows", "columns")
"""The axes of a weight [N, K]: its output features, then its input features."""

FLOAT_BITS = {
    "float64": 64,
    "float32": 32,
    "bfloat16": 16,
    "float16": 16,
    "float8_e4m3fn": 8,
    "float8_e8m0fnu": 8,
}
INT_BITS = {"int8": 8, "uint8": 8, "int16": 16, "int32": 32, "int64": 64}
QUANTIZED_X = ("", "float8_e4m3fn")
"""The dtypes in which x can be multiplied: "" as it is, or one that an op quantizes it to."""


@dataclass(frozen=True)
class Packing:
    """Several small integers in one element of a tensor.

    Attributes:
        bits: of one of them.
        along: the axis of the weight whose neighbours are packed together.
        signed: they are two's complement; else from 0 to ``2**bits - 1``.
        order: which of the neighbours each field of an element holds, from the lowest bits on; in
            ascending order if it is empty.
    """

    bits: int
    along: Axis = "columns"
    signed: bool = False
    order: tuple[int, ...] = ()


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a layer, as the checkpoint and the layer hold it.

    Attributes:
        suffixes: its names in a checkpoint, behind that of the module; the first that is there is
            read.
        dtype: torch's name for it.
        unit: how many (rows, columns) of the weight share one of its numbers; 0: all of them.
        packing: of its integers, if an element holds several.
        transposed: its first dimension is that of the weight's columns.
    """

    suffixes: tuple[str, ...]
    dtype: str
    unit: tuple[int, int] = (1, 1)
    packing: Packing | None = None
    transposed: bool = False

    @property
    def packed(self) -> int:
        """How many numbers an element holds."""
        return INT_BITS[self.dtype] // self.packing.bits if self.packing else 1

    @property
    def bits(self) -> int:
        """The number of bits of one of its integers."""
        return self.packing.bits if self.packing else INT_BITS[self.dtype]

    @property
    def signed(self) -> bool:
        """Whether its integers may be negative."""
        return self.packing.signed if self.packing else not self.dtype.startswith("u")

    @property
    def steps(self) -> tuple[int, int]:
        """How many (rows, columns) of the weight one element covers; 0: all of them."""
        along = self.packing.along if self.packing else ""
        rows, columns = (
            unit * (self.packed if axis == along else 1)
            for axis, unit in zip(AXES, self.unit, strict=True)
        )
        return rows, columns

    def dim(self, axis: int) -> int:
        """The tensor's dimension for rows (0) or columns (1) of the weight."""
        return 1 - axis if self.transposed else axis

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The tensor's shape for a weight [rows, columns].

        Raises:
            ValueError: they are not whole units of it.
        """
        if reason := self.why_not((rows, columns)):
            raise ValueError(f"a weight [{rows}, {columns}] has {reason}")
        sizes = [
            size // (step or size) for size, step in zip((rows, columns), self.steps, strict=True)
        ]
        return (sizes[1], sizes[0]) if self.transposed else (sizes[0], sizes[1])

    def why_not(self, sizes: tuple[int, int]) -> str:
        """Why (rows, columns) of a weight, or of a part of it, do not have elements of their own;
        "" if they do."""
        for axis, size, step in zip(AXES, sizes, self.steps, strict=True):
            if step and size % step:
                return f"{size} {axis}, of which {step} share an element of {self.suffixes[0]}"
        return ""


@dataclass(frozen=True, kw_only=True)
class StoredFormat:
    """How a layer's weight is stored, and what x it is multiplied by.

    A number of the weight is ``(integer - zero) * scale``, where ``zero`` is the stored zero point
    plus ``zero_offset`` if the format has zero points, else ``offset``; or it is
    ``values[integer] * scale``.

    Attributes:
        name: of the format, for users, checkpoints, ``explain`` and errors.
        weight, scale, zero: the tensors; ``zero`` is None for a symmetric format.  A scale and a
            zero point belong to the same unit.
        offset: taken from every integer, such as 8 of unsigned 4-bit integers.
        zero_offset: added to every stored zero point.
        values: the value of every integer, for formats that are not linear.
        x_dtype: "": the weight alone is quantized; else x is quantized to this dtype, with a
            float32 scale for each row and ``x_columns`` of it, 0 for all.
        ignored: suffixes of tensors that checkpoints have beside those of the format, unread.
    """

    name: str
    weight: StoredTensor
    scale: StoredTensor
    zero: StoredTensor | None = None
    offset: int = 0
    zero_offset: int = 0
    values: tuple[float, ...] = ()
    x_dtype: str = ""
    x_columns: int = 0
    ignored: tuple[str, ...] = ()

    static = False
    """No scale of x is in the checkpoint."""

    def __post_init__(self) -> None:
        if reason := next(_contradictions(self), ""):
            raise ValueError(f"weight format {self.name!r}: {reason}")

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """The layer's tensors, by their names in the layer and in a call of ``linear``."""
        zero = {} if self.zero is None else {"weight_zero": self.zero}
        return {"weight": self.weight, "weight_scale": self.scale, **zero}

    def step(self, axis: int) -> int:
        """The fewest rows (axis 0) or columns (1) that have elements of their own in all tensors;
        parts of merged layers and of ranks are made of so many."""
        return lcm(*(tensor.steps[axis] or 1 for tensor in self.tensors.values()))


def _contradictions(form: StoredFormat) -> Iterator[str]:
    """Every reason why a format contradicts itself."""
    integers = {"weight": form.weight} | ({"zero": form.zero} if form.zero else {})
    for field, tensor in integers.items():
        if tensor.dtype not in INT_BITS:
            yield f"{field} is of {tensor.dtype}, expected one of {', '.join(INT_BITS)}"
        packing = tensor.packing
        if packing is None:
            continue
        if not packing.bits or INT_BITS[tensor.dtype] % packing.bits:
            yield f"{field} has {packing.bits} bits, expected a divisor of those of {tensor.dtype}"
        if packing.order and sorted(packing.order) != [*range(tensor.packed)]:
            yield f"the order of {field} is {packing.order}, expected 0 to {tensor.packed - 1} once"
    if form.scale.dtype not in FLOAT_BITS or form.scale.packing:
        yield f"scale is of {form.scale.dtype}, expected one of {', '.join(FLOAT_BITS)}, not packed"
    if form.weight.unit != (1, 1):
        yield f"weight has a number for {form.weight.unit} rows and columns, expected (1, 1)"
    if form.scale.unit[0] < 1 or form.scale.unit[1] < 0:
        yield f"a scale is for {form.scale.unit} rows and columns, expected (1 or more, 0 or more)"
    if form.zero and form.zero.unit != form.scale.unit:
        yield f"a zero point is for {form.zero.unit}, a scale for {form.scale.unit}: expected alike"
    if form.values and (len(form.values) != 2**form.weight.bits or form.weight.signed or form.zero):
        expected = f"{2**form.weight.bits}, of unsigned integers without zero points"
        yield f"{len(form.values)} values, expected {expected}"
    if form.x_dtype not in QUANTIZED_X:
        yield f"x_dtype is {form.x_dtype!r}, expected one of {', '.join(map(repr, QUANTIZED_X))}"


STORED_FORMATS: dict[str, StoredFormat] = {}
"""Every admitted format by its name."""
