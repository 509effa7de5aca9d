"""The ways to quantize a tensor, with the same arguments, for models that are made with each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from fusewright import ops

Quantize: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


def unquantized(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return (x,)


def static(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return (ops.quant_fp8_static(x, scale),)


def per_token(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return ops.quant_fp8_dynamic(x, 0)


def int8_static(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return ops.quantize_operand(x, "int8", scale, 0)[:1]


def int8_per_token(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return ops.quantize_operand(x, "int8", None, 0)


def per_group(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    return ops.quant_fp8_dynamic(x, 128)
