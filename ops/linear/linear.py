"""``linear`` computes ``x @ weight.T`` and what is done with its sums: the op of all linear layers.

A layer is described as data (``desc.py``): the format of its weight follows from dtypes and
scales, and its epilogue from the arguments that are given.  Passes attach an epilogue by setting an
argument.  Which kernel runs follows from the description and the number of rows
(``kernels.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core import rowwise as _rowwise
from ..core.choice import Choice
from ..core.desc import Case, Cost, Draw, OpDesc, TensorDesc, Tolerance, drawn
from ..core.float8 import E4M3
from ..core.launch import Launches
from ..core.op import Implementation, SemanticOp, dispatched, on_cpu, on_gpu, triton, with_defaults
from ..core.target import Target
from ..core.tiles import cdiv
from ..norm.gated_act import PLAIN_ACTS, activate
from ..norm.quantize import quantize_static, refuses_device
from .desc import LinearArgs, LinearDesc, columns_of, describe
from .kernels import (
    KERNELS,
    LIBRARY,
    STREAM,
    WITHOUT_CSRC,
    Gemm,
    chooser,
    kernels_of,
    library,
    multiply,
    plan,
    plan_epilogue,
    plan_tiled,
    runner,
)


@dispatched
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    activation: str | None = None,
    out_scale: Tensor | None = None,
    weight_zero: Tensor | None = None,
    weight_format: str | None = None,
    weight_row_scale: Tensor | None = None,
) -> Tensor:
    """A linear layer with float32 accumulation; then its activation and quantization, if given.

    Args:
        x: [..., in_features], floating point; or [num_tokens, in_features] float8_e4m3fn, which
            stands for ``x * x_scale``.
        weight: [out_features, in_features], same dtype.
        bias: [out_features] of the dtype of the sums, or None.
        x_scale: of FP8, float32: [1, 1]; [num_tokens, 1]; or [num_tokens, in_features / 128], one
            for each 128 columns of a row, column-major: strides (1, num_tokens).
        weight_scale: of FP8, float32, respectively: [1, 1]; [out_features, 1], one a channel; or
            one for each block of 128 x 128, [out_features / 128, in_features / 128] rounded up.
        out_dtype: what sums are rounded to: float32, bfloat16 or float16 for FP8 operands, else
            x's dtype or None.
        activation: None, or "silu" or "gelu_tanh" (Shazeer, 2020, GLU Variants, eq. 6): the
            weight's rows are I of gate, then I of up, and the result is ``act(gate) * up``; or
            "relu", "relu2" (its square), "gelu" or "gelu_new" (by tanh), of every sum.
        out_scale: [1, 1] float32: the result is quantized by it, as ``quant_fp8_static`` does.
        weight_zero, weight_row_scale: of a ``weight_format`` that has them.
        weight_format: None, or one of ``STORED_FORMATS``.  It says dtypes and shapes of the others,
            and whether x is quantized; the weight stands for what ``dequantize`` makes of it.

    Returns:
        [..., out_features], or [..., I], contiguous.  It is rounded after the bias, once more after
        the activation, which takes rounded gates and ups, and once more where it is quantized.  On
        Hopper, tensor cores hold partial sums of FP8 products to about 14 bits.

    Raises:
        ValueError: shapes, dtypes or the activation are none of these.
    """
    how = (out_dtype, activation, out_scale, weight_zero, weight_format, weight_row_scale)
    return _define(F.linear, x, weight, bias, x_scale, weight_scale, *how)


def _define(gemm: Gemm, *args: Any) -> Tensor:
    """The definition of ``linear``, over the GEMM that it is given."""
    describe(*args)
    call = LinearArgs(*args)
    return _finish(multiply(gemm, call), *call.epilogue)


def _finish(y: Tensor, activation: str | None, out_scale: Tensor | None) -> Tensor:
    """The epilogue in plain ATen."""
    y = y if activation is None else activate(y, activation)
    return y if out_scale is None else quantize_static(y, out_scale)


def _fake(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    desc = describe(x, weight, *rest)
    dtype = E4M3 if desc.quantize else desc.dtype
    return x.new_empty((*x.shape[:-1], desc.columns), dtype=dtype)


def _torch(*args: Any) -> Tensor:
    """torch's own GEMM, then the epilogue in plain ATen."""
    describe(*args)
    return _finish(library(*args), *LinearArgs(*args).epilogue)


def _admitted(*args: Any) -> Tensor:
    """The kernel that is admitted for the weight's format; on a CPU, the epilogue in plain ATen."""
    call = LinearArgs(*args)
    run = runner(kernels_of(call.weight_format or ""))
    if call.x.device.type == "cuda":
        return run(*call)
    return _finish(run(*call._replace(activation=None, out_scale=None)), *call.epilogue)


def _plan_admitted(*args: Any) -> Launches[Tensor]:
    """The launches of an epilogue behind an admitted kernel, which compiles itself."""
    return plan(*args, kernels=kernels_of(LinearArgs(*args).weight_format or ""))


def _choices_of_admitted(*args: Any) -> tuple[Choice, ...]:
    return chooser(kernels_of(LinearArgs(*args).weight_format or ""))(*args)


def _plan_tiled(*args: Any, invariant: bool = False) -> Launches[Tensor]:
    describe(*args)
    launches, y = plan_tiled(*args, invariant=invariant)
    more, y = plan_epilogue(y, *LinearArgs(*args).epilogue)
    return [*launches, *more], y


_plan_invariant = partial(_plan_tiled, invariant=True)


_with_defaults = with_defaults(LinearArgs)


def describe_op(call: OpDesc) -> LinearDesc:
    """The description of a call of this op."""
    return describe(*(value for _, value in call.args))


def _supports(
    why_not: Callable[[LinearDesc, OpDesc], str], *, stored: bool = False
) -> Callable[[OpDesc], str]:
    """``supports`` of an implementation: "" or why it does not serve a call.

    Args:
        stored: it reads weights of admitted formats too.
    """

    def supports(call: OpDesc) -> str:
        try:
            desc = describe_op(call)
        except ValueError as error:
            return str(error)
        if desc.format.stored and not stored:
            return f"the weight is stored as {desc.weight_format!r}, an admitted format"
        if desc.format.quantizes_x and (reason := refuses_device(call)):
            return reason
        return why_not(desc, call)

    return supports


def _skinny_refuses(desc: LinearDesc, call: OpDesc) -> str:
    target = Target.of(call)
    return LIBRARY.refuses(desc, 1, target) or STREAM.refuses(desc, 1, target)


def _library_refuses(desc: LinearDesc, call: OpDesc) -> str:
    if not (desc.format.scaled or desc.has_epilogue):
        return "nothing is done with the sums: native is the same GEMM"
    return LIBRARY.refuses(desc, 1, Target.of(call))


def _native_refuses(desc: LinearDesc, call: OpDesc) -> str:
    if desc.format.stored:
        kernels = [k for k in kernels_of(desc.weight_format) if k not in KERNELS]
        return f"{kernels[0].name} is admitted for {desc.weight_format!r}" if kernels else ""
    return "FP8 operands: scaled_mm multiplies them" if desc.format.scaled else ""


def _admitted_refuses(desc: LinearDesc, call: OpDesc) -> str:
    return "" if desc.format.stored else "the weight is not stored in an admitted format"


def _torch_refuses(desc: LinearDesc, call: OpDesc) -> str:
    if not desc.format.scaled:
        return "operands have no scales: native multiplies them"
    return LIBRARY.refuses(desc, 1, Target.of(call))


def _invariant_refuses(desc: LinearDesc, call: OpDesc) -> str:
    return "an epilogue's kernel follows the number of rows" if desc.has_epilogue else ""


@drawn
def _cases(draw: Draw) -> Iterator[Case]:
    dtype, randn = draw.dtype, draw.randn

    def call(
        label: str,
        rows: tuple[int, ...],
        n: int,
        k: int,
        bias: bool = False,
        activation: str | None = None,
        quantize: bool = False,
    ) -> Case:
        x = randn(*rows, k).to(dtype)
        weight = (randn(n, k) * k**-0.5).to(dtype)
        scale = 0.02 + draw.rand(1, 1) / 8 if quantize else None
        rest = (randn(n).to(dtype) if bias else None, None, None, None, activation, scale)
        return Case(label, (x, weight, *rest), _tolerances(activation, quantize))

    yield call("one row", (1,), 96, 64)
    yield call("bias", (5,), 128, 256, bias=True)
    yield call("odd M, N, K", (19,), 37, 77, bias=True)
    yield call("several row tiles", (150,), 160, 48)
    yield call("three dimensions", (2, 3), 40, 32)
    yield call("one feature", (3,), 1, 1, bias=True)
    yield call("deep", (2,), 33, 1031)
    yield call("no rows", (0,), 16, 32)
    x, weight, *_ = call("", (6,), 64, 160).args
    yield Case("slice of [6, 160]", (x[:, 32:96], weight[:, 32:96], None))
    yield call("SiLU, one row", (1,), 2 * 96, 64, activation="silu")
    yield call("GELU", (5,), 2 * 40, 256, activation="gelu_tanh")
    yield call("SiLU with bias, odd M, I, K", (19,), 2 * 37, 77, bias=True, activation="silu")
    yield call("SiLU, three dimensions", (2, 3), 2 * 40, 32, activation="silu")
    yield call("SiLU, no rows", (0,), 2 * 16, 32, activation="silu")
    yield from (call(f"{act}, odd M, N, K", (19,), 37, 77, True, act) for act in PLAIN_ACTS)
    yield call("quantized", (7,), 48, 64, quantize=True)
    yield call("GELU, quantized", (3,), 2 * 24, 64, activation="gelu_tanh", quantize=True)
    yield from _fp8_cases(draw)
    if draw.device.type == "cuda":  # large enough for the streaming kernel, too large to interpret
        yield call("1 row, 8 MiB", (1,), 2048, 2048, bias=True)
        yield call("odd N, 7 rows", (7,), 4099, 1088)
        yield call("13 rows", (13,), 6144, 1024, bias=True)
        yield call("31 rows of three dimensions", (1, 31), 30001, 192)
        yield call("33 rows", (33,), 2048, 2048)
        x, weight, bias, *_ = call("", (9,), 2048, 2304, bias=True).args
        yield Case("slice of [9, 2304]", (x[:, 128:2176], weight[:, 128:2176], bias))
        yield call("SiLU, 1 row, 16 MiB", (1,), 2 * 2048, 2048, activation="silu")
        yield call("GELU, odd I, 7 rows", (7,), 2 * 2053, 1088, activation="gelu_tanh")
        yield call("SiLU, 13 rows", (1, 13), 2 * 3072, 1024, bias=True, activation="silu")
        yield call("SiLU, 32 rows", (32,), 2 * 15001, 192, activation="silu")
        yield call("SiLU, 33 rows", (33,), 2 * 2048, 2048, activation="silu")
        for activation in PLAIN_ACTS:
            yield call(f"{activation}, 7 rows", (7,), 4099, 1088, True, activation)
        yield call("quantized, 5 rows", (5,), 4096, 2048, bias=True, quantize=True)


def _fp8_cases(draw: Draw) -> Iterator[Case]:
    dtype = draw.dtype

    def scales(rows: int, columns: int) -> Tensor:
        return 0.5 + draw.rand(rows, columns)

    def values(rows: int, columns: int, size: float) -> Tensor:
        return (draw.randn(rows, columns) * size).clamp(-448, 448).to(E4M3)

    def calls(label: str, m: int, n: int, k: int, bias: bool = False) -> Iterator[Case]:
        x, weight = values(m, k, 1.0), values(n, k, 100.0)
        groups, unit = cdiv(k, 128), 100.0 * k**0.5
        added = draw.randn(n).to(dtype) if bias else None
        for scheme, x_scale, weight_scale in (
            ("tensor", scales(1, 1), scales(1, 1)),
            ("token", scales(m, 1), scales(n, 1)),
            ("block", scales(groups, m).t(), scales(cdiv(n, 128), groups)),
        ):
            args = (x, weight, added, x_scale, weight_scale / unit, dtype, None, None)
            yield Case(f"{label}, FP8 {scheme}", args, FP8)

    def gated(label: str, m: int, n: int, k: int, activation: str = "silu") -> Iterator[Case]:
        """Cases whose gates and ups are a few times the scale of the result."""
        x, weight = values(m, k, 100.0), values(2 * n, k, 100.0)
        out_scale = 0.05 + scales(1, 1) / 100
        for scheme, rows in (("tensor", (1, 1)), ("token", (m, 2 * n))):
            x_scale, weight_scale = (scales(count, 1) / 100 for count in rows)
            how = (x_scale, weight_scale * k**-0.5, dtype, activation, out_scale)
            yield Case(f"{label}, FP8 {scheme}", (x, weight, None, *how), FP8_GATED)

    yield from calls("few rows", 3, 96, 512)
    yield from calls("one row", 1, 144, 128)
    yield from calls("bias", 20, 256, 1024, bias=True)
    yield from calls("odd M, N, K", 19, 37, 77, bias=True)
    yield from calls("several tiles", 150, 272, 640)
    yield from calls("no rows", 0, 16, 512)
    if draw.device.type == "cuda":
        yield from calls("one row of Llama-3-8B", 1, 4096, 4096)
        yield from calls("deep", 70, 512, 14336, bias=True)
    yield from gated("SiLU, few rows", 3, 48, 512)
    yield from gated("GELU, one row", 1, 72, 128, "gelu_tanh")
    yield from gated("SiLU, odd M, I, K", 19, 37, 77)
    yield from gated("SiLU, no rows", 0, 16, 512)
    if draw.device.type == "cuda":  # large enough for the streaming kernel
        yield from gated("SiLU, 1 row, 16 MiB", 1, 4096, 2048)
        yield from gated("GELU, 7 rows, odd I", 7, 4104, 1152, "gelu_tanh")
        yield from gated("SiLU, 33 rows", 33, 4096, 2048)


PLAIN = {
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.bfloat16: Tolerance(1e-2, 1.6e-2),
    # cuBLAS may reduce split-K partial sums in float16.
    torch.float16: Tolerance(5e-3, 5e-3),
}
GATED = {
    # Products of two results, each off by a rounding.
    torch.float32: Tolerance(3e-5, 3e-5),
    torch.bfloat16: Tolerance(3e-2, 3.2e-2),
    torch.float16: Tolerance(1e-2, 1e-2),
}
FP8 = {
    # Results are sums of up to 5, from partial sums that tensor cores hold to 14 bits.
    torch.float32: Tolerance(4e-3, 1e-3),
    torch.bfloat16: Tolerance(1e-2, 1.6e-2),
    torch.float16: Tolerance(6e-3, 3e-3),
}
# In units of out_scale: gate and up of a few units, each off by what tensor cores drop.
FP8_GATED = {**FP8, E4M3: Tolerance(0.5, 2.0**-3)}


def _tolerances(activation: str | None, quantize: bool) -> dict[torch.dtype, Tolerance]:
    """Tolerances of the cases; a quantized result may be off by one FP8 value."""
    found = PLAIN if activation is None else GATED
    return {**found, E4M3: Tolerance(0.5, 2.0**-3)} if quantize else found


def _cost(call: OpDesc) -> Cost:
    x, (out_features, in_features) = call["x"], call["weight"].shape
    if call["weight_format"] is not None:
        desc = describe_op(call)
        out_features, in_features = desc.out_features, desc.in_features
    activated, quantized = (call[name] is not None for name in ("activation", "out_scale"))
    rows = x.numel // in_features
    read = sum(value.nbytes for _, value in call.args if isinstance(value, TensorDesc))
    written = rows * columns_of(call["activation"], out_features)
    size = 1 if quantized else (call["out_dtype"] or x.dtype).itemsize
    return Cost(
        bytes=read + written * size,
        flops=2 * rows * out_features * in_features + (5 * activated + quantized) * written,
    )


def _by_table(
    name: str, kernels: Any, why_not: Callable[[LinearDesc, OpDesc], str]
) -> Implementation:
    """The implementation for which the table selects among these kernels."""
    run, selects = _with_defaults(runner(kernels)), _with_defaults(chooser(kernels))
    return on_gpu(name, run, _supports(why_not), launches=_with_defaults(plan), selects=selects)


OP = SemanticOp(
    reference=linear,
    fake=_fake,
    cases=_cases,
    cost=_cost,
    # cuBLAS is faster than a plain Triton GEMM at every shape, so "triton" comes after the library.
    implementations=(
        _by_table("skinny", KERNELS, _skinny_refuses),
        _by_table("library", WITHOUT_CSRC, _library_refuses),
        Implementation("native", linear, _supports(_native_refuses, stored=True), inline=True),
        Implementation("scaled_mm", _with_defaults(_torch), _supports(_torch_refuses)),
        triton(_with_defaults(_plan_tiled), _supports(lambda desc, call: "")),
        triton(
            _with_defaults(_plan_invariant),
            _supports(_invariant_refuses),
            name="invariant",
            opt_in=True,
        ),
        on_cpu(
            "rowwise",
            _with_defaults(partial(_define, _rowwise.linear)),
            _supports(_invariant_refuses, stored=True),
            opt_in=True,
        ),
        Implementation(
            "admitted",
            _with_defaults(_admitted),
            _supports(_admitted_refuses, stored=True),
            launches=_with_defaults(_plan_admitted),
            selects=_with_defaults(_choices_of_admitted),
        ),
    ),
    tolerances=PLAIN,
)
