"""Defines what the ops that quantize to FP8 share: the definition, its checks, cases and costs.

A scheme is a static scale, [1, 1] float32, or the size of the groups of a row that share a scale
found in the data: 0 for the whole row, or 128.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._float8 import E4M3, E4M3_MAX
from ._launch import run_launches
from ._op import TOLERANCES, Cost, Implementation, OpDesc, SemanticOp, TensorDesc, Tolerance
from .launches.quant import GROUP, Scheme, empty_results

EXACT = dict.fromkeys(TOLERANCES, Tolerance(0.0, 0.0))
"""Tolerances of ops whose definition fixes every bit."""
ONE_STEP = {**TOLERANCES, E4M3: Tolerance(2.0**-9, 2.0**-3)}
"""Tolerances of ops whose values may differ by a rounding before quantization, which may then give
the next FP8 value."""
_FIRST_FP8_SM = 89
# The scale of a row of zeros must have an inverse.
_LEAST_MAGNITUDE = 2.0**-64


def quantize_static(x: Tensor, scale: Tensor) -> Tensor:
    """``x * (1 / scale)`` in float32, rounded to the nearest e4m3, saturated; NaN stays NaN."""
    check(x, scale)
    return _to_e4m3(x.float() * scale.reciprocal())


def quantize_dynamic(x: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """``quantize_static`` of each group by a scale of its own: its largest magnitude * (1 / 448).

    The scales are [num_tokens, groups], column-major: consecutive in the tokens.  A group of zeros
    has a tiny scale.  A NaN or an infinity becomes its group's scale, after which no value of the
    group is finite.
    """
    check(x, group_size)
    size = group_size or x.shape[1]
    groups = x.unflatten(1, (x.shape[1] // size, size))
    largest = groups.abs().amax(-1).float().clamp(min=_LEAST_MAGNITUDE)
    scale = largest * (1.0 / E4M3_MAX)
    q = _to_e4m3((groups.float() * scale.reciprocal().unsqueeze(-1)).flatten(1))
    return q, scale.t().contiguous().t()


def _to_e4m3(scaled: Tensor) -> Tensor:
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3).contiguous()


def check(x: Tensor, scheme: Scheme, parts: int = 1) -> None:
    """Refuse what no implementation takes; ``parts`` columns of x make one of the result.

    Raises:
        ValueError: names the argument, what it is and what was expected.
    """
    if x.dim() != 2 or x.shape[1] % parts:
        even = ", an even number of columns: gate then up" if parts == 2 else ""
        raise ValueError(f"x is {list(x.shape)}, expected [num_tokens, columns]{even}")
    if isinstance(scheme, Tensor):
        if scheme.shape != (1, 1) or scheme.dtype != torch.float32:
            found = f"{scheme.dtype} {list(scheme.shape)}"
            raise ValueError(f"a static scale is {found}, expected torch.float32 [1, 1]")
        return
    width = x.shape[1] // parts
    if scheme not in (0, GROUP):
        raise ValueError(f"group_size {scheme}, expected 0 (a scale a token) or {GROUP}")
    if scheme and width % scheme:
        raise ValueError(f"{width} columns, expected a multiple of group_size {scheme}")


def refuses_device(desc: OpDesc) -> str:
    """Why FP8 does not run on the call's device; "" if it does."""
    if desc.device == "cuda" and 0 < desc.sm < _FIRST_FP8_SM:
        return (
            f"{desc.op}: FP8 came with SM {_FIRST_FP8_SM / 10} (Ada, Hopper), this GPU is SM "
            f"{desc.sm / 10}"
        )
    return ""


def quantizing_op(
    name: str,
    reference: Callable[..., Any],
    launches: Callable[..., Any],
    cases: Callable[..., Any],
    *,
    max_width: int,
    flops: int,
    parts: int = 1,
    exact: bool = False,
) -> SemanticOp:
    """Make an op whose first argument is x and whose last is the scheme.  Its results are those of
    ``reference``; a ``residual`` argument comes back as the last.

    Args:
        max_width: the most columns of a result that a program of the kernel holds.
        flops: operations an element of the result.
        parts: columns of x to one of the result.
        exact: the reference leaves no bit open.
    """

    def fake(*args: Any) -> Any:
        x, scheme = args[0], args[-1]
        check(x, scheme, parts)
        results = empty_results(x, x.shape[1] // parts, scheme)
        if "residual" in names:
            results = (*results, torch.empty_like(x, memory_format=torch.contiguous_format))
        return results if len(results) > 1 else results[0]

    def described(*args: Any) -> Any:
        check(args[0], args[-1], parts)
        planned, results = launches(*args)
        return planned, results if len(results) > 1 else results[0]

    def supports(desc: OpDesc) -> str:
        width = desc["x"].shape[1] // parts
        if width > max_width:
            return f"{width} columns > {max_width}: a row is one tile"
        return refuses_device(desc)

    def cost(desc: OpDesc) -> Cost:
        x, values = desc["x"], dict(desc.args)
        size = values.get("group_size")
        rows, width = x.shape[0], x.shape[1] // parts
        scales = 0 if size is None else rows * (width // size if size else 1)
        read = sum(v.nbytes for v in values.values() if isinstance(v, TensorDesc))
        residual_out = x.nbytes if "residual" in values else 0
        moved = read + rows * width + 4 * scales + residual_out
        return Cost(bytes=moved, flops=flops * rows * width)

    op = SemanticOp(
        name=name,
        reference=reference,
        fake=fake,
        cases=cases,
        cost=cost,
        implementations=(
            Implementation(
                "triton", run_launches(described), supports, devices=("cuda",), launches=described
            ),
            Implementation("native", reference, refuses_device, inline=True),
        ),
        tolerances=EXACT if exact else ONE_STEP,
    )
    names = [argument.name for argument in op.overload()._schema.arguments]
    return op
