"""``linear_fp8`` computes x @ weight.T + bias of FP8 matrices and their scales."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _library_product, _rowwise, _skinny
from ._float8 import E4M3
from ._launch import Launch, run_launches
from ._op import Case, Cost, Implementation, OpDesc, SemanticOp, TensorDesc, Tolerance
from .launches import linear_fp8 as kernels
from .launches.counters import counters
from .launches.quant import GROUP
from .launches.tiles import cdiv
from .quantize import refuses_device

_OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def linear_fp8(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """A linear layer on quantized operands, with float32 accumulation.

    Args:
        x: [num_tokens, in_features] float8_e4m3fn; what it stands for is ``x * x_scale``.
        x_scale: float32: [1, 1]; [num_tokens, 1]; or [num_tokens, in_features / 128], one for each
            128 columns of a row, column-major: strides (1, num_tokens).
        weight: [out_features, in_features] float8_e4m3fn.
        weight_scale: float32, respectively: [1, 1]; [out_features, 1], one a channel; or one for
            each block of 128 x 128, [out_features / 128, in_features / 128] rounded up.
        bias: [out_features] of ``out_dtype``, or None.
        out_dtype: float32, bfloat16 or float16.

    Returns:
        [num_tokens, out_features] of ``out_dtype``, contiguous; rounded once, after the bias.
        On Hopper, tensor cores hold partial sums of FP8 products to about 14 bits.

    Raises:
        ValueError: shapes or dtypes are none of these.
    """
    return torch.ops.fw.linear_fp8.default(  # type: ignore[no-any-return]
        x, x_scale, weight, weight_scale, bias, out_dtype
    )


def scheme_of(
    x: Any, x_scale: Any, weight: Any, weight_scale: Any, bias: Any, out_dtype: torch.dtype
) -> str:
    """The scheme, "tensor", "token" or "block", that the shapes of tensors or descriptions mean.

    Raises:
        ValueError: none, or dtypes that the op does not take; names what was found and expected.
    """
    dtypes = (x.dtype, x_scale.dtype, weight.dtype, weight_scale.dtype)
    if dtypes != (E4M3, torch.float32, E4M3, torch.float32) or out_dtype not in _OUT_DTYPES:
        raise ValueError(
            f"linear_fp8 of {', '.join(map(str, dtypes))} to {out_dtype}, expected {E4M3}, "
            f"torch.float32, {E4M3}, torch.float32 to one of {', '.join(map(str, _OUT_DTYPES))}"
        )
    shapes = [tuple(t.shape) for t in (x, x_scale, weight, weight_scale)]
    if bias is not None and (bias.dtype != out_dtype or tuple(bias.shape) != shapes[2][:1]):
        raise ValueError(
            f"linear_fp8: bias is {bias.dtype} {[*bias.shape]}, expected {out_dtype} "
            f"{[*shapes[2][:1]]}"
        )
    if len(shapes[0]) == len(shapes[2]) == 2 and shapes[0][1] == shapes[2][1]:
        n, k = shapes[2]
        groups = cdiv(k, GROUP)
        # The weight's shape first: it is known where the number of tokens is a symbol.
        if shapes[3] == (1, 1) and shapes[1] == (1, 1):
            return "tensor"
        if shapes[3] == (n, 1) and shapes[1] == (shapes[0][0], 1):
            return "token"
        if shapes[3] == (cdiv(n, GROUP), groups) and shapes[1] == (shapes[0][0], groups):
            return "block"
    found = ", ".join(str([*shape]) for shape in shapes)
    raise ValueError(
        f"linear_fp8 of x, x_scale, weight, weight_scale {found}: expected [M, K], [N, K] and "
        "scales [1, 1] with [1, 1], [M, 1] with [N, 1], or [M, K / 128] with [N / 128, K / 128]"
    )


def _reference(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    scheme_of(x, x_scale, weight, weight_scale, bias, out_dtype)
    product = F.linear(
        _dequantize(x, x_scale),
        _dequantize(weight, weight_scale),
        None if bias is None else bias.float(),
    )
    return product.to(out_dtype)


def _dequantize(q: Tensor, scale: Tensor) -> Tensor:
    """q * scale in float32; each scale is for 1 or 128 rows and columns, or for all."""
    for dim in (0, 1):
        if 1 < scale.shape[dim] < q.shape[dim]:
            scale = scale.repeat_interleave(GROUP, dim).narrow(dim, 0, q.shape[dim])
    return q.float() * scale


def _fake(*args: Any) -> Tensor:
    scheme_of(*args)
    x, _, weight, *_, out_dtype = args
    y: Tensor = x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)
    return y


def _native(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """cuBLASLt's GEMM; on a CPU, the GEMM of the dequantized operands."""
    if x.device.type == "cpu":
        return _reference(x, x_scale, weight, weight_scale, bias, out_dtype)
    rows = x.shape[0]
    scheme = scheme_of(x, x_scale, weight, weight_scale, bias, out_dtype)
    if not rows:
        return x.new_empty((0, weight.shape[0]), dtype=out_dtype)
    if scheme == "block" and rows % 4:
        # cuBLASLt takes columns of x_scale that are multiples of 16 bytes.
        missing = -rows % 4
        x = torch.cat((x, x.new_zeros((missing, x.shape[1]))))
        x_scale = F.pad(x_scale.t(), (0, missing)).t()
    y = torch._scaled_mm(
        x.contiguous(), weight.t(), x_scale, weight_scale.t(), bias=bias, out_dtype=out_dtype
    )
    return y[:rows]


def _native_supports(desc: OpDesc) -> str:
    if reason := refuses_device(desc):
        return reason
    try:
        scheme = scheme_of(*(value for _, value in desc.args))
    except ValueError as error:
        return str(error)
    if desc.device == "cpu":
        return ""
    n, k = desc["weight"].shape
    if n % 16 or k % 16:
        return f"linear_fp8: weight [{n}, {k}]: cuBLASLt takes multiples of 16"
    if scheme == "block" and desc.sm not in (0, 90):
        return f"linear_fp8: blocks of scales are in cuBLASLt for SM 9.0, not {desc.sm / 10}"
    if scheme == "block" and k % 512:
        # torch passes such scales on, and the result is wrong (seen with 2.11).
        return f"linear_fp8: in_features {k}: cuBLASLt takes rows of 4 scales of 128, so of 512"
    if desc["bias"] is not None and desc["out_dtype"] == torch.float32:
        return "linear_fp8: cuBLASLt adds no bias to a float32 result"
    return ""


def _launches(*args: Any, invariant: bool = False) -> tuple[list[Launch], Tensor]:
    return kernels.linear_fp8(scheme_of(*args), *args, invariant=invariant)


_invariant = partial(_launches, invariant=True)


def _by_row(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    scheme_of(x, x_scale, weight, weight_scale, bias, out_dtype)
    product = _rowwise.linear(
        _dequantize(x, x_scale),
        _dequantize(weight, weight_scale),
        None if bias is None else bias.float(),
    )
    return product.to(out_dtype)


def _launches_by_rows(*args: Any) -> tuple[list[Launch], Tensor]:
    """Launches of the tiled kernel where it is faster than cuBLASLt, else none."""
    x, _, weight, *_ = args
    ahead = kernels.is_ahead(scheme_of(*args), x.shape[0], weight.shape[0])
    return _launches(*args) if ahead else ([], _fake(*args))


_tiled = run_launches(_launches)


def _by_rows(*args: Any) -> Tensor:
    """Run the library's measured algorithm if there is one for the call's shapes, else
    ``by_rule``."""
    x = args[0]
    if x.device.type == "cuda":
        counters(x.device)  # a capture may come next, and cannot allocate them
        if (y := _library_product.linear_fp8(scheme_of(*args), *args)) is not None:
            return y
    return by_rule(*args)


def by_rule(*args: Any) -> Tensor:
    """Run the tiled kernel where it is faster than cuBLASLt's own choice, else cuBLASLt."""
    x, _, weight, *_ = args
    ahead = kernels.is_ahead(scheme_of(*args), x.shape[0], weight.shape[0])
    return _tiled(*args) if ahead else _native(*args)


def _cases(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Iterator[Case]:
    def scales(rows: int, columns: int) -> Tensor:
        return 0.5 + torch.rand((rows, columns), generator=gen, device=device)

    def calls(label: str, m: int, n: int, k: int, bias: bool = False) -> Iterator[Case]:
        def values(rows: int, size: float) -> Tensor:
            drawn = torch.randn((rows, k), generator=gen, device=device) * size
            return drawn.clamp(-448, 448).to(E4M3)

        x, weight = values(m, 1.0), values(n, 100.0)
        groups, unit = cdiv(k, 128), 100.0 * k**0.5
        added = torch.randn(n, generator=gen, device=device).to(dtype) if bias else None
        for scheme, x_scale, weight_scale in (
            ("tensor", scales(1, 1), scales(1, 1)),
            ("token", scales(m, 1), scales(n, 1)),
            ("block", scales(groups, m).t(), scales(cdiv(n, 128), groups)),
        ):
            args = (x, x_scale, weight, weight_scale / unit, added, dtype)
            yield Case(f"{label}, {scheme}", args)

    yield from calls("few rows", 3, 96, 512)
    yield from calls("one row", 1, 144, 128)
    yield from calls("bias", 20, 256, 1024, bias=True)
    yield from calls("odd M, N, K", 19, 37, 77, bias=True)
    yield from calls("several tiles", 150, 272, 640)
    yield from calls("no rows", 0, 16, 512)
    if device.type == "cuda":
        yield from calls("one row of Llama-3-8B", 1, 4096, 4096)
        yield from calls("deep", 70, 512, 14336, bias=True)


def _cost(desc: OpDesc) -> Cost:
    rows, (out_features, in_features) = desc["x"].shape[0], desc["weight"].shape
    read = sum(value.nbytes for _, value in desc.args if isinstance(value, TensorDesc))
    written = rows * out_features * desc["out_dtype"].itemsize
    return Cost(bytes=read + written, flops=2 * rows * out_features * in_features)


OP = SemanticOp(
    name="linear_fp8",
    reference=_reference,
    fake=_fake,
    cases=_cases,
    cost=_cost,
    implementations=(
        Implementation(
            "skinny",
            _skinny.linear_fp8(_by_rows),
            _skinny.linear_fp8_supports(_native_supports),
            devices=("cuda",),
            launches=_launches_by_rows,
        ),
        Implementation(
            "by_rows", _by_rows, _native_supports, devices=("cuda",), launches=_launches_by_rows
        ),
        Implementation("native", _native, _native_supports),
        Implementation(
            "triton",
            run_launches(_launches),
            refuses_device,
            devices=("cuda",),
            launches=_launches,
        ),
        Implementation(
            "invariant",
            run_launches(_invariant),
            refuses_device,
            devices=("cuda",),
            launches=_invariant,
            opt_in=True,
        ),
        Implementation("rowwise", _by_row, refuses_device, devices=("cpu",), opt_in=True),
    ),
    tolerances={
        # Results are sums of up to 5, from partial sums that tensor cores hold to 14 bits.
        torch.float32: Tolerance(4e-3, 1e-3),
        torch.bfloat16: Tolerance(1e-2, 1.6e-2),
        torch.float16: Tolerance(6e-3, 3e-3),
    },
)
