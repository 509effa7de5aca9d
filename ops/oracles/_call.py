"""Decodes a call for oracles: float64 and integers in numpy, from the bits of the tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..core.op import SemanticOp

Floats: TypeAlias = npt.NDArray[np.float64]
Array: TypeAlias = npt.NDArray[Any]
Expected: TypeAlias = dict[int | str, Array]
"""Results by number of output or name of mutated argument; NaN where the op promises nothing."""


@dataclass(frozen=True)
class Call:
    """Arguments by name, tensors as arrays with their dtypes beside them, and the op's name."""

    values: Mapping[str, Any]
    dtypes: Mapping[str, torch.dtype]
    op: str = ""

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @staticmethod
    def of(op: SemanticOp, args: tuple[Any, ...]) -> Call:
        """The call ``op(*args)`` with defaults filled in."""
        arguments = op.overload()._schema.arguments
        given = dict(zip((a.name for a in arguments), args, strict=False))
        for argument in arguments[len(args) :]:
            given[argument.name] = argument.default_value
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        values = tree_map_only(Tensor, decode, given)
        return Call(values, {name: value.dtype for name, value in tensors.items()}, op.name)


Oracle: TypeAlias = Callable[[Call], Expected]


def _e4m3_magnitudes() -> Floats:
    """The 127 magnitudes of e4m3fn (Micikevicius et al., 2022, table 1), by code; 448 is the last:
    the code behind it is NaN."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    normal = 2.0 ** (exponent - 7) * (1 + mantissa / 8)
    return np.where(exponent == 0, 2.0**-6 * mantissa / 8, normal)


_E4M3 = _e4m3_magnitudes()


def decode(tensor: Tensor) -> Array:
    """The numbers of a tensor: floats in float64, from their bits where numpy has no such type."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.float8_e4m3fn:
        codes = tensor.view(torch.uint8).numpy()
        magnitude = np.append(_E4M3, np.nan)[codes & 127]
        return np.where(codes & 128, -magnitude, magnitude)
    if tensor.dtype == torch.float8_e8m0fnu:  # 255 is NaN (OCP Microscaling Formats, 5.4.1)
        exponents = tensor.view(torch.uint8).numpy().astype(np.float64)
        return np.where(exponents == 255, np.nan, 2.0 ** (exponents - 127))
    if tensor.dtype == torch.bfloat16:
        bits = tensor.view(torch.int16).numpy().astype(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64)
    array = tensor.numpy()
    return array.astype(np.float64) if tensor.dtype.is_floating_point else array


def rounded(x: Floats, dtype: torch.dtype) -> Floats:
    """Round to the nearest number of a 16- or 32-bit dtype, ties to even."""
    if dtype == torch.float16:
        return x.astype(np.float16).astype(np.float64)
    single = x.astype(np.float32)
    if dtype == torch.bfloat16:
        bits = single.view(np.uint32)
        nearest = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        single = np.where(np.isfinite(single), nearest.view(np.float32), single)
    return single.astype(np.float64)


def to_e4m3(x: Array) -> Floats:
    """The nearest of the 253 numbers of e4m3fn, of two as near the one with an even code."""
    size = np.minimum(np.abs(x.astype(np.float64)), _E4M3[-1])
    above = np.searchsorted(_E4M3, size)
    below = np.maximum(above - 1, 0)
    up, down = _E4M3[above] - size, size - _E4M3[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return np.where(np.isnan(x), np.nan, np.copysign(_E4M3[code], x))
