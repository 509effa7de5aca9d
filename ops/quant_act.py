"""The ops here apply a gated activation and quantize its result to FP8, static or dynamic."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ._launch import Launch
from ._op import Case, SemanticOp
from ._quantize import quantize_dynamic, quantize_static, quantizing_op
from .gelu_tanh_mul import OP as GELU_TANH_MUL
from .launches.quant import Quantized, Scheme, quantize
from .quant_fp8 import Cases, named, schemes, wants
from .silu_mul import OP as SILU_MUL


def silu_mul_quant_static(x: Tensor, scale: Tensor) -> Tensor:
    """``quant_fp8_static(silu_mul(x), scale)``, rounded to x's dtype in between.

    Args:
        x: [num_tokens, 2 * I], floating point: I gate columns, then I up columns.
        scale: [1, 1] float32.

    Returns:
        [num_tokens, I] float8_e4m3fn.

    Raises:
        ValueError: shapes or the scale are not these.
    """
    return torch.ops.fw.silu_mul_quant_static.default(x, scale)  # type: ignore[no-any-return]


def silu_mul_quant_dynamic(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """``quant_fp8_dynamic(silu_mul(x), group_size)``; arguments and results as these have them."""
    return torch.ops.fw.silu_mul_quant_dynamic.default(  # type: ignore[no-any-return]
        x, group_size
    )


def gelu_tanh_mul_quant_static(x: Tensor, scale: Tensor) -> Tensor:
    """``quant_fp8_static(gelu_tanh_mul(x), scale)``, as ``silu_mul_quant_static``."""
    return torch.ops.fw.gelu_tanh_mul_quant_static.default(  # type: ignore[no-any-return]
        x, scale
    )


def gelu_tanh_mul_quant_dynamic(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """``quant_fp8_dynamic(gelu_tanh_mul(x), group_size)``."""
    return torch.ops.fw.gelu_tanh_mul_quant_dynamic.default(  # type: ignore[no-any-return]
        x, group_size
    )


def _cases(static: bool) -> Cases:
    def cases(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Iterator[Case]:
        def calls(label: str, x: Tensor) -> Iterator[Case]:
            for scheme in schemes(device, gen, x.shape[1] // 2):
                if wants(scheme, static):
                    yield Case(f"{label}, {named(scheme)}", (x.to(dtype), scheme))

        def randn(*shape: int) -> Tensor:
            return 2 * torch.randn(shape, generator=gen, device=device)

        for shape in [(7, 512), (1, 256), (33, 2 * 129), (3, 2 * 4224), (40, 4608)]:
            yield from calls(f"{list(shape)}", randn(*shape))
        # The only value of its scale becomes 448 however small it is.  Below -4, PyTorch's
        # 1 + tanh(u) in float32 is nothing but rounding, so gates stay above.
        yield from calls("[2, 2]", randn(2, 2).clamp(min=-3))
        outliers = randn(9, 768)
        outliers[randn(9, 768) > 4] *= 30
        outliers[4] = 0
        outliers[5, :384] = -200.0  # a gate that is shut
        yield from calls("outliers, zeros", outliers)
        yield from calls("slice of [6, 1000]", randn(6, 1000)[:, 100:868])
        yield from calls("no rows", randn(0, 256))

    return cases


def _ops(unfused: SemanticOp, activation: str) -> tuple[SemanticOp, SemanticOp]:
    """The static and the dynamic op of one activation; ``activation`` is the kernel's constant."""
    act = unfused.reference

    def static(x: Tensor, scale: Tensor) -> Tensor:
        return quantize_static(act(x), scale)

    def dynamic(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
        return quantize_dynamic(act(x), group_size)

    def launches(x: Tensor, scheme: Scheme) -> tuple[list[Launch], Quantized]:
        return quantize(x, scheme, activation)

    return (
        quantizing_op(
            f"{unfused.name}_quant_static",
            static,
            launches,
            _cases(static=True),
            max_width=1 << 30,
            flops=6,
            parts=2,
        ),
        quantizing_op(
            f"{unfused.name}_quant_dynamic",
            dynamic,
            launches,
            _cases(static=False),
            max_width=1 << 15,
            flops=7,
            parts=2,
        ),
    )


SILU_STATIC, SILU_DYNAMIC = _ops(SILU_MUL, "silu")
GELU_TANH_STATIC, GELU_TANH_DYNAMIC = _ops(GELU_TANH_MUL, "gelu_tanh")
