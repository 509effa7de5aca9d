"""Chooses the kernel of a linear layer: ``select(description, rows, target)``, from one table.

``KERNELS`` lists the kernels in order of preference; each says what it refuses, and up to which
number of rows it is faster than those behind it, which the device table holds as measured.  A new
kernel is a row here.  An implementation of ``linear`` is a part of the table, so that what runs,
what must be compiled, what ``explain`` prints and why a kernel was refused have one source.

A program's number of rows is known only when it runs, so the choice is made when the op is called,
by shapes alone: a captured graph holds it.  Under capture the streaming kernel reads weights before
the kernel ahead of it has finished: that one must not write them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...config.arch import arch
from ...config.weight_format import STORED_FORMATS, StoredFormat
from ..core import device_table as _device_table
from ..core.choice import Choice, NoKernelError, launched, nothing, select as _choose
from ..core.counters import counters
from ..core.device_table import most_rows
from ..core.launch import Launches, run_launches
from ..core.target import Target, here
from ..launches import linear as tiled, linear_fp8 as tiled_fp8
from ..launches.activation import gated_activation
from ..launches.quant import quantize
from . import _cublaslt as _cublaslt_linear, csrc as csrc, lowbit, packed
from .desc import LinearArgs, LinearDesc, Shapes, describe_call, describe_shapes, shapes_of
from .formats import WEIGHT_FORMATS, WeightFormat, dequantize

Gemm = Callable[[Tensor, Tensor, Tensor | None], Tensor]

_CALLS, _STORED = 4096, "it reads no weights of a stored format"


@dataclass(frozen=True, eq=False)
class LinearKernel:
    """One kernel.

    Attributes:
        name, refuses, parameters: as of ``Kernel``.
        run: computes a call of ``linear``; None if the tensors' addresses or strides do not fit.
        launches: the Triton launches of a call and its result, if it is a Triton kernel.
        fuses: whether it runs the epilogue too; else a kernel of its own follows.
        scaled: whether it is only for weights with scales; no choice for others names it.
    """

    name: str
    refuses: Callable[[LinearDesc, int, Target], str]
    run: Callable[..., Tensor | None]
    launches: Callable[..., Launches[Tensor]] | None = None
    fuses: bool = False
    scaled: bool = False
    parameters: Callable[[LinearDesc, int, Target], str] = nothing


def select(
    desc: LinearDesc,
    rows: int,
    target: Target,
    kernels: Sequence[LinearKernel] = (),
    of: str = "linear",
) -> Choice:
    """Choose the kernel for a linear layer with so many rows, of those of its format unless
    others are given; raises NoKernelError with their reasons if all refuse."""
    every = kernels or kernels_of(desc.weight_format)
    own = every if desc.format.scaled else [kernel for kernel in every if not kernel.scaled]
    return _choose(desc, rows, target, own, of)


def _algorithm_refuses(desc: LinearDesc, rows: int, target: Target) -> str:
    if desc.format.stored:
        return _STORED
    if target.device.type != "cuda":
        return "algorithms are measured on a GPU"
    if desc.bias or desc.groups > 1 or desc.prologue or desc.add or desc.dtype != torch.bfloat16:
        return "algorithms are measured without bias, for bfloat16 results"
    return "" if _algorithm(desc, rows, target) else "no device table has an algorithm"


def _algorithm(desc: LinearDesc, rows: int, target: Target) -> str:
    """The table that has an algorithm, "" if none has."""
    shape = (desc.out_features, desc.in_features)
    found = _device_table.algorithm(desc.weight_format, target.device, rows, *shape)
    return f"algorithm of {found[0].file}" if found else ""


def _tiled_refuses(desc: LinearDesc, rows: int, target: Target) -> str:
    if desc.format.stored:
        return _STORED
    if not desc.format.scaled:
        return "cuBLAS is faster at every shape"
    if desc.groups > 1 or desc.prologue or desc.add:
        return "multiplies and adds a bias, nothing else"
    most = most_rows(f"tiled {desc.weight_format}", desc.out_features)
    return "" if rows <= most else f"{rows} rows: faster than cuBLASLt up to {most}"


def plan_tiled(*args: Any, invariant: bool = False) -> Launches[Tensor]:
    """The tiled Triton kernel's launch, without an epilogue; ``invariant``: as of the others."""
    x, weight, bias, x_scale, weight_scale, *_ = args
    if x_scale is None or weight_scale is None:
        return tiled.linear(x, weight, bias, invariant=invariant)
    desc = describe_call(args)[0]
    scheme = "token" if desc.format.stored else desc.weight_format.removeprefix("fp8 ")
    return tiled_fp8.linear_fp8(
        scheme, x, x_scale, weight, weight_scale, bias, desc.dtype, invariant=invariant
    )


def _library_refuses(desc: LinearDesc, rows: int, target: Target) -> str:
    if desc.format.stored:
        return _STORED
    if desc.groups > 1 or desc.prologue or desc.add:
        return "multiplies and adds a bias, nothing else"
    if not desc.format.scaled or target.device.type == "cpu":
        return ""
    n, k, block = desc.out_features, desc.in_features, desc.weight_format == "fp8 block"
    if n % 16 or k % 16:
        return f"linear: weight [{n}, {k}]: cuBLASLt takes multiples of 16"
    if block and not arch(target.sm).block_scales:
        return f"linear: blocks of scales are in cuBLASLt for SM 9.0, not {target.sm / 10}"
    if block and k % 512:
        # torch passes such scales on, and the result is wrong (seen with 2.11).
        return f"linear: in_features {k}: cuBLASLt takes rows of 4 scales of 128, so of 512"
    if desc.bias and desc.dtype == torch.float32:
        return "linear: cuBLASLt adds no bias to a float32 result"
    return ""


def library(*args: Any) -> Tensor:
    """torch's own GEMM, without an epilogue; on a CPU, FP8 operands are dequantized."""
    x, weight, bias, x_scale, weight_scale, out_dtype, *_ = args
    if x_scale is None or weight_scale is None:
        return F.linear(x, weight, bias)
    if x.device.type == "cpu":
        return multiply(F.linear, LinearArgs(*args))
    rows = x.shape[0]
    if not rows:
        return x.new_empty((0, weight.shape[0]), dtype=out_dtype)  # type: ignore[no-any-return]
    if x_scale.shape[1] > 1 and rows % 4:
        # cuBLASLt takes columns of x_scale that are multiples of 16 bytes.
        missing = -rows % 4
        x = torch.cat((x, x.new_zeros((missing, x.shape[1]))))
        x_scale = F.pad(x_scale.t(), (0, missing)).t()
    y: Tensor = torch._scaled_mm(
        x.contiguous(), weight.t(), x_scale, weight_scale.t(), bias=bias, out_dtype=out_dtype
    )
    return y[:rows]


def multiply(gemm: Gemm, call: LinearArgs) -> Tensor:
    """``gemm`` of a call's operands, which it gets in float32 if they are quantized."""
    if call.weight_scale is None:
        return gemm(call.x, call.weight, call.bias)
    x, weight = dequantized(call)
    wide = None if call.bias is None else call.bias.float()
    return gemm(x, weight, wide).to(call.out_dtype or call.x.dtype)


def dequantized(call: LinearArgs) -> tuple[Tensor, Tensor]:
    """x and the weight of a call in float32."""
    x, weight, scale = call.x.float(), call.weight, call.weight_scale
    if call.x_scale is not None:
        x = _dequantize(call.x, call.x_scale)
    if call.weight_format is None:
        return x, _dequantize(weight, scale)
    stored = STORED_FORMATS[call.weight_format]
    return x, dequantize(stored, weight, scale, call.weight_zero, call.weight_row_scale)


def _dequantize(q: Tensor, scale: Tensor) -> Tensor:
    """q * scale in float32; each scale is for 1 or 128 rows and columns, or for all."""
    for dim in (0, 1):
        if 1 < scale.shape[dim] < q.shape[dim]:
            scale = scale.repeat_interleave(128, dim).narrow(dim, 0, q.shape[dim])
    return q.float() * scale


_BY_CUBLASLT = {"relu": False, "gelu_new": True}
"""Activations that cuBLASLt applies to the sums with their bias, and whether each is a GELU."""


def _activating_refuses(desc: LinearDesc, rows: int, target: Target) -> str:
    if target.device.type == "cpu":
        return "activates on a GPU"
    if desc.activation not in _BY_CUBLASLT or not desc.bias or desc.quantize:
        return f"no {' or '.join(_BY_CUBLASLT)} of sums with a bias"
    if desc.format.scaled:
        return "its weight has scales"
    return _library_refuses(desc, rows, target)


def _run_activating(*args: Any) -> Tensor:
    call = LinearArgs(*args)
    x = call.x.reshape(-1, call.x.shape[-1])
    activates = torch.ops.aten._addmm_activation.default
    is_gelu = _BY_CUBLASLT[str(call.activation)]
    y: Tensor = activates(call.bias, x, call.weight.t(), use_gelu=is_gelu)
    return y.view(*call.x.shape[:-1], y.shape[1])


def _dequantizing_refuses(desc: LinearDesc, rows: int, target: Target) -> str:
    if not desc.format.stored:
        return "its weight is not stored in a format of its own"
    if desc.groups > 1 or desc.prologue or desc.add:
        return "multiplies and adds a bias, nothing else"
    return ""


def _run_dequantizing(*args: Any) -> Tensor:
    call = LinearArgs(*args)
    dtype = call.out_dtype or call.x.dtype
    x, weight = dequantized(call)
    return F.linear(x.to(dtype), weight.to(dtype), call.bias)


STREAM = LinearKernel("skinny_linear", csrc.stream_refuses, csrc.stream, fuses=True)
CLUSTER = LinearKernel("cluster_linear", csrc.cluster_refuses, csrc.cluster)
PERSISTENT = LinearKernel("persistent_linear", csrc.persistent_refuses, csrc.persistent, fuses=True)
ALGORITHM = LinearKernel(
    "cuBLASLt", _algorithm_refuses, _cublaslt_linear.run, parameters=_algorithm
)
TILED = LinearKernel(
    "_linear_fp8_kernel", _tiled_refuses, run_launches(plan_tiled), plan_tiled, scaled=True
)
INT8 = LinearKernel(
    "_linear_fp8_kernel of int8",
    lowbit.int8_refuses,
    run_launches(plan_tiled),
    plan_tiled,
    scaled=True,
)
ACTIVATING = LinearKernel(
    "cuBLASLt with activation", _activating_refuses, _run_activating, fuses=True
)
LIBRARY = LinearKernel("cuBLAS", _library_refuses, library)
PACKED = LinearKernel("packed_linear", packed.refuses, packed.run, fuses=True, scaled=True)
LOW_BIT = LinearKernel(
    "_linear_lowbit_kernel",
    lowbit.tiled_refuses,
    lowbit.run_tiled,
    lowbit.plan_tiled,
    fuses=True,
    scaled=True,
)
LOW_BIT_ONCE = LinearKernel(
    "_dequantize_kernel, cuBLAS",
    lowbit.dequantizing_refuses,
    lowbit.run_dequantizing,
    lowbit.plan_dequantizing,
    scaled=True,
)
DEQUANTIZING = LinearKernel("dequantize, cuBLAS", _dequantizing_refuses, _run_dequantizing)

KERNELS = (
    *(STREAM, CLUSTER, PERSISTENT, ALGORITHM, TILED, ACTIVATING, LIBRARY),
    *(INT8, PACKED, LOW_BIT, LOW_BIT_ONCE, DEQUANTIZING),
)
"""Every kernel in order of preference: the first that does not refuse is chosen."""
WITHOUT_CSRC = KERNELS[3:]
UNMEASURED = tuple(kernel for kernel in KERNELS[4:] if kernel is not PACKED)
"""The kernels that are left where csrc is not there and no table names a library algorithm."""
ADMITTED: dict[str, tuple[LinearKernel, ...]] = {}
"""The kernels of each format that is admitted with some."""


def admit_weight_format(stored: StoredFormat, *kernels: LinearKernel) -> None:
    """Admit a weight format and its kernels: layers, loaders and ``linear`` then know its name.

    Every process that loads or runs such a model must admit it before it makes an engine.

    Args:
        stored: the format.  Checkpoints ask for it by ``quantization_config`` in their config:
            ``{"quant_method": "stored", "format": <name>}``.
        kernels: in order of preference, in front of all others.  ``run`` gets the arguments of
            ``linear``, ``weight_zero`` and ``weight_format`` included.  Without one, or where all
            of them refuse, the weight is dequantized.

    Raises:
        ValueError: another format has this name.
    """
    if stored.name in WEIGHT_FORMATS:
        raise ValueError(f"weight format {stored.name!r} is there already: give another name")
    WEIGHT_FORMATS[stored.name] = WeightFormat.of(stored)
    STORED_FORMATS[stored.name] = stored
    ADMITTED[stored.name] = kernels


def kernels_of(weight_format: str) -> tuple[LinearKernel, ...]:
    """The kernels for weights of a format, in order of preference."""
    return (*ADMITTED.get(weight_format, ()), *KERNELS)


def format_factors(weight_format: str) -> dict[str, str]:
    """What an artifact depends on of an admitted format: its definition and its kernels."""
    stored = STORED_FORMATS.get(weight_format)
    if stored is None:
        return {}
    names = ", ".join(kernel.name for kernel in ADMITTED.get(weight_format, ()))
    return {"weight_format": str(stored), "weight_format.kernels": names or "none"}


def why_not_streamed(layers: Iterable[LinearDesc], rows: int, target: Target) -> str:
    """Why the streaming kernel does not serve all of the layers that are joined; "" if it does."""
    return next((why for desc in layers if (why := STREAM.refuses(desc, rows, target))), "")


def plan_epilogue(y: Tensor, activation: str | None, out_scale: Tensor | None) -> Launches[Tensor]:
    """The launches that activate and quantize a layer's sums, and the result."""
    if out_scale is not None:
        launches, (y,) = quantize(y, out_scale, activation or "none")
        return launches, y
    if activation is not None:
        return gated_activation(y, None, activation)
    return [], y


_run_epilogue = run_launches(plan_epilogue)


@lru_cache(_CALLS)
def _candidates(
    shapes: Shapes,
    out_dtype: torch.dtype | None,
    activation: str | None,
    weight_format: str | None,
    device: torch.device,
    kernels: tuple[LinearKernel, ...],
) -> tuple[LinearKernel, ...]:
    """The selected kernel of a call, then those behind it that do not refuse either."""
    desc, rows = describe_shapes(shapes, out_dtype, activation, weight_format)
    target = here(device)
    if desc.format.scaled and device.type == "cuda":
        counters(device)  # a capture may come next, and cannot allocate them
    chosen = select(desc, rows, target, kernels).kernel
    rest = kernels[kernels.index(chosen) + 1 :]
    return (chosen, *(k for k in rest if not k.refuses(desc, rows, target)))


_device_table.on_change(_candidates.cache_clear)


def runner(kernels: tuple[LinearKernel, ...]) -> Callable[..., Tensor]:
    """A function that computes ``linear`` by the kernel that these select."""

    def run(*args: Any) -> Tensor:
        call = LinearArgs(*args)
        how = (call.out_dtype, call.activation, call.weight_format, call.x.device)
        for kernel in _candidates(shapes_of(call), *how, kernels):
            y = kernel.run(*args)
            if y is not None:
                return y if kernel.fuses else _run_epilogue(y, *call.epilogue)
        desc, rows = describe_call(call)
        raise NoKernelError(f"no kernel takes strides and addresses of {rows} rows of {desc}")

    return run


def _sums(call: LinearArgs, desc: LinearDesc) -> Tensor:
    """An empty tensor for the sums that a kernel hands to the epilogue behind it."""
    shape = (*call.x.shape[:-1], desc.out_features)
    return call.x.new_empty(shape, dtype=desc.dtype)  # type: ignore[no-any-return]


def plan(*args: Any, kernels: tuple[LinearKernel, ...] = UNMEASURED) -> Launches[Tensor]:
    """The Triton launches of a call, and its result, where neither csrc nor a measured algorithm
    serves it: all that must be compiled for it."""
    call = LinearArgs(*args)
    desc, rows = describe_call(call)
    kernel = select(desc, rows, here(call.x.device), kernels).kernel
    launches, y = kernel.launches(*args) if kernel.launches else ([], _sums(call, desc))
    if kernel.fuses and kernel.launches:
        return launches, y
    more, y = plan_epilogue(y, *call.epilogue)
    return [*launches, *more], y


def chooser(kernels: tuple[LinearKernel, ...]) -> Callable[..., tuple[Choice, ...]]:
    """A function that returns the choice of each kernel which a call launches."""

    def choices(*args: Any) -> tuple[Choice, ...]:
        call = LinearArgs(*args)
        desc, rows = describe_call(call)
        of = f"linear [{desc.out_features}, {desc.in_features}] {desc.weight_format}"
        choice = select(desc, rows, here(call.x.device), kernels, of)
        if choice.kernel.fuses:
            return (choice,)
        launches, _ = plan_epilogue(_sums(call, desc), *call.epilogue)
        return (choice, *launched(launches, of))

    return choices
