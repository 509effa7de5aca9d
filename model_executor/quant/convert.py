"""Reads weights of 4 and 8 bits that a checkpoint has in a ``Layout``, in the tensors of a layer.

One weight is read at a time, or a rank's part of it, so that beside the model only that is in
memory.  It is brought to its format where the model is: a GPU does that faster than a disk reads.
Integers are moved as bytes: no weight becomes a float.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...config.errors import UserError
from ...config.weight_format import AXES, StoredTensor
from ...ops.linear.formats import dtype_of, field_order
from ..checkpoint import F8_E4M3, FLOATS, OpenFiles, TensorInfo
from .layouts import Layout
from .scales import positive

_ONE_MODEL = "config.json and weights must be of one model"
_TYPES = {
    "float32": FLOATS,
    "float8_e4m3fn": (F8_E4M3,),
    "float8_e8m0fnu": ("F8_E8M0", "U8"),
    "int8": ("I8",),
    "uint8": ("U8",),
    "int32": ("I32",),
}
_PRE_SCALE = "pre_quant_scale"


@dataclass(frozen=True)
class LaidOut:
    """A weight as a checkpoint has it.

    Attributes:
        module: its name there.
        layout: how it lies there.
        tensors: of ``Layout.tensors``, by the same names.
        shape: (rows, columns) of its numbers.
    """

    module: str
    layout: Layout
    tensors: Mapping[str, TensorInfo]
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())


@dataclass(frozen=True)
class Part:
    """Rows and columns of a weight that are read; ``rows_order`` puts its rows in an order before
    they are counted."""

    rows: slice
    columns: slice
    rows_order: Tensor | None = None


def laid_out(
    module: str,
    layout: Layout,
    found: Mapping[str, TensorInfo],
    shape: tuple[int, int] | None = None,
) -> LaidOut:
    """The tensors of a weight, checked by the headers alone.

    Args:
        found: the checkpoint's tensors.
        shape: of the weight, if it is known.

    Raises:
        UserError: one is missing, or has another type or shape; the weight's input was scaled.
    """
    if f"{module}.{_PRE_SCALE}" in found:
        raise UserError(
            f"tensor {module}.{_PRE_SCALE} in {found[f'{module}.{_PRE_SCALE}'].file} scales the "
            "input of the layer, for which there is no op; export the model with these scales "
            "folded into the norms before it, as AutoAWQ and llm-compressor do"
        )
    tensors: dict[str, TensorInfo] = {}
    for kind, tensor in layout.tensors.items():
        names = [f"{module}.{suffix}" for suffix in tensor.suffixes]
        name = next(filter(found.__contains__, names), "")
        if not name:
            raise UserError(
                f"the checkpoint lacks {' or '.join(names)}, which a weight of {layout.project} in "
                f"the format {layout.target} has; leave {module} out in quantization_config if it "
                "is not quantized, or download the model again"
            )
        info = found[name]
        if info.dtype not in _TYPES[tensor.dtype]:
            expected = " or ".join(_TYPES[tensor.dtype])
            raise UserError(
                f"tensor {name} in {info.file} is of type {info.dtype}, expected {expected} of "
                f"{layout.project} in the format {layout.target}; {_ONE_MODEL}"
            )
        tensors[kind] = info
    shape = shape or _numbers(layout, tensors["weight"])
    for kind, tensor in layout.tensors.items():
        _check_shape(tensors[kind], tensor, shape, layout)
    return LaidOut(module, layout, tensors, shape)


def names_beside(module: str, layout: Layout) -> list[str]:
    """The names of tensors that may be there and are not read."""
    return [f"{module}.{suffix}" for suffix in layout.unread]


def _numbers(layout: Layout, weight: TensorInfo) -> tuple[int, int]:
    sizes = _matrix(weight.shape)
    if len(sizes) != 2:
        raise UserError(f"tensor {weight.name} in {weight.file} is no matrix; {_ONE_MODEL}")
    rows, columns = (sizes[layout.weight.dim(axis)] * layout.weight.steps[axis] for axis in (0, 1))
    return rows, columns


def _matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Blocks of gpt-oss are a dimension of their own, behind that of the columns' blocks."""
    return (shape[0], shape[1] * shape[2]) if len(shape) == 3 else shape


def _check_shape(
    info: TensorInfo, tensor: StoredTensor, shape: tuple[int, int], layout: Layout
) -> None:
    if reason := tensor.why_not(shape):
        raise UserError(
            f"tensor {info.name} in {info.file} is of a weight {[*shape]}, which has {reason}; "
            f"{layout.project} cannot have made it: {_ONE_MODEL}"
        )
    expected = _shape(tensor, shape)
    there = [size for size in _matrix(info.shape) if size != 1]
    if there != [size for size in expected if size != 1]:
        raise UserError(
            f"tensor {info.name} in {info.file} has shape {[*info.shape]}, expected "
            f"{[*expected]} for a weight {[*shape]}; {_ONE_MODEL}"
        )


def _shape(tensor: StoredTensor, shape: tuple[int, int]) -> tuple[int, int]:
    sizes = [size // (step or size) for size, step in zip(shape, tensor.steps, strict=True)]
    return (sizes[1], sizes[0]) if tensor.transposed else (sizes[0], sizes[1])


def order_of(laid: LaidOut, files: OpenFiles) -> Tensor | None:
    """The order of columns in which those of a group lie together; None: they do.

    Raises:
        UserError: groups are not of their size.
    """
    info = laid.tensors.get("order")
    if info is None:
        return None
    groups: Tensor = files[info.file].get_tensor(info.name)
    order = groups.argsort(stable=True)
    size = laid.layout.scale.unit[1]
    expected = torch.arange(len(groups)) // size
    if not torch.equal(groups[order].long(), expected):
        raise UserError(
            f"tensor {info.name} in {info.file} does not have {size} columns of each group; "
            "quantize the model again, or use desc_act=false"
        )
    return None if torch.equal(groups.long(), expected) else order


@torch.no_grad()
def read_part(
    laid: LaidOut, part: Part, files: OpenFiles, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """A part of a weight in its format: the tensors of a layer on a device, by their names there.

    Raises:
        UserError: a number is none that the format can have.
    """
    layout, form = laid.layout, laid.layout.form
    order = order_of(laid, files)
    order = None if order is None else order.to(device)
    rows = slice(0, laid.shape[0]) if part.rows_order is not None else part.rows
    columns = slice(0, laid.shape[1]) if order is not None else part.columns
    shift = (form.offset - layout.offset) % 256
    pairs = order is None and pairs_are_bytes(layout, shift)
    read = {
        kind: _read(
            files[info.file],
            info,
            layout.tensors[kind],
            (laid.shape, rows, columns),
            device,
            pairs=pairs and kind == "weight",
        )
        for kind, info in laid.tensors.items()
        if kind != "order"
    }
    weight = read["weight"] ^ 0x88 if pairs and shift else read["weight"]
    tensors = {"weight": weight if pairs else _integers(laid, weight)}
    tensors["weight_scale"] = _scales(laid, read["weight_scale"])
    if layout.zero is not None:
        zeros = _zeros(laid, read["weight_zero"])
        if form.zero is not None:
            tensors["weight_zero"] = zeros
    if layout.row_scale is not None:
        scale = positive(read["weight_row_scale"].float(), laid.tensors["weight_row_scale"])
        tensors["weight_row_scale"] = scale.reciprocal() if layout.divides else scale
    count = rows.stop - rows.start
    placed = {}
    for kind, tensor in tensors.items():
        if kind != "weight":
            tensor = tensor.expand(count, tensor.shape[1])
        placed[kind] = _selected(form.tensors[kind], tensor, part, order)
    if pairs:
        return {kind: tensor.contiguous() for kind, tensor in placed.items()}
    return {kind: _packed(form.tensors[kind], tensor) for kind, tensor in placed.items()}


def _selected(target: StoredTensor, tensor: Tensor, part: Part, order: Tensor | None) -> Tensor:
    """The rows and columns of a part, of [rows, numbers of them]."""
    if part.rows_order is not None:
        tensor = tensor[part.rows_order[part.rows].to(tensor.device)]
    if order is None:
        return tensor
    if target.unit[1] == 1:
        return tensor[:, order[part.columns]]
    unit = target.unit[1] or 1
    if not target.unit[1]:
        return tensor
    return tensor[:, part.columns.start // unit : part.columns.stop // unit]


def _read(
    opened: Any,
    info: TensorInfo,
    tensor: StoredTensor,
    where: tuple[tuple[int, int], slice, slice],
    device: torch.device | str,
    *,
    pairs: bool,
) -> Tensor:
    """The numbers of a part, [rows, columns], on a device; with ``pairs`` two columns of integers a
    byte.

    Args:
        where: shape of the weight, and the part's rows and columns.
    """
    shape, *part = where
    sizes = _shape(tensor, shape)
    ranges = []
    for axis in (0, 1):
        step, index = tensor.steps[axis], part[axis]
        whole = slice(0, 1) if not step else slice(index.start // step, -(-index.stop // step))
        ranges.append(whole)
    first, second = reversed(ranges) if tensor.transposed else ranges
    elements: Tensor
    if len(info.shape) == 2 and info.shape == sizes:
        elements = opened.get_slice(info.name)[first, second]
    else:
        elements = opened.get_tensor(info.name).reshape(sizes)[first, second]
    elements = elements.to(device)
    if tensor.dtype == "float8_e8m0fnu":
        elements = elements.view(torch.uint8)
    numbers = pairs_of_columns(tensor, elements) if pairs else unpack_bytes(tensor, elements)
    for axis in (0, 1):
        if step := tensor.unit[axis] * (1 + (pairs and axis == 1)):
            first = ranges[axis].start * tensor.steps[axis] // step
            start, stop = part[axis].start // step, -(-part[axis].stop // step)
            numbers = numbers.narrow(axis, start - first, stop - start)
    return numbers


def pairs_are_bytes(layout: Layout, shift: int) -> bool:
    """Whether integers of 4 bits can go to a layer without a byte of their own: their order in an
    element is that of columns, or any order of rows; and what is added to them flips bits."""
    packing = layout.weight.packing
    if packing is None or layout.bits != 4 or shift % 16 not in (0, 8):
        return False
    return packing.along == "rows" or not packing.order


def pairs_of_columns(tensor: StoredTensor, elements: Tensor) -> Tensor:
    """uint8 [rows, columns / 2] of integers of 4 bits, the lower column in the lower bits."""
    assert tensor.packing is not None
    words = (elements.t() if tensor.transposed else elements).contiguous()
    if tensor.packing.along == "columns":
        return words.view(torch.uint8)
    # Of a word of each of two columns, every other field: four bytes of pairs at once.
    low = 0x0F0F0F0F if words.dtype == torch.int32 else 0x0F
    first, second = words[:, 0::2], words[:, 1::2]
    even = (first & low) | ((second & low) << 4)
    odd = ((first >> 4) & low) | (second & ~low if words.dtype == torch.int32 else second & 0xF0)
    by_field = [
        each.contiguous().view(torch.uint8).unflatten(1, (even.shape[1], -1))
        for each in (even, odd)
    ]
    fields = field_order(tensor)
    shape = words.shape[0], len(fields), even.shape[1]
    pairs = torch.empty(shape, dtype=torch.uint8, device=words.device)
    for neighbour, place in enumerate(fields):
        pairs[:, neighbour] = by_field[place % 2][..., place // 2]
    return pairs.flatten(0, 1)


def unpack_bytes(tensor: StoredTensor, elements: Tensor) -> Tensor:
    """The numbers of a stored tensor, [rows, columns]; packed ones, of 4 or 8 bits, in uint8, a
    byte each."""
    packing = tensor.packing
    if packing is None:
        return elements.t() if tensor.transposed else elements
    first, last = elements.shape
    fields = elements.contiguous().view(torch.uint8).view(first, last, -1)
    if packing.bits == 4:
        fields = torch.stack((fields & 15, fields >> 4), -1).flatten(2)
    if packing.order:
        fields = fields[..., field_order(tensor)]
    inner = tensor.dim(AXES.index(packing.along))
    numbers = fields.flatten(1) if inner else fields.transpose(1, 2).flatten(0, 1)
    return numbers.t() if tensor.transposed else numbers


def _packed(tensor: StoredTensor, numbers: Tensor) -> Tensor:
    """A layer's tensor, of which neighbouring columns may share a byte."""
    if tensor.packing is None:
        return numbers.contiguous()
    pairs: Tensor = numbers.contiguous().unflatten(1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def _integers(laid: LaidOut, numbers: Tensor) -> Tensor:
    """The layer's integers, a byte each."""
    layout, form = laid.layout, laid.layout.form
    # Bytes wrap around, and so do two's complement and the shift between the two zeros.
    shifted = numbers.contiguous().view(torch.uint8) + (form.offset - layout.offset) % 256
    if layout.weight.packing is not None and layout.bits == 4:
        shifted = shifted & 15
    if layout.bits == 4 and bool((shifted > 15).any()):
        info = laid.tensors["weight"]
        raise UserError(
            f"tensor {info.name} in {info.file} has integers of more than 4 bits; num_bits in "
            "quantization_config must be what its weights have"
        )
    return shifted if form.weight.dtype == "uint8" else shifted.view(torch.int8)


def _zeros(laid: LaidOut, numbers: Tensor) -> Tensor:
    """The layer's zero points; of a symmetric weight all must be its middle.

    Raises:
        UserError: one is another.
    """
    layout, form = laid.layout, laid.layout.form
    zeros = numbers.to(torch.int32) + layout.zero_offset
    if form.zero is not None:
        return (zeros - layout.offset).to(dtype_of(form.zero))
    if bool((wrong := zeros != layout.offset).any()):
        info = laid.tensors["weight_zero"]
        raise UserError(
            f"tensor {info.name} in {info.file} has a zero point {int(zeros[wrong][0])}, expected "
            f"{layout.offset} with sym = true; set sym to false in quantization_config, or "
            "checkpoint_format to gptq or gptq_v2 as it was written"
        )
    return zeros


def _scales(laid: LaidOut, numbers: Tensor) -> Tensor:
    """The layer's scales.

    Raises:
        UserError: one is no number, not positive, or too large for the layer's dtype.
    """
    form, info = laid.layout.form, laid.tensors["weight_scale"]
    if form.scale.dtype == "float8_e8m0fnu":
        if bool((numbers == 255).any()):
            raise UserError(f"tensor {info.name} in {info.file} holds NaN; quantize it again")
        return numbers.view(torch.float8_e8m0fnu)
    if form.row_scale is not None:  # small blocks beside large ones may have none
        if not bool(numbers.float().isfinite().all()):
            raise UserError(f"tensor {info.name} in {info.file} holds NaN; quantize it again")
        return numbers
    exact = positive(numbers.float(), info)
    scales = exact.to(dtype_of(form.scale))
    if not bool(scales.isfinite().all()):
        raise UserError(
            f"tensor {info.name} in {info.file} holds {float(exact.max()):g}, expected at most "
            f"{torch.finfo(scales.dtype).max:g}; quantize the model again"
        )
    return scales
