"""``rms_norm`` computes x / rms(x) * weight over the last dimension."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ._launch import Launch, run_launches
from ._op import Case, Cost, Implementation, OpDesc, SemanticOp
from .launches import norm


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float | None = None) -> Tensor:
    """Root-mean-square normalization over the last dimension (Zhang and Sennrich, 2019, eq. 4).

    Args:
        x: [..., hidden], floating point.
        weight: [hidden], same dtype as ``x``; with a ``weight_offset`` also float32.
        eps: added to the mean square.
        weight_offset: None rounds to x's dtype, then multiplies by the weight, as Llama does.  A
            number multiplies by weight + weight_offset in float32 and rounds once: 1 is Gemma's
            norm, 0 that of ``torch.nn.functional.rms_norm``.

    Returns:
        [..., hidden] in x's dtype, contiguous; statistics and scaling in float32.
    """
    return torch.ops.fw.rms_norm.default(  # type: ignore[no-any-return]
        x, weight, eps, weight_offset
    )


def rms_norm_native(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float | None = None
) -> Tensor:
    """The definition in plain ATen; ``add_rms_norm`` shares it."""
    norm.check(x, None, weight)
    x_f32 = x.float()
    scale = torch.rsqrt(x_f32.pow(2).mean(-1, keepdim=True) + eps)
    if weight_offset is None:
        return ((x_f32 * scale).to(x.dtype) * weight).contiguous()
    return (x_f32 * scale * (weight.float() + weight_offset)).to(x.dtype).contiguous()


def _fake(x: Tensor, weight: Tensor, eps: float, weight_offset: float | None = None) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _launches(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float | None = None
) -> tuple[list[Launch], Tensor]:
    return norm.rms_norm(x, weight, eps, weight_offset)


def _triton_supports(desc: OpDesc) -> str:
    return norm.too_wide(desc["x"].shape[-1])


def _cases(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Iterator[Case]:
    for shape in [(1, 64), (7, 256), (33, 96), (5, 4, 128), (3, 4096)]:
        x = torch.randn(shape, generator=gen, device=device, dtype=torch.float32).to(dtype)
        weight = torch.randn(shape[-1], generator=gen, device=device, dtype=torch.float32).to(dtype)
        yield Case(f"{list(shape)}", (x, weight, 1e-5))
    qkv = torch.randn((9, 8 * 64), generator=gen, device=device, dtype=torch.float32).to(dtype)
    yield Case("heads of a packed qkv", (qkv.view(9, 8, 64)[:, 5:7], weight[:64].clone(), 1e-6))
    x, weight, eps = x[:, :1001], weight[:1001], 1e-6
    yield Case("Gemma's 1 + weight", (x, weight, eps, 1.0))
    yield Case("float32 weight", (x, weight.float(), eps, 0.0))
    yield Case("columns as rows", (x.t()[:64, :], weight[: x.shape[0]], eps))


def _cost(desc: OpDesc) -> Cost:
    return Cost(bytes=2 * desc["x"].nbytes + desc["weight"].nbytes, flops=4 * desc["x"].numel)


OP = SemanticOp(
    name="rms_norm",
    reference=rms_norm_native,
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
        Implementation("native", rms_norm_native, inline=True),
    ),
)
