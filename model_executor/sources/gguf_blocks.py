"""Blocks of GGUF's quantized types as tensors of the formats that hold the same numbers.

Where a format fits, integers stay as they are, and a scale is rounded at most to float16; other
types are dequantized by the package ``gguf`` and rounded anew.  Layouts are those of
``ggml-common.h`` and ``dequantize_row_*`` of ggml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...config.weight_format import STORED_FORMATS, integer_format
from ...ops.linear.formats import dequantize, pack, quantize, unpack

INT4, INT4_ZERO = integer_format(4, 32), integer_format(4, 32, zero=True)
INT8, INT8_ZERO = integer_format(8, 32), integer_format(8, 32, zero=True)
Stored: TypeAlias = tuple[str, dict[str, Tensor]]
"""The name of a format, and the tensors of a weight by their names in a layer."""
_MOST_ZERO = 30_000.0
"""Zero points beyond are of groups whose numbers are equal but for the rounding of the least."""


def stored_blocks(kind: str, data: Any) -> tuple[Stored, float]:
    """A weight in the format that fits its type, and the relative error of rounding it anew, 0
    where its integers are kept.

    Args:
        kind: the name of the type, such as "Q4_K".
        data: uint8 [rows, bytes of a row], as of ``GGUFReader``.
    """
    if kind in _NATIVE:
        blocks = torch.from_numpy(data.copy())
        return _NATIVE[kind](blocks), 0.0
    quants: Any = import_module("gguf.quants")
    types: Any = import_module("gguf.constants").GGMLQuantizationType
    weight = torch.from_numpy(quants.dequantize(data, types[kind]).copy())
    tensors = quantize(STORED_FORMATS[INT8], weight)
    error = (numbers_of((INT8, tensors)) - weight).norm() / weight.norm().clamp(min=1e-30)
    return (INT8, tensors), float(error)


def numbers_of(stored: Stored) -> Tensor:
    """The weight that tensors stand for, float32."""
    name, tensors = stored
    operands = (tensors["weight"], tensors["weight_scale"], tensors.get("weight_zero"))
    return dequantize(STORED_FORMATS[name], *operands)


def widened(stored: Stored) -> Stored:
    """The same numbers in the format that all others fit, for parts of one matrix."""
    name, tensors = stored
    form = STORED_FORMATS[name]
    if name == INT8_ZERO:
        return stored
    integers = unpack(form.weight, tensors["weight"]).int()
    shift = 128 if name == INT8 else 0
    zero = tensors.get("weight_zero")
    if zero is None:
        zero = torch.full_like(tensors["weight_scale"], form.offset + shift)
    weight = pack(STORED_FORMATS[INT8_ZERO].weight, integers + shift)
    return INT8_ZERO, {**tensors, "weight": weight, "weight_zero": zero}


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at a byte of each block, as float32."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()[..., 0]


def _nibbles(quants: Tensor) -> Tensor:
    """Integers of which the first half are low, the second high nibbles."""
    return torch.cat((quants & 15, quants >> 4), -1)


def _fifth_bits(blocks: Tensor) -> Tensor:
    """The bits of the bytes of each block, lowest first, a byte each."""
    return ((blocks[..., None] >> torch.arange(8)) & 1).flatten(-2)


def _symmetric(name: str, scale: Tensor, integers: Tensor) -> Stored:
    form = STORED_FORMATS[name]
    numbers = integers.flatten(1)
    return name, {"weight": pack(form.weight, numbers), "weight_scale": scale.half()}


def _with_least(name: str, scale: Tensor, least: Tensor, integers: Tensor) -> Stored:
    """``integers * scale + least``, [rows, groups, 32] by [rows, groups]."""
    scale = scale.half().float()
    zero = -least / scale
    flat = ~(zero.abs() <= _MOST_ZERO)  # without a range, or with next to none
    scale = torch.where(flat, least.abs(), scale)
    zero = torch.where(flat, -least.sign(), zero)
    integers = torch.where(flat[..., None], 0, integers)
    tensors = _symmetric(name, scale, integers)[1]
    return name, {**tensors, "weight_zero": zero.half()}


def _q4_0(data: Tensor) -> Stored:
    blocks = data.unflatten(1, (-1, 18))
    return _symmetric(INT4, _half(blocks, 0), _nibbles(blocks[..., 2:]))


def _q4_1(data: Tensor) -> Stored:
    blocks = data.unflatten(1, (-1, 20))
    return _with_least(INT4_ZERO, _half(blocks, 0), _half(blocks, 2), _nibbles(blocks[..., 4:]))


def _q5_0(data: Tensor) -> Stored:
    blocks = data.unflatten(1, (-1, 22))
    integers = _nibbles(blocks[..., 6:]).int() + 16 * _fifth_bits(blocks[..., 2:6]) - 16
    return _symmetric(INT8, _half(blocks, 0), integers)


def _q5_1(data: Tensor) -> Stored:
    blocks = data.unflatten(1, (-1, 24))
    integers = _nibbles(blocks[..., 8:]) + 16 * _fifth_bits(blocks[..., 4:8])
    return _with_least(INT8_ZERO, _half(blocks, 0), _half(blocks, 2), integers)


def _q8_0(data: Tensor) -> Stored:
    blocks = data.unflatten(1, (-1, 34))
    return _symmetric(INT8, _half(blocks, 0), blocks[..., 2:].contiguous().view(torch.int8))


def _scales_of_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(scales, leasts) of the 8 groups of each block of 256, from 6 bits of the 12 bytes at 4."""
    packed = blocks[..., 4:16].int()
    low, middle, high = packed.unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((low & 63, (high & 15) | (low >> 6) << 4), -1)
    leasts = torch.cat((middle & 63, (high >> 4) | (middle >> 6) << 4), -1)
    of_scales, of_leasts = _half(blocks, 0)[..., None], _half(blocks, 2)[..., None]
    return (of_scales * scales).flatten(1), -(of_leasts * leasts).flatten(1)


def _q4_k(data: Tensor) -> Stored:
    blocks = data.unflatten(1, (-1, 144))
    integers = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32)))
    groups = integers.unflatten(-1, (2, 32)).flatten(1, 3)
    return _with_least(INT4_ZERO, *_scales_of_k(blocks), groups)


def _q5_k(data: Tensor) -> Stored:
    blocks = data.unflatten(1, (-1, 176))
    integers = (
        _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(2, 3)
    )
    bits = (blocks[..., None, 16:48] >> torch.arange(8)[:, None]) & 1
    return _with_least(INT8_ZERO, *_scales_of_k(blocks), (integers + 16 * bits).flatten(1, 2))


_NATIVE: Mapping[str, Callable[[Tensor], Stored]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
}
