"""``add_rms_norm`` adds the residual and applies the RMSNorm that follows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ._launch import Launch, run_launches
from ._op import Case, Cost, Implementation, OpDesc, SemanticOp
from .launches import norm
from .rms_norm import rms_norm_native


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    weight_offset: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Add and normalize: ``rms_norm(x + residual)`` (Zhang and Sennrich, 2019, eq. 4).

    Args:
        x: [..., hidden], floating point.
        residual: like ``x``.
        weight: [hidden], same dtype.
        eps: added to the mean square.
        weight_offset: as ``rms_norm`` takes it.

    Returns:
        (normed, residual_out), each like ``x`` and contiguous.  ``residual_out`` is the sum rounded
        to the dtype; the norm is of that rounded value, so fusing changes no bit.
    """
    return torch.ops.fw.add_rms_norm.default(  # type: ignore[no-any-return]
        x, residual, weight, eps, weight_offset
    )


def _reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    weight_offset: float | None = None,
) -> tuple[Tensor, Tensor]:
    norm.check(x, residual, weight)
    residual_out = (x + residual).contiguous()
    return rms_norm_native(residual_out, weight, eps, weight_offset), residual_out


def _fake(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    weight_offset: float | None = None,
) -> tuple[Tensor, Tensor]:
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    return normed, torch.empty_like(normed)


def _launches(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    weight_offset: float | None = None,
) -> tuple[list[Launch], tuple[Tensor, Tensor]]:
    return norm.add_rms_norm(x, residual, weight, eps, weight_offset)


def _triton_supports(desc: OpDesc) -> str:
    return norm.too_wide(desc["x"].shape[-1])


def _cases(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Iterator[Case]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, device=device).to(dtype)

    for shape in [(1, 64), (7, 256), (33, 96), (5, 4, 128), (3, 4096), (2, 1001)]:
        yield Case(f"{list(shape)}", (randn(*shape), randn(*shape), randn(shape[-1]), 1e-5))
    packed = randn(6, 3 * 128)
    yield Case("slice of [6, 384]", (packed[:, 128:256], randn(6, 128), randn(128), 1e-6))
    gemma = (randn(7, 96), randn(7, 96), randn(96), 1e-6, 1.0)
    yield Case("Gemma's 1 + weight", gemma)
    columns = randn(128, 6).t()
    yield Case("columns as rows", (columns, randn(6, 128), randn(128), 1e-6))
    yield Case("no rows", (randn(0, 64), randn(0, 64), randn(64), 1e-6))


def _cost(desc: OpDesc) -> Cost:
    return Cost(bytes=4 * desc["x"].nbytes + desc["weight"].nbytes, flops=5 * desc["x"].numel)


OP = SemanticOp(
    name="add_rms_norm",
    reference=_reference,
    fake=_fake,
    cases=_cases,
    cost=_cost,
    implementations=(
        Implementation(
            "triton",
            run_launches(_launches),
            _triton_supports,
            devices=("cuda",),
            launches=_launches,
        ),
        Implementation("native", _reference, inline=True),
    ),
)
