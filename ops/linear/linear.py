"""``linear`` computes ``x @ weight.T`` and what is done with its sums: the op of all linear layers.

A layer is described as data (``desc.py``): the format of its weight follows from dtypes and
scales, and its epilogue from the arguments that are given.  Passes attach an epilogue by setting an
argument.  Which kernel runs follows from the description and the number of rows
(``kernels.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...config.weight_format import STORED_FORMATS
from ..core import rowwise as _rowwise
from ..core.choice import Choice
from ..core.desc import Cost, OpDesc, TensorDesc
from ..core.float8 import E4M3
from ..core.launch import Launches
from ..core.op import Implementation, SemanticOp, dispatched, on_cpu, on_gpu, triton, with_defaults
from ..core.target import Target
from ..norm.gated_act import activate
from ..norm.quantize import quantize_static, refuses_device
from . import lowbit
from .cases import PLAIN, cases
from .desc import LinearArgs, LinearDesc, columns_of, describe
from .kernels import (
    INT8,
    KERNELS,
    LIBRARY,
    LOW_BIT,
    STREAM,
    WITHOUT_CSRC,
    Gemm,
    LinearKernel,
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
        x: [..., in_features], floating point; or [num_tokens, in_features] float8_e4m3fn or, of a
            ``weight_format`` that says so, int8, which stand for ``x * x_scale``.
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
    if LinearArgs(*args).weight_format is not None and lowbit.why_not_int8(describe(*args)):
        return lowbit.plan_tiled(*args, invariant=invariant)
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
        if reason := refuses_device(call, call["x"].dtype):
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


def _own_kernel(desc: LinearDesc) -> str:
    """The kernel that was admitted with the weight's format, if there is one."""
    kernels = [k for k in kernels_of(desc.weight_format) if k not in KERNELS]
    return f"{kernels[0].name} is admitted for {desc.weight_format!r}" if kernels else ""


def _stored_kernel(desc: LinearDesc) -> LinearKernel:
    """The kernel of the table that is for weights stored like this one's, for few rows."""
    return LOW_BIT if lowbit.why_not_int8(desc) else INT8


def _low_bit_refuses(desc: LinearDesc, call: OpDesc) -> str:
    """It is for the table's kernels of stored weights; those of a format go before them."""
    return _stored_kernel(desc).refuses(desc, 1, Target.of(call)) or _own_kernel(desc)


def _tiled_refuses(desc: LinearDesc, call: OpDesc) -> str:
    return lowbit.why_not_int8(desc) and lowbit.why_not_read(desc) if desc.format.stored else ""


def _native_refuses(desc: LinearDesc, call: OpDesc) -> str:
    if desc.format.stored:
        name = _stored_kernel(desc).name
        serves = "" if _low_bit_refuses(desc, call) else f"{name} reads such weights"
        return _own_kernel(desc) or serves
    return "FP8 operands: scaled_mm multiplies them" if desc.format.scaled else ""


def _admitted_refuses(desc: LinearDesc, call: OpDesc) -> str:
    return "" if desc.format.stored else "the weight is not stored in an admitted format"


def _torch_refuses(desc: LinearDesc, call: OpDesc) -> str:
    if not desc.format.scaled:
        return "operands have no scales: native multiplies them"
    return LIBRARY.refuses(desc, 1, Target.of(call))


def _invariant_refuses(desc: LinearDesc, call: OpDesc) -> str:
    if desc.has_epilogue:
        return "an epilogue's kernel follows the number of rows"
    return ""


def _invariant_tiles_refuse(desc: LinearDesc, call: OpDesc) -> str:
    return _invariant_refuses(desc, call) or _tiled_refuses(desc, call)


def _cost(call: OpDesc) -> Cost:
    x, (out_features, in_features) = call["x"], call["weight"].shape
    if call["weight_format"] is not None:
        weight = STORED_FORMATS[call["weight_format"]].weight
        out_features = call["weight"].shape[weight.dim(0)] * weight.steps[0]
        in_features = x.shape[-1]
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
    name: str, kernels: Any, why_not: Callable[[LinearDesc, OpDesc], str], stored: bool = False
) -> Implementation:
    """The implementation for which the table selects among these kernels."""
    run, selects = _with_defaults(runner(kernels)), _with_defaults(chooser(kernels))
    supports = _supports(why_not, stored=stored)
    return on_gpu(name, run, supports, launches=_with_defaults(plan), selects=selects)


OP = SemanticOp(
    reference=linear,
    fake=_fake,
    cases=cases,
    cost=_cost,
    # cuBLAS is faster than a plain Triton GEMM at every shape, so "triton" comes after the library.
    implementations=(
        _by_table("skinny", KERNELS, _skinny_refuses),
        _by_table("library", WITHOUT_CSRC, _library_refuses),
        _by_table("low_bit", KERNELS, _low_bit_refuses, stored=True),
        Implementation("native", linear, _supports(_native_refuses, stored=True), inline=True),
        Implementation("scaled_mm", _with_defaults(_torch), _supports(_torch_refuses)),
        triton(_with_defaults(_plan_tiled), _supports(_tiled_refuses, stored=True)),
        triton(
            _with_defaults(_plan_invariant),
            _supports(_invariant_tiles_refuse, stored=True),
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
