"""Quantize weights that a checkpoint holds in 16 or 32 bits, and move FP8 weights to other scales.

Works row by row, so that beside a weight in its own dtype only a few MB are needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import lcm

import torch
import torch.nn.functional as F
from torch import Tensor

from ...config.weight_format import StoredFormat
from ...ops.core.float8 import E4M3_MAX, to_e4m3
from ...ops.linear.formats import pack, quantize
from .layer import LayerShare, Quantizable
from .scheme import BLOCK, QuantFormat

_CHUNKS = {"cpu": 1 << 20, "cuda": 1 << 23}
"""Numbers that are quantized at a time; a GPU is busy with its launches where they are few."""
_SMALLEST = 1e-12
"""Taken as the largest value where all are zero, so that no scale is zero."""
_DUMMY_INPUT = 16.0
"""What static input scales of models with random weights represent.  Normed activations, and gated
products with weights of a standard deviation of 0.02, stay below."""


def dummy_input_scale(quant: QuantFormat | StoredFormat) -> float:
    """The static input scale of a layer with random weights."""
    is_int8 = isinstance(quant, StoredFormat) and quant.x_dtype == "int8"
    return _DUMMY_INPUT / (127 if is_int8 else E4M3_MAX)


def draw_into(weight: Tensor, scale: Tensor, zero: Tensor | None, form: StoredFormat) -> None:
    """Fill a weight that is stored in a format with random integers, and its scales with the one
    that gives its numbers a standard deviation of about 0.02.  That is many times as fast as
    quantizing random numbers."""
    weight.view(torch.uint8).random_(0, 256)
    middle = 0.0 if form.weight.signed else 2.0 ** (form.weight.bits - 1)
    steps = form.values or [2.0**form.weight.bits * (i / 64 - 0.5) for i in range(64)]
    size = 0.02 / (sum(step * step for step in steps) / len(steps)) ** 0.5
    one = pack(form.scale, torch.full((1, 1), size, device=weight.device))
    scale.view(torch.uint8).view(-1, one.itemsize).copy_(one.view(torch.uint8).flatten())
    if zero is not None:
        zero.fill_(middle)


def quantize_into(linear: Quantizable, weight: Tensor) -> None:
    """Fill a quantized layer's weight and scales from ``weight``, of the same device and the shape
    that the weight stands for; of experts, one after the other."""
    weights = weight.unbind() if weight.dim() == 3 else (weight,)
    for share, numbers in zip(linear.shares(), weights, strict=True):
        if isinstance(share.quant, StoredFormat):
            _store_into(share, share.quant, numbers)
        elif share.quant is not None:
            _quantize_into(share, share.quant, numbers)


def _store_into(linear: LayerShare, form: StoredFormat, weight: Tensor) -> None:
    for rows in _chunks(weight, form.step(0)):
        for name, part in quantize(form, weight[rows]).items():
            tensor, held = form.tensors[name], getattr(linear, name)
            dim, step = tensor.dim(0), tensor.steps[0]
            held.narrow(dim, rows.start // step, part.shape[dim]).copy_(part)


def _quantize_into(linear: LayerShare, quant: QuantFormat, weight: Tensor) -> None:
    if not quant.rows:
        least, most = weight.aminmax()
        linear.weight_scale.copy_(_scale(torch.maximum(-least, most).float()))
    for rows in _chunks(weight):
        chunk = weight[rows].float()
        if not quant.rows:
            linear.weight[rows] = to_e4m3(chunk, linear.weight_scale)
            continue
        blocks = _blocks(chunk, quant.rows, quant.columns or chunk.shape[1])
        scale = _scale(blocks.abs().amax((1, 3), keepdim=True))
        first = rows.start // quant.rows
        linear.weight_scale[first : first + len(scale)] = scale[:, 0, :, 0]
        linear.weight[rows] = _rows(to_e4m3(blocks, scale), chunk)


def rescale(weight: Tensor, old: float, new: float) -> None:
    """Change an FP8 weight with the scale ``old``, in place, to one with the scale ``new``."""
    scale = torch.tensor(new, device=weight.device)
    for rows in _chunks(weight):
        weight[rows] = to_e4m3(weight[rows].float() * old, scale)


class Staging(dict[str, Tensor]):
    """Parameters by name, of which weights to be quantized are filled in the dtype ``dtype`` first,
    and quantized as soon as all parts are there.

    Args:
        linears: the layers of these weights, by the weight's name.
        params: all other parameters.
        parts: the name of the parameter that each part to come belongs to.
    """

    def __init__(
        self,
        linears: Mapping[str, Quantizable],
        params: Mapping[str, Tensor],
        parts: Iterable[str],
        dtype: torch.dtype,
    ) -> None:
        super().__init__({name: p for name, p in params.items() if name not in linears})
        self._linears, self._dtype = linears, dtype
        self._missing = Counter(parts)

    def __missing__(self, name: str) -> Tensor:
        linear = self._linears[name]
        self[name] = torch.empty(linear.shape, dtype=self._dtype, device=linear.weight.device)
        return self[name]

    def filled(self, name: str) -> None:
        """Count one part of a parameter as filled; quantize the parameter after its last part."""
        self._missing[name] -= 1
        if name in self._linears and not self._missing[name]:
            quantize_into(self._linears[name], self.pop(name))


def _chunks(weight: Tensor, unit: int = 1) -> Iterator[slice]:
    """Rows of about as many numbers as ``_CHUNKS`` says; whole blocks, and whole units of rows."""
    num_rows, columns = weight.shape
    block = lcm(BLOCK, unit)
    step = max(1, _CHUNKS.get(weight.device.type, 1 << 20) // (columns * block)) * block
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _scale(largest: Tensor) -> Tensor:
    # A product: torch divides by a number exactly on a CPU, and by its inverse on a GPU.
    return largest.clamp(min=_SMALLEST) * (1.0 / E4M3_MAX)


def _blocks(x: Tensor, height: int, width: int) -> Tensor:
    """[rows / height, height, columns / width, width], filled up with zeros."""
    rows, columns = x.shape
    padded = F.pad(x, (0, -columns % width, 0, -rows % height))
    return padded.view(-1, height, padded.shape[1] // width, width)


def _rows(blocks: Tensor, like: Tensor) -> Tensor:
    """The inverse of ``_blocks``: a matrix of the shape of ``like``, without the padding."""
    matrix = blocks.flatten(2).flatten(0, 1)
    return matrix[: like.shape[0], : like.shape[1]]
