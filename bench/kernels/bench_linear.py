"""``linear`` in bfloat16, FP8 and formats of few bits at each layer of each model, against cuBLAS;
in bfloat16 and FP8 also against cuBLASLt's fastest algorithm, in bfloat16 CUTLASS and Inductor.

For weights of few bits the library's way is to write out their numbers, then to multiply: at which
rows it is faster is where the table should leave the words.  Where csrc reads a format, Triton's
kernel is timed beside it, and beside integers in groups of 128 CUTLASS's for weights of few bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...config.weight_format import STORED_FORMATS
from ...ops import BY_NAME
from ...ops.launches.quant import GROUP
from ...ops.linear.formats import dtype_of
from ...ops.linear.kernels import LOW_BIT, LOW_BIT_ONCE
from .fusion import InductorFusion
from .gemm_rivals import RIVALS, cublaslt, cutlass_mixed
from .harness import MODELS, TOKENS, KernelWork, Model, benchmark_of, randn

ROWS = sorted({*TOKENS, 17, 512, 8192})
SMALL = Model("Llama-3.2-1B", 2048, 8192, 32, 8, 64, 128256)


def linears(model: Model) -> dict[str, tuple[int, int]]:
    """(out_features, in_features) by name; of a MoE the parts that every token passes."""
    shapes = {"qkv": (model.qkv, model.hidden), "o": (model.hidden, model.heads * model.head_dim)}
    if model.intermediate > model.hidden:
        shapes["gate_up"] = (2 * model.intermediate, model.hidden)
        shapes["down"] = (model.hidden, model.intermediate)
    return shapes


def distinct(*more: Model) -> dict[tuple[int, int], str]:
    """Every distinct linear, under the name of the first model that has it."""
    named: dict[tuple[int, int], str] = {}
    for model in (*MODELS, *more):
        for name, shape in linears(model).items():
            named.setdefault(shape, f"{model.name} {name}")
    return named


def make(rows: int, n: int, k: int, device: torch.device) -> tuple[Any, ...]:
    return randn(rows, k, device=device), randn(n, k, device=device) * k**-0.5, None


def make_fp8(scheme: str, rows: int, n: int, k: int, device: torch.device) -> tuple[Any, ...]:
    def values(*shape: int) -> Tensor:
        return randn(*shape, device=device).to(torch.float8_e4m3fn)

    def scales(*shape: int) -> Tensor:
        return torch.rand(shape, device=device) + 0.5

    x_scale, weight_scale = {
        "static": lambda: (scales(1, 1), scales(1, 1)),
        "token": lambda: (scales(rows, 1), scales(n, 1)),
        "block": lambda: (scales(k // GROUP, rows).t(), scales(-(-n // GROUP), -(-k // GROUP))),
    }[scheme]()
    return values(rows, k), values(n, k), None, x_scale, weight_scale, torch.bfloat16


LOW_BITS = ("int4_g128", "int4_zero_g32", "int8_channel", "mxfp4")
OF_CSRC = ("int4_g128", "mxfp4")


def make_low_bit(name: str, rows: int, n: int, k: int, device: torch.device) -> tuple[Any, ...]:
    """Integers are any bits; scales are such that results are of the size of x."""
    tensors: dict[str, Tensor] = {}
    for argument, tensor in STORED_FORMATS[name].tensors.items():
        shape, dtype = tensor.shape(n, k), dtype_of(tensor)
        if argument == "weight":
            tensors[argument] = torch.randint(0, 256, shape, device=device).to(dtype)
        elif dtype == torch.float8_e8m0fnu:
            tensors[argument] = torch.full(shape, 118, dtype=torch.uint8, device=device).view(dtype)
        else:
            tensors[argument] = torch.rand(shape, device=device).to(dtype) * k**-0.5
    x = randn(rows, k, device=device)
    rest = None, None, tensors["weight_scale"], None, None, None, tensors.get("weight_zero"), name
    return x, tensors["weight"], *rest, tensors.get("weight_row_scale")


def works_of_low_bits() -> Iterator[KernelWork]:
    cublas = {"numbers, cublas": LOW_BIT_ONCE.run}
    rivals = {
        form: cublas | {"triton": LOW_BIT.run} if form in OF_CSRC else cublas for form in LOW_BITS
    }
    rivals["int4_g128"] = rivals["int4_g128"] | {"cutlass": cutlass_mixed}
    for (n, k), name in distinct().items():
        for rows in TOKENS:
            for form in LOW_BITS:
                make_args = partial(make_low_bit, form, rows, n, k)
                yield KernelWork(
                    "linear", f"{name}, {rows} rows, {form}", make_args, {}, rivals[form]
                )


def rivals_of(name: str, rows: int, n: int, k: int) -> dict[str, Any]:
    """Return the rivals of a layer of bfloat16, by name."""

    def make_rows(rows: int, device: torch.device) -> tuple[Any, ...]:
        return make(rows, n, k, device)

    inductor = InductorFusion("linear", name, rows, make_rows)
    return {"cublas": BY_NAME["linear"].overload("native"), **RIVALS, "inductor": inductor}


def works_of_bf16() -> Iterator[KernelWork]:
    for (n, k), name in distinct(SMALL).items():
        for rows in ROWS:
            make_args = partial(make, rows, n, k)
            rivals = rivals_of(name, rows, n, k)
            yield KernelWork("linear", f"{name}, {rows} rows", make_args, {}, rivals)


def works_of_fp8() -> Iterator[KernelWork]:
    rivals = {"cublas": BY_NAME["linear"].overload("scaled_mm"), "cublaslt measured": cublaslt}
    for (n, k), name in distinct().items():
        for rows in TOKENS:
            for scheme in ("static", "token", "block"):
                make_args = partial(make_fp8, scheme, rows, n, k)
                label = f"{name}, {rows} rows, FP8 {scheme}"
                yield KernelWork("linear", label, make_args, {}, rivals)


def works() -> Iterator[KernelWork]:
    yield from works_of_bf16()
    yield from works_of_fp8()


test_linear = benchmark_of(works())
test_low_bits = benchmark_of(works_of_low_bits())
