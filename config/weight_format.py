"""Describes weight formats as data: the tensors of a linear layer, and what their numbers mean.

A ``StoredFormat`` is all that loading, sharding, merging and quantizing know of a format.
``STORED_FORMATS`` lists the package's own; ``admit_weight_format`` (``ops/linear/kernels.py``) adds
another, with its kernels.  Nothing in this file imports torch, so that a checkpoint can be refused
before that is imported.
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
QUANTIZED_X = ("", "float8_e4m3fn", "int8")
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
    ``values[integer] * scale``.  Either is multiplied by the ``row_scale`` of its row, if there is
    one.

    Attributes:
        name: of the format, for users, checkpoints, ``explain`` and errors.
        weight, scale, zero: the tensors; ``zero`` is None for a symmetric format.  A scale and a
            zero point belong to the same unit.  Zero points of a floating-point dtype need not be
            whole numbers.
        row_scale: a second scale, of rows, for scales that have little range of their own.
        offset: taken from every integer, such as 8 of unsigned 4-bit integers.
        zero_offset: added to every stored zero point.
        values: the value of every integer, for formats that are not linear.
        x_dtype: "": the weight alone is quantized; else x is quantized to this dtype, with a
            float32 scale for each row and ``x_columns`` of it, 0 for all.
        static: the scale of x is one for all rows, and in the checkpoint.
        ignored: suffixes of tensors that checkpoints have beside those of the format, unread.
    """

    name: str
    weight: StoredTensor
    scale: StoredTensor
    zero: StoredTensor | None = None
    row_scale: StoredTensor | None = None
    offset: int = 0
    zero_offset: int = 0
    values: tuple[float, ...] = ()
    x_dtype: str = ""
    x_columns: int = 0
    static: bool = False
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if reason := next(_contradictions(self), ""):
            raise ValueError(f"weight format {self.name!r}: {reason}")

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """The layer's tensors, by their names in the layer and in a call of ``linear``."""
        optional = {"weight_zero": self.zero, "weight_row_scale": self.row_scale}
        there = {name: tensor for name, tensor in optional.items() if tensor is not None}
        return {"weight": self.weight, "weight_scale": self.scale, **there}

    def step(self, axis: int) -> int:
        """The fewest rows (axis 0) or columns (1) that have elements of their own in all tensors;
        parts of merged layers and of ranks are made of so many."""
        return lcm(*(tensor.steps[axis] or 1 for tensor in self.tensors.values()))


def _contradictions(form: StoredFormat) -> Iterator[str]:
    """Every reason why a format contradicts itself."""
    integers = {"weight": form.weight}
    if form.zero and form.zero.dtype not in FLOAT_BITS:
        integers["zero"] = form.zero
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
    if form.row_scale and (form.row_scale.dtype not in FLOAT_BITS or form.row_scale.unit != (1, 0)):
        stated = f"{form.row_scale.dtype} for {form.row_scale.unit}"
        yield f"row_scale is of {stated}, expected one of {', '.join(FLOAT_BITS)} for (1, 0)"
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
    if form.static and (not form.x_dtype or form.x_columns):
        yield "static is true, expected an x_dtype and no x_columns"


GROUPS = (32, 64, 128)
"""Columns that share a scale, in the package's formats of integers; 0 is all of a row."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_E2M1, *(-value for value in _E2M1))
"""What the 4 bits of a float with 2 bits of exponent and 1 of mantissa stand for (OCP Microscaling
Formats 1.0, section 5.3.3)."""


def integer_format(bits: int, group: int, *, zero: bool = False) -> str:
    """The name of the package's format of integers of 4 or 8 bits, with a scale for each ``group``
    columns of a row (0: all of them), and with zero points or symmetric."""
    unit = f"g{group}" if group else "channel"
    return f"int{bits}_zero_{unit}" if zero else f"int{bits}_{unit}"


def _integers(bits: int, group: int, zero: bool) -> StoredFormat:
    # Scales of whole rows are few, so that nothing is gained by rounding them.
    dtype, unit = "float16" if group else "float32", (1, group)
    packing = Packing(4) if bits == 4 else None
    return StoredFormat(
        name=integer_format(bits, group, zero=zero),
        weight=StoredTensor(
            ("weight_packed",) if packing else ("weight",),
            "uint8" if packing or zero else "int8",
            packing=packing,
        ),
        scale=StoredTensor(("weight_scale",), dtype, unit),
        zero=StoredTensor(("weight_zero_point",), dtype, unit) if zero else None,
        offset=8 if packing and not zero else 0,
    )


def _floats(name: str, scale: str, group: int, row_scale: bool) -> StoredFormat:
    rows = StoredTensor(("weight_row_scale",), "float32", (1, 0))
    return StoredFormat(
        name=name,
        weight=StoredTensor(("weight_packed",), "uint8", packing=Packing(4)),
        scale=StoredTensor(("weight_scale",), scale, (1, group)),
        row_scale=rows if row_scale else None,
        values=E2M1,
    )


def _both_int8(name: str, static: bool) -> StoredFormat:
    return StoredFormat(
        name=name,
        weight=StoredTensor(("weight",), "int8"),
        scale=StoredTensor(("weight_scale",), "float32", (1, 0)),
        x_dtype="int8",
        static=static,
    )


MXFP4, NVFP4 = "mxfp4", "nvfp4"
W8A8, W8A8_STATIC = "w8a8_int8", "w8a8_int8_static"
STORED_FORMATS: dict[str, StoredFormat] = {
    form.name: form
    for form in (
        *(_integers(b, g, z) for b in (4, 8) for z in (False, True) for g in (*GROUPS, 0)),
        _floats(MXFP4, "float8_e8m0fnu", 32, row_scale=False),
        _floats(NVFP4, "float8_e4m3fn", 16, row_scale=True),
        _both_int8(W8A8, static=False),
        _both_int8(W8A8_STATIC, static=True),
    )
}
"""Every stored format by its name: the package's own, then those that are admitted."""
ALIASES = {"int4": integer_format(4, 128), "int8": integer_format(8, 0)}
"""Short names that users may give for formats."""


def full_name(quantization: str | None) -> str | None:
    """The name of a format for which a short one may be given."""
    return quantization and ALIASES.get(quantization, quantization)


_OF_CHECKPOINTS = (
    *("awq", "awq_marlin", "auto_awq", "gptq", "gptq_marlin", "auto_gptq", "compressed-tensors"),
    *("compressed_tensors", "modelopt", "modelopt_fp4", "gguf", "fbgemm_fp8", "gpt_oss_mxfp4"),
)


def why_no_choice(quantization: str) -> str:
    """Why a name of vLLM's that belongs to checkpoints is none to give, or nothing."""
    if quantization.lower() not in _OF_CHECKPOINTS:
        return ""
    return (
        "a checkpoint says itself that it is quantized so: leave it out; weights of 16 bits can "
        "be quantized to fp8, int4, int8, mxfp4 or w8a8_int8"
    )


_READ_SCALES = ("float8_e8m0fnu", "bfloat16", "float16", "float32")


def why_not_words(form: StoredFormat, in_features: int | None = None) -> str:
    """Why Triton's kernels, which read words of 32 bits and make numbers in registers, do not read
    weights of a format, or rows of so many columns in it; "" if they do."""
    return next(_no_words(form, in_features), "")


def _no_words(form: StoredFormat, in_features: int | None) -> Iterator[str]:
    weight, scale = form.weight, form.scale
    if form.x_dtype:
        yield f"x is quantized to {form.x_dtype}: reads floating-point x"
    if weight.bits not in (4, 8) or weight.dtype not in ("int8", "uint8", "int32"):
        yield f"{weight.bits} bits in {weight.dtype}: reads 4 or 8 in bytes or words of 32 bits"
    if weight.transposed or (weight.packing and weight.packing.along != "columns"):
        yield "a row's neighbours are not side by side in memory"
    if form.values and form.values != E2M1:
        yield "the values of its integers are not those of E2M1"
    a_word, group = max(1, 32 // weight.bits), scale.unit[1]
    if group % a_word or (in_features or 0) % a_word:
        yield f"in_features {in_features} in groups of {group}: expected multiples of {a_word}"
    if scale.unit[0] != 1:
        yield f"{scale.unit[0]} rows share a scale, expected 1"
    if form.zero is not None and form.zero.packing is not None:
        yield "zero points are packed"


def why_not_experts(form: StoredFormat, in_features: int | None = None) -> str:
    """The same of the experts' kernels, which read less; "" if they do."""
    if reason := why_not_words(form, in_features):
        return reason
    weight, (_, columns) = form.weight, form.scale.unit
    if weight.dtype == "int32" or (weight.packing and weight.packing.order not in ((), (0, 1))):
        return "its numbers are not in bytes in ascending order"
    if form.zero is not None and (form.zero.dtype not in _READ_SCALES or form.zero_offset):
        return f"zero points are of {form.zero.dtype}, expected floats"
    if columns & (columns - 1) or 0 < columns < 16:
        return f"{columns} columns share a scale, expected a power of two from 16 on"
    if form.scale.transposed or form.scale.dtype not in _READ_SCALES:
        return f"scales are of {form.scale.dtype}, expected one of {', '.join(_READ_SCALES)}"
    return "rows have scales of their own" if form.row_scale is not None else ""
