"""Describes the launches of stages over rows, such as RMSNorm and add + RMSNorm.

``row_stages`` checks its arguments, views them as rows, chooses a tile by their width, and returns
the launch with the tensors that it will write.  Ops that quantize a norm share the tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..core.launch import Launch, Launches
from ..core.tiles import cdiv, next_power_of_2

# A program takes several rows if one has fewer elements than this (QK-norm: rows of 64 to 256).
_TILE_ELEMENTS = 1024
_MAX_HIDDEN = 16384
# Rows that are added to others have half the warps if there are this many elements, and if a row
# would have this many warps: all programs then run at once.  Measured; with more elements, the
# number of warps makes no difference.
_ELEMENTS_HALVED, _WARPS_HALVED = ((1 << 20) + 1, 1 << 22), (4, 8)


def _rows(x: Tensor) -> tuple[Tensor, int, int, int, int]:
    """View ``x`` as rows: (tensor, rows, inner rows, outer stride, inner stride).  x is copied only
    if no view exists.  Rows have two strides because the heads of a packed qkv tensor [tokens,
    heads, head_dim] do.
    """
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        x = x.contiguous()
    if x.dim() > 3:
        x = x.reshape(-1, x.shape[-2], x.shape[-1])
    if x.dim() == 3:
        return x, x.shape[0] * x.shape[1], max(x.shape[1], 1), x.stride(0), x.stride(1)
    rows = x if x.dim() == 2 else x.reshape(1, -1)
    return rows, rows.shape[0], 1, rows.stride(0), 0


def check(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None = None) -> None:
    """Refuse what would be read past an end, or broadcast.

    Raises:
        ValueError: names what was found and what was expected.
    """
    if not x.dtype.is_floating_point:
        raise ValueError(f"a norm of {x.dtype}, expected a floating-point x")
    hidden = x.shape[-1]
    if weight.shape != (hidden,) or (residual is not None and residual.shape != x.shape):
        found = None if residual is None else list(residual.shape)
        raise ValueError(
            f"x is {list(x.shape)}: expected weight [{hidden}], found {list(weight.shape)}, and a "
            f"residual like x, found {found}"
        )
    if bias is not None and bias.shape != (hidden,):
        raise ValueError(
            f"x is {list(x.shape)}: expected bias [{hidden}], found {list(bias.shape)}"
        )


def too_wide(hidden: Any) -> str:
    """Why no kernel takes rows of this width, or an empty string."""
    if getattr(hidden, "free_symbols", None):
        return f"hidden {hidden} is dynamic: a kernel is compiled for one width"
    return "" if hidden <= _MAX_HIDDEN else f"hidden {hidden} > {_MAX_HIDDEN}: a row is one tile"


def row_tile(x: Tensor, num_rows: int, adds: bool) -> tuple[dict[str, int], int]:
    """(constants of a norm kernel over rows like those of ``x``, warps of a program)."""
    hidden = x.shape[-1]
    block = next_power_of_2(hidden)
    # Independent of the number of rows: in another layout, a row's sum would run in another order.
    tile_rows = max(_TILE_ELEMENTS // block, 1)
    warps, as_warps = min(max(tile_rows * block // 512, 1), 16), 0
    least, most = _ELEMENTS_HALVED
    halved = adds and x.dtype.itemsize == 2 and least <= num_rows * block <= most
    if halved and tile_rows == 1 and warps in _WARPS_HALVED:
        warps, as_warps = warps // 2, warps
    tile = {"ROWS": tile_rows, "BLOCK": block, "WHOLE": hidden == block, "AS_WARPS": as_warps}
    return tile, warps


class NormOf(NamedTuple):
    """A norm of rows by a weight, and what is added to that: RMSNorm, or with ``center`` a layer
    norm, which may have a bias."""

    weight: Tensor
    eps: float
    offset: float | None = None
    bias: Tensor | None = None
    center: bool = False


ADD = "add"
RowStage: TypeAlias = NormOf | float | str
"""What is done to rows: a norm, the product with a number, or ``ADD``: the residual is added."""
MOST_NORMS = 2
"""The most norms of one launch; it has one add and one product."""


def _letters(stages: Sequence[RowStage]) -> tuple[str, bool]:
    """The stages as the kernel reads them, each result rounded but the last; and whether the sum
    with the residual is stored apart from the result, which is made of it."""
    norms = [at for at, stage in enumerate(stages) if isinstance(stage, NormOf)]
    stored = min((at for at in norms if ADD in stages[:at]), default=0)
    letters = ""
    for at, stage in enumerate(stages):
        if at:
            letters += "=" if at == stored else "r"
        if isinstance(stage, NormOf):
            letters += "-" * stage.center + str(1 + norms.index(at))
        else:
            letters += "+" if stage == ADD else "*"
    return letters, stored > 0


def _norm_args(name: str, norm: NormOf | None) -> dict[str, Any]:
    """The kernel argument ``name: NormOf``."""
    weight, eps, offset, bias, center = norm or (None,) * 5
    return {
        f"{name}_ptr": weight,
        f"{name}_eps": eps,
        f"{name}_offset": 0.0 if center else offset,  # a layer norm rounds once too
        f"{name}_bias": bias,
    }


def row_stages(
    x: Tensor, residual: Tensor | None, stages: Sequence[RowStage]
) -> Launches[tuple[Tensor, Tensor | None]]:
    """The launch of stages over the rows of x: (what the last makes, the sum with the residual if a
    norm follows it)."""
    norms = [stage for stage in stages if isinstance(stage, NormOf)]
    for norm in norms:
        check(x, residual, norm.weight, norm.bias)
    letters, has_total = _letters(stages)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out) if has_total else None
    x_rows, num_rows, inner, x_outer, x_inner = _rows(x)
    r_rows, _, _, r_outer, r_inner = _rows(x if residual is None else residual)
    tile, num_warps = row_tile(x, num_rows, residual is not None)
    args: dict[str, Any] = {
        "x_ptr": x_rows,
        "x_outer_stride": x_outer,
        "x_inner_stride": x_inner,
        "residual_ptr": None if residual is None else r_rows,
        "residual_outer_stride": r_outer,
        "residual_inner_stride": r_inner,
        **_norm_args("first", norms[0] if norms else None),
        **_norm_args("second", norms[1] if norms[1:] else None),
        "factor": next((s for s in stages if isinstance(s, float)), None),
        "out_ptr": out,
        "total_ptr": total,
        "num_rows": num_rows,
        "inner": inner,
        "hidden": x.shape[-1],
    }
    launch = Launch(
        kernel="norm:_rms_norm_kernel",
        grid=(cdiv(num_rows, tile["ROWS"]),),
        args=args,
        constexprs={"STAGES": letters, "COUNT": len(letters), **tile},
        num_warps=num_warps,
        dynamic=("num_rows",),
    )
    return [launch], (out, total)


def norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    how: Any = None,
    *,
    center: bool = False,
) -> Launches[tuple[Tensor, ...]]:
    """The norm of ``x [+ residual]``; with a residual, the sum comes last.  ``how`` is the weight's
    offset, or the bias of a layer norm, which ``center`` makes it."""
    of = NormOf(weight, eps, None, how, True) if center else NormOf(weight, eps, how)
    launches, (out, total) = row_stages(x, residual, [of] if residual is None else [ADD, of])
    return launches, (out,) if total is None else (out, total)
