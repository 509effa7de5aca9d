"""``quant_fp8_*`` and ``quant_int8_*`` quantize to FP8 and int8, and other ops do so last.

How is an axis of these ops, ``SCHEMES``: to FP8 or int8, by a static scale, [1, 1] float32, or by
scales found in the data, for groups of a row of a given size: 0 for the whole row, or 128.  An op
that quantizes its result takes that scale or size as its last argument; its values and scales come
first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..core.desc import (
    EXACT,
    TOLERANCES,
    Case,
    Cases,
    Cost,
    Draw,
    OpDesc,
    TensorDesc,
    Tolerance,
    drawn,
)
from ..core.float8 import E4M3
from ..core.launch import Launches
from ..core.op import Implementation, SemanticOp, parameter, signed, triton
from ..launches.quant import GROUP, LARGEST, Scheme, empty_results, quantize as plan_quantize


@dataclass(frozen=True)
class Quant:
    """One way to quantize the result of an op.

    Attributes:
        parameter: the op's argument that says how: the static scale, or the size of the groups.
        results: how many tensors are made: values alone, or with their scales.
        flops: operations an element.
        max_width: the most columns that a program of the kernel holds.
        dtype: of the values: float8_e4m3fn or int8.
    """

    parameter: inspect.Parameter
    results: int
    flops: int
    max_width: int
    dtype: torch.dtype = E4M3

    @property
    def static(self) -> bool:
        """Whether the scale is known before the data."""
        return self.results == 1

    def owns(self, scheme: Scheme) -> bool:
        return isinstance(scheme, Tensor) == self.static


_STATIC = Quant(parameter("scale", Tensor), results=1, flops=1, max_width=1 << 30)
_DYNAMIC = Quant(parameter("group_size", int), results=2, flops=2, max_width=1 << 15)
SCHEMES = {
    "static": _STATIC,
    "dynamic": _DYNAMIC,
    "int8_static": replace(_STATIC, dtype=torch.int8),
    "int8_dynamic": replace(_DYNAMIC, dtype=torch.int8),
}
"""The axis "quantization" of every op that has it, where "" is none."""

ONE_STEP = {**TOLERANCES, E4M3: Tolerance(2.0**-9, 2.0**-3), torch.int8: Tolerance(2.0, 0.0)}
"""Tolerances of ops whose values may differ by a rounding before quantization, which may then give
the next FP8 value, or the next two of int8: a step of bfloat16 is one of its 127."""
_FIRST_FP8_SM = 89
# The scale of a row of zeros must have an inverse.
_LEAST_MAGNITUDE = 2.0**-64


def quantize_static(x: Tensor, scale: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    """``x * (1 / scale)`` in float32, rounded to the nearest e4m3 or int8, ties to even, saturated;
    NaN stays NaN in e4m3 and becomes 0 in int8."""
    check(x, scale)
    return _rounded(x.float() * scale.reciprocal(), dtype)


def quantize_dynamic(
    x: Tensor, group_size: int, dtype: torch.dtype = E4M3
) -> tuple[Tensor, Tensor]:
    """``quantize_static`` of each group by a scale of its own: its largest magnitude * (1 / 448),
    for int8 * (1 / 127).

    The scales are [num_tokens, groups], column-major: consecutive in the tokens.  A group of zeros
    has a tiny scale.  A NaN or an infinity becomes its group's scale, after which no product of the
    group's values with it is finite.
    """
    check(x, group_size)
    size = group_size or x.shape[1]
    groups = x.unflatten(1, (x.shape[1] // size, size))
    largest = groups.abs().amax(-1).float().clamp(min=_LEAST_MAGNITUDE)
    scale = largest * (1.0 / LARGEST[dtype])
    q = _rounded((groups.float() * scale.reciprocal().unsqueeze(-1)).flatten(1), dtype)
    return q, scale.t().contiguous().t()


def _rounded(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    largest = LARGEST[dtype]
    if dtype == torch.int8:
        scaled = scaled.nan_to_num(0.0, largest, -largest - 1).round()
        return scaled.clamp(-largest - 1, largest).to(dtype).contiguous()
    return scaled.clamp(-largest, largest).to(dtype).contiguous()


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


def finish(y: Tensor, scheme: Scheme | None, dtype: torch.dtype = E4M3) -> tuple[Tensor, ...]:
    """The last step of a definition: quantize ``y`` by ``scheme``, or return it unchanged."""
    if scheme is None:
        return (y,)
    if isinstance(scheme, Tensor):
        return (quantize_static(y, scheme, dtype),)
    return quantize_dynamic(y, scheme, dtype)


def alone_or_all(results: tuple[Tensor, ...]) -> Any:
    """The results as an op returns them."""
    return results if len(results) > 1 else results[0]


def too_wide_for(quant: Quant, width: Any, max_width: int = 1 << 30) -> str:
    """Why no kernel that quantizes holds rows of this width, or nothing."""
    most = min(quant.max_width, max_width)
    return f"{width} columns > {most}: a row is one tile" if width > most else ""


def quantizing_cost(desc: OpDesc, width: Any, flops: int) -> Cost:
    """The cost of a call that reads its tensors and writes FP8 of this width, with scales."""
    rows, size = desc["x"].shape[0], dict(desc.args).get("group_size")
    scales = 0 if size is None else rows * (width // size if size else 1)
    read = sum(value.nbytes for _, value in desc.args if isinstance(value, TensorDesc))
    return Cost(bytes=read + rows * width + 4 * scales, flops=flops * rows * width)


def schemes(
    quant: str, device: torch.device, gen: torch.Generator, columns: int
) -> Iterator[tuple[str, Scheme]]:
    """The schemes of one kind that apply to so many columns, for cases, by name."""
    static = 0.02 + torch.rand((1, 1), generator=gen, device=device) / 8
    found: list[Scheme] = [static, 0, *([GROUP] if columns % GROUP == 0 else [])]
    for scheme in found:
        if SCHEMES[quant].owns(scheme):
            yield "static" if isinstance(scheme, Tensor) else f"group {scheme}", scheme


def refuses_device(desc: OpDesc, dtype: torch.dtype = E4M3) -> str:
    """Why values of a dtype do not run on the call's device; "" if they do, as int8 does on all."""
    if dtype == E4M3 and desc.device == "cuda" and 0 < desc.sm < _FIRST_FP8_SM:
        return (
            f"{desc.op}: FP8 came with SM {_FIRST_FP8_SM / 10} (Ada, Hopper), this GPU is SM "
            f"{desc.sm / 10}"
        )
    return ""


def quantizing_op(
    name: str,
    quant: str,
    cases: Cases,
    *,
    activation: str = "none",
    before: Callable[[Tensor], Tensor] = lambda x: x,
    flops: int = 0,
    tolerances: Mapping[torch.dtype, Tolerance],
) -> SemanticOp:
    """The op (x, scheme) that quantizes ``before(x)``; ``activation`` is its kernel's constant, and
    ``flops`` are its operations an element before it quantizes."""
    how, parts = SCHEMES[quant], 1 if activation == "none" else 2

    def reference(x: Tensor, scheme: Scheme) -> Any:
        return alone_or_all(finish(before(x), scheme, how.dtype))

    def fake(x: Tensor, scheme: Scheme) -> Any:
        check(x, scheme, parts)
        return alone_or_all(empty_results(x, x.shape[1] // parts, scheme, how.dtype))

    def launches(x: Tensor, scheme: Scheme) -> Launches[Any]:
        check(x, scheme, parts)
        planned, results = plan_quantize(x, scheme, activation, how.dtype)
        return planned, alone_or_all(results)

    def supports(desc: OpDesc) -> str:
        return too_wide_for(how, desc["x"].shape[1] // parts) or native_supports(desc)

    def native_supports(desc: OpDesc) -> str:
        return refuses_device(desc, how.dtype)

    return SemanticOp(
        name=name,
        reference=signed(reference, [parameter("x", Tensor), how.parameter], how.results),
        fake=fake,
        cases=cases,
        cost=lambda desc: quantizing_cost(desc, desc["x"].shape[1] // parts, flops + how.flops),
        implementations=(
            triton(launches, supports),
            Implementation("native", reference, native_supports, inline=True),
        ),
        tolerances=tolerances,
    )


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


def quantize_operand(
    x: Tensor, dtype: str, scale: Tensor | None, group_size: int
) -> tuple[Tensor, Tensor]:
    """Quantize what a linear layer multiplies.

    Args:
        x: [num_tokens, columns], floating point.
        dtype: "float8_e4m3fn" or "int8".
        scale: [1, 1] float32; None finds a scale for each row, or for each ``group_size`` columns
            of it, where that is not 0.

    Returns:
        (q, scale): as ``quant_fp8_static`` and ``quant_fp8_dynamic`` give them; of int8, values are
        saturated at -128 and 127, a NaN becomes 0, and the largest magnitude of a row becomes 127.
    """
    kind = f"{_OPS[dtype]}_{'dynamic' if scale is None else 'static'}"
    op = getattr(torch.ops.fw, kind).default
    return op(x, group_size) if scale is None else (op(x, scale), scale)


def _cases(quant: str) -> Cases:
    @drawn
    def cases(draw: Draw) -> Iterator[Case]:
        dtype, randn = draw.dtype, draw.randn

        def calls(label: str, x: Tensor) -> Iterator[Case]:
            for name, scheme in schemes(quant, draw.device, draw.gen, x.shape[1]):
                yield Case(f"{label}, {name}", (x, scheme))

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


_OPS = {"float8_e4m3fn": "quant_fp8", "int8": "quant_int8"}


def _name(quant: str) -> str:
    """The name of the op alone; in those of ops that quantize last, FP8 is not named."""
    return f"quant_{quant}" if SCHEMES[quant].dtype == torch.int8 else f"quant_fp8_{quant}"


QUANTIZE = {
    quant: quantizing_op(_name(quant), quant, _cases(quant), tolerances=EXACT) for quant in SCHEMES
}
"""The op of each kind of quantization."""
