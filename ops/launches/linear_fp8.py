"""Launch of the tiled FP8 GEMM."""

from __future__ import annotations

import torch
from torch import Tensor

from .._launch import Launch
from .tiles import cdiv

# Row tiles walked before the next column tile, so that weight tiles stay in L2.
_GROUP_M = 8


def _tile(m: int, n: int) -> tuple[int, int, int, int]:
    """(rows, columns, warps, stages): the fastest measured on an H200 (bench/NOTES.md) of those
    whose copies fit 96 KiB, which SM 8.9 has too."""
    wide = n >= 16384  # programs enough for every multiprocessor even of larger tiles
    if m <= 16:
        return (16, 64, 4, 4) if wide else (16, 32, 4, 6)
    if m <= 64:
        return (64, 64, 4, 5) if wide else (64, 32, 4, 5)
    return (64, 64, 4, 5) if m <= 256 and not wide else (128, 128, 8, 3)


def _invariant_tile(m: int, n: int) -> tuple[int, int, int, int]:
    """As ``_tile``, of tiles that add the same sums in the same order: matrix instructions of 64
    rows, partial sums of 128 products."""
    return (64, 64, 4, 5) if m <= 256 else (128, 128, 8, 3)


def linear_fp8(
    scheme: str,
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    *,
    invariant: bool = False,
) -> tuple[list[Launch], Tensor]:
    """``scheme``: "tensor", "token" or "block", which the shapes of the scales are of.
    ``invariant``: a row has the same bits whatever the other rows are."""
    n, k = weight.shape
    x = x if x.stride(1) == 1 or k == 1 else x.contiguous()
    weight = weight if weight.stride(1) == 1 or k == 1 else weight.contiguous()
    m = x.shape[0]
    out = torch.empty((m, n), dtype=out_dtype, device=x.device)
    block_m, block_n, num_warps, num_stages = (_invariant_tile if invariant else _tile)(m, n)
    launch = Launch(
        kernel="linear_fp8:_linear_fp8_kernel",
        grid=(cdiv(m, block_m) * cdiv(n, block_n),),
        args={
            "x_ptr": x,
            "x_scale_ptr": x_scale,
            "weight_ptr": weight,
            "weight_scale_ptr": weight_scale.contiguous(),
            "bias_ptr": bias,
            "out_ptr": out,
            "M": m,
            "N": n,
            "K": k,
            "x_stride": x.stride(0),
            # Of one row the stride says nothing: as if there were more.
            "x_scale_row": x_scale.stride(0) if m > 1 else 1,
            "x_scale_group": x_scale.stride(1),
            "weight_stride": weight.stride(0),
            "weight_scale_row": weight_scale.shape[1],
        },
        constexprs={
            "SCHEME": scheme,
            "GROUP_M": _GROUP_M,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": 128,
        },
        num_warps=num_warps,
        num_stages=num_stages,
        dynamic=("M", "x_scale_group"),
        programmatic=True,
    )
    return [launch], out
