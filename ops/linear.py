"""``linear``: x @ weight.T + bias."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ._cuda import load_cuda_library
from ._launch import Launch, run_launches
from ._op import Case, Cost, Implementation, OpDesc, SemanticOp, Tolerance
from .launches import linear as kernels

# What the kernel's copies take of a row at least, and the most rows that a tile of it holds.
_SKINNY_COLUMNS = 64
_SKINNY_ROWS = 32
_SKINNY_BYTES = 8 << 20


def skinny_rows(out_features: int, in_features: int) -> int:
    """The most rows for which ``fw_cuda::skinny_linear`` is the choice for a bfloat16 weight.

    Measured (bench/NOTES.md): with it the products of a Llama-3-8B token take 8 % less time than
    with cuBLAS up to 8 rows, 7 % at 16 and 1 % at 32; beyond, x weighs as much in L2 as the weight
    in memory, and cuBLAS is ahead.  0 where it cannot run, and below 8 MiB, where it is not
    measured and launches rather than bytes are the time.
    """
    if in_features % _SKINNY_COLUMNS or 2 * out_features * in_features < _SKINNY_BYTES:
        return 0
    return _SKINNY_ROWS


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer with float32 accumulation.

    Args:
        x: [..., in_features], floating point.
        weight: [out_features, in_features], same dtype.
        bias: [out_features], same dtype, or None.

    Returns:
        [..., out_features] in x's dtype, contiguous; rounded once, after the bias.

    Raises:
        ValueError: x and weight disagree on in_features (native: PyTorch's RuntimeError).
    """
    return torch.ops.fw.linear.default(x, weight, bias)  # type: ignore[no-any-return]


def _reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def _check(x: Tensor, weight: Tensor) -> None:
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x has {x.shape[-1]} features, expected in_features {weight.shape[1]} of weight "
            f"{list(weight.shape)}"
        )


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    _check(x, weight)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _launches(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[list[Launch], Tensor]:
    _check(x, weight)
    return kernels.linear(x, weight, bias)


def _can_stream(t: Tensor) -> bool:
    """Whether the kernel's 16-byte copies can read the rows of a matrix."""
    return t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0


def _skinny(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The streaming kernel for few rows, else ``F.linear``: rows are known only here, and fixed
    under capture.  There the weight is prefetched before the kernel ahead has finished, so that
    one must not write it.
    """
    out_features, in_features = weight.shape
    x_2d = x if x.dim() == 2 else x.reshape(-1, in_features)
    few = x_2d.shape[0] <= skinny_rows(out_features, in_features)
    if not (few and _can_stream(x_2d) and _can_stream(weight)):
        return F.linear(x, weight, bias)
    y: Tensor = torch.ops.fw_cuda.skinny_linear.default(x_2d, weight, bias)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], out_features)


def _skinny_supports(desc: OpDesc) -> str:
    weight = desc["weight"]
    if desc.device != "cuda":
        return f"on {desc.device}, not CUDA"
    # Its tensor copies came with SM 9.0.  For 8.0 and 8.9 the seam is the producer: cp.async.
    if desc.sm != 90:
        return f"built for SM 9.0, not {desc.sm / 10 if desc.sm else 'an unknown one'}"
    if desc["x"].dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return f"dtype {desc['x'].dtype}, not bfloat16"
    if not skinny_rows(*weight.shape):
        return (
            f"weight {list(weight.shape)}: in_features not a multiple of {_SKINNY_COLUMNS}, or "
            f"less than {_SKINNY_BYTES >> 20} MiB"
        )
    return "" if load_cuda_library() else "csrc is not built into this installation"


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
    # cuBLAS is ahead of a plain Triton GEMM at every shape; the Triton one is for where it is not.
    implementations=(
        Implementation("skinny", _skinny, _skinny_supports, devices=("cuda",), opt_in=True),
        Implementation("native", _reference, inline=True),
        Implementation("triton", run_launches(_launches), devices=("cuda",), launches=_launches),
    ),
    tolerances={
        torch.float32: Tolerance(1e-5, 1e-5),
        torch.bfloat16: Tolerance(1e-2, 1.6e-2),
        # cuBLAS may reduce split-K partial sums in float16.
        torch.float16: Tolerance(5e-3, 5e-3),
    },
)
