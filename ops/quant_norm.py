"""The ops here apply [add +] RMSNorm and quantize its result to FP8, static or dynamic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ._launch import Launch
from ._op import Case
from ._quantize import quantize_dynamic, quantize_static, quantizing_op
from .launches.norm import check as check_norm
from .launches.quant import Quantized, Scheme, norm_quantize
from .quant_fp8 import Cases, named, schemes, wants
from .rms_norm import rms_norm_native

_MAX_HIDDEN = 16384


def rms_norm_quant_static(x: Tensor, weight: Tensor, eps: float, scale: Tensor) -> Tensor:
    """``quant_fp8_static(rms_norm(x, weight, eps), scale)``, rounded to x's dtype in between.

    Args:
        x: [num_tokens, hidden], floating point.
        weight: [hidden], same dtype.
        eps: added to the mean square.
        scale: [1, 1] float32.

    Returns:
        [num_tokens, hidden] float8_e4m3fn.

    Raises:
        ValueError: shapes or the scale are not these.
    """
    return torch.ops.fw.rms_norm_quant_static.default(  # type: ignore[no-any-return]
        x, weight, eps, scale
    )


def rms_norm_quant_dynamic(
    x: Tensor, weight: Tensor, eps: float, group_size: int
) -> tuple[Tensor, Tensor]:
    """``quant_fp8_dynamic(rms_norm(x, weight, eps), group_size)``; arguments as these have them.

    Returns:
        (q, scale) as of ``quant_fp8_dynamic``.
    """
    return torch.ops.fw.rms_norm_quant_dynamic.default(  # type: ignore[no-any-return]
        x, weight, eps, group_size
    )


def add_rms_norm_quant_static(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """``add_rms_norm(x, residual, weight, eps)`` with its norm quantized by ``scale``.

    Returns:
        (q, residual_out): q as of ``quant_fp8_static``, residual_out as of ``add_rms_norm``.
    """
    return torch.ops.fw.add_rms_norm_quant_static.default(  # type: ignore[no-any-return]
        x, residual, weight, eps, scale
    )


def add_rms_norm_quant_dynamic(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, group_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``add_rms_norm(x, residual, weight, eps)`` with its norm quantized by its own scales.

    Returns:
        (q, scale, residual_out): as of ``quant_fp8_dynamic`` and ``add_rms_norm``.
    """
    return torch.ops.fw.add_rms_norm_quant_dynamic.default(  # type: ignore[no-any-return]
        x, residual, weight, eps, group_size
    )


def _static(x: Tensor, weight: Tensor, eps: float, scale: Tensor) -> Tensor:
    return quantize_static(rms_norm_native(x, weight, eps), scale)


def _dynamic(x: Tensor, weight: Tensor, eps: float, group_size: int) -> tuple[Tensor, Tensor]:
    return quantize_dynamic(rms_norm_native(x, weight, eps), group_size)


def _add_static(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: Tensor
) -> tuple[Tensor, Tensor]:
    check_norm(x, residual, weight)
    residual_out = x + residual
    return _static(residual_out, weight, eps, scale), residual_out


def _add_dynamic(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, group_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    check_norm(x, residual, weight)
    residual_out = x + residual
    return *_dynamic(residual_out, weight, eps, group_size), residual_out


def _launches(
    x: Tensor, weight: Tensor, eps: float, scheme: Scheme
) -> tuple[list[Launch], Quantized]:
    return norm_quantize(x, None, weight, eps, scheme)


def _cases(static: bool, add: bool) -> Cases:
    def cases(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Iterator[Case]:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=gen, device=device)

        def calls(label: str, x: Tensor, residual: Tensor, eps: float = 1e-5) -> Iterator[Case]:
            weight = randn(x.shape[1]).to(dtype)
            inputs: tuple[Any, ...] = (x, residual) if add else (x,)
            for scheme in schemes(device, gen, x.shape[1]):
                if wants(scheme, static):
                    yield Case(f"{label}, {named(scheme)}", (*inputs, weight, eps, scheme))

        for shape in [(7, 256), (1, 128), (33, 96), (2, 1001), (3, 4096)]:
            yield from calls(f"{list(shape)}", randn(*shape).to(dtype), randn(*shape).to(dtype))
        outliers = randn(9, 384)
        outliers[randn(9, 384) > 2] *= 300
        outliers[4] = 0
        yield from calls(
            "outliers, zeros", outliers.to(dtype), torch.zeros_like(outliers).to(dtype)
        )
        packed = randn(6, 640).to(dtype)
        yield from calls("slice of [6, 640]", packed[:, 128:512], randn(6, 384).to(dtype), 1e-6)
        yield from calls("no rows", randn(0, 128).to(dtype), randn(0, 128).to(dtype))

    return cases


STATIC = quantizing_op(
    "rms_norm_quant_static",
    _static,
    _launches,
    _cases(static=True, add=False),
    max_width=_MAX_HIDDEN,
    flops=5,
)
DYNAMIC = quantizing_op(
    "rms_norm_quant_dynamic",
    _dynamic,
    _launches,
    _cases(static=False, add=False),
    max_width=_MAX_HIDDEN,
    flops=6,
)
ADD_STATIC = quantizing_op(
    "add_rms_norm_quant_static",
    _add_static,
    norm_quantize,
    _cases(static=True, add=True),
    max_width=_MAX_HIDDEN,
    flops=6,
)
ADD_DYNAMIC = quantizing_op(
    "add_rms_norm_quant_dynamic",
    _add_dynamic,
    norm_quantize,
    _cases(static=False, add=True),
    max_width=_MAX_HIDDEN,
    flops=7,
)
