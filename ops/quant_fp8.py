"""``quant_fp8_static`` quantizes to FP8 by a given scale, ``quant_fp8_dynamic`` by its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ._op import Case
from ._quantize import quantize_dynamic, quantize_static, quantizing_op
from .launches.quant import Scheme, quantize

Cases = Callable[[torch.dtype, torch.device, torch.Generator], Iterator[Case]]


def quant_fp8_static(x: Tensor, scale: Tensor) -> Tensor:
    """Quantize by one scale for the whole tensor, such as a calibrated one.

    Args:
        x: [num_tokens, columns], floating point.
        scale: [1, 1] float32, positive.

    Returns:
        [num_tokens, columns] float8_e4m3fn: ``x * (1 / scale)`` in float32, rounded to nearest even
        and saturated at +-448; NaN stays NaN.

    Raises:
        ValueError: x is not a matrix, or scale not a [1, 1] float32.
    """
    return torch.ops.fw.quant_fp8_static.default(x, scale)  # type: ignore[no-any-return]


def quant_fp8_dynamic(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Quantize by the largest magnitude of each row, or of each group of a row.

    Args:
        x: [num_tokens, columns], floating point.
        group_size: 0: one scale a row; 128: one for each 128 columns (DeepSeek-V3, 2024, 3.3.2).

    Returns:
        (q, scale): q [num_tokens, columns] float8_e4m3fn as ``quant_fp8_static``; scale
        [num_tokens, 1 or columns / 128] float32, column-major: the largest magnitude * (1 / 448),
        where that is taken as 2^-64 at least.

    Raises:
        ValueError: x is not a matrix, group_size another one, or columns no multiple of it.
    """
    return torch.ops.fw.quant_fp8_dynamic.default(x, group_size)  # type: ignore[no-any-return]


def schemes(device: torch.device, gen: torch.Generator, columns: int) -> Iterator[Scheme]:
    """The static and the dynamic schemes that apply to so many columns."""
    yield 0.02 + torch.rand((1, 1), generator=gen, device=device) / 8
    yield 0
    if columns % 128 == 0:
        yield 128


def named(scheme: Scheme) -> str:
    return "static" if isinstance(scheme, Tensor) else f"group {scheme}"


def wants(scheme: Scheme, static: bool) -> bool:
    return isinstance(scheme, Tensor) == static


def _cases(static: bool) -> Cases:
    def cases(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Iterator[Case]:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=gen, device=device)

        def calls(label: str, x: Tensor) -> Iterator[Case]:
            for scheme in schemes(device, gen, x.shape[1]):
                if wants(scheme, static):
                    yield Case(f"{label}, {named(scheme)}", (x, scheme))

        for shape in [(7, 256), (1, 128), (33, 96), (2, 1001), (3, 4096), (40, 2304), (5, 1)]:
            yield from calls(f"{list(shape)}", randn(*shape).to(dtype))
        outliers = randn(9, 384)
        outliers[randn(9, 384) > 2] *= 300
        outliers[4] = 0
        outliers[:, :128] *= 1e-6
        yield from calls("outliers, zeros, small values", outliers.to(dtype))
        yield from calls("slice of [6, 640]", randn(6, 640).to(dtype)[:, 128:512])
        yield from calls("transposed", randn(256, 5).to(dtype).t())
        yield from calls("no rows", randn(0, 128).to(dtype))

    return cases


STATIC = quantizing_op(
    "quant_fp8_static",
    quantize_static,
    quantize,
    _cases(static=True),
    max_width=1 << 30,
    flops=1,
    exact=True,
)
DYNAMIC = quantizing_op(
    "quant_fp8_dynamic",
    quantize_dynamic,
    quantize,
    _cases(static=False),
    max_width=1 << 15,
    flops=2,
    exact=True,
)
