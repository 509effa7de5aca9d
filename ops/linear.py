"""``linear`` computes x @ weight.T + bias."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _library_product, _rowwise
from ._launch import Launch, run_launches
from ._op import Case, Cost, Implementation, OpDesc, SemanticOp, Tolerance
from ._skinny import refuses_bf16, rows_to_stream
from .launches import linear as kernels


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer with float32 accumulation.

    Args:
        x: [..., in_features], floating point.
        weight: [out_features, in_features], same dtype.
        bias: [out_features], same dtype, or None.

    Returns:
        [..., out_features] in x's dtype, contiguous; rounded once, after the bias.

    Raises:
        ValueError: x and weight disagree on in_features or dtype.
    """
    return torch.ops.fw.linear.default(x, weight, bias)  # type: ignore[no-any-return]


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    _check(x, weight)
    return F.linear(x, weight, bias)


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dtype != weight.dtype or not x.dtype.is_floating_point:
        raise ValueError(
            f"linear of {x.dtype} by {weight.dtype}, expected one floating-point dtype for both"
        )
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x has {x.shape[-1]} features, expected in_features {weight.shape[1]} of weight "
            f"{list(weight.shape)}"
        )


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    _check(x, weight)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _launches(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, invariant: bool = False
) -> tuple[list[Launch], Tensor]:
    _check(x, weight)
    return kernels.linear(x, weight, bias, invariant=invariant)


_invariant = partial(_launches, invariant=True)


def _by_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    _check(x, weight)
    return _rowwise.linear(x, weight, bias)


def _skinny(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The streaming kernel for few rows, else the library."""
    rows = rows_to_stream(x, weight)
    if rows is None:
        _check(x, weight)
        return _library_product.linear(x, weight, bias)
    y: Tensor = torch.ops.fw_cuda.skinny_linear.default(rows, weight, bias)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])


def _skinny_runs(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[str, ...]:
    return ("cuBLAS" if rows_to_stream(x, weight) is None else "skinny_linear",)


def _cases(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Iterator[Case]:
    def call(label: str, rows: tuple[int, ...], n: int, k: int, bias: bool = False) -> Case:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=gen, device=device)

        x = randn(*rows, k).to(dtype)
        weight = (randn(n, k) * k**-0.5).to(dtype)
        return Case(label, (x, weight, randn(n).to(dtype) if bias else None))

    yield call("one row", (1,), 96, 64)
    yield call("bias", (5,), 128, 256, bias=True)
    yield call("odd M, N, K", (19,), 37, 77, bias=True)
    yield call("several row tiles", (150,), 160, 48)
    yield call("three dimensions", (2, 3), 40, 32)
    yield call("one feature", (3,), 1, 1, bias=True)
    yield call("deep", (2,), 33, 1031)
    yield call("no rows", (0,), 16, 32)
    x, weight, _ = call("", (6,), 64, 160).args
    yield Case("slice of [6, 160]", (x[:, 32:96], weight[:, 32:96], None))
    if device.type == "cuda":  # large enough for the streaming kernel, too large to interpret
        yield call("1 row, 8 MiB", (1,), 2048, 2048, bias=True)
        yield call("odd N, 7 rows", (7,), 4099, 1088)
        yield call("13 rows", (13,), 6144, 1024, bias=True)
        yield call("31 rows of three dimensions", (1, 31), 30001, 192)
        yield call("33 rows", (33,), 2048, 2048)
        x, weight, bias = call("", (9,), 2048, 2304, bias=True).args
        yield Case("slice of [9, 2304]", (x[:, 128:2176], weight[:, 128:2176], bias))


def _cost(desc: OpDesc) -> Cost:
    x, weight, bias = desc["x"], desc["weight"], desc["bias"]
    out_features, in_features = weight.shape
    rows = x.numel // in_features
    out_bytes = rows * out_features * x.dtype.itemsize
    bias_bytes = bias.nbytes if bias is not None else 0
    return Cost(
        bytes=x.nbytes + weight.nbytes + out_bytes + bias_bytes,
        flops=2 * rows * out_features * in_features,
    )


OP = SemanticOp(
    name="linear",
    reference=_reference,
    fake=_fake,
    cases=_cases,
    cost=_cost,
    # cuBLAS is faster than a plain Triton GEMM at every shape, so "triton" comes after "native".
    implementations=(
        Implementation("skinny", _skinny, refuses_bf16, devices=("cuda",), runs=_skinny_runs),
        Implementation("native", _reference, inline=True),
        Implementation("triton", run_launches(_launches), devices=("cuda",), launches=_launches),
        Implementation(
            "invariant",
            run_launches(_invariant),
            devices=("cuda",),
            launches=_invariant,
            opt_in=True,
        ),
        Implementation("rowwise", _by_row, devices=("cpu",), opt_in=True),
    ),
    tolerances={
        torch.float32: Tolerance(1e-5, 1e-5),
        torch.bfloat16: Tolerance(1e-2, 1.6e-2),
        # cuBLAS may reduce split-K partial sums in float16.
        torch.float16: Tolerance(5e-3, 5e-3),
    },
)
