"""Compiles the launches of every Triton implementation for sm_90, without a GPU.

A program, not a test module: ``test_triton_compile.py`` runs it in a process of its own, because
Triton decides between interpreter and compiler when it is imported.  Prints one JSON line a kernel
variant; with ``--self-test`` it compiles two kernels of its own instead, the second of them wrong.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from fusewright.ops import ALL_OPS, Launch

TARGET = GPUTarget("cuda", 90, 32)
MAX_SHARED_BYTES = 227 * 1024  # a block's limit on sm_90
SEED = 0  # contents do not matter to the compiler, shapes and strides do


@triton.jit
def right_kernel(x_ptr, n, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    tl.store(x_ptr + cols, cols.to(x_ptr.dtype.element_ty), mask=cols < n)


@triton.jit
def wrong_kernel(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), n + undefined_name)  # noqa: F821


def self_test_launches() -> Iterator[tuple[str, str, Launch]]:
    args = {"x_ptr": torch.empty(8), "n": 8}
    for kernel in (right_kernel, wrong_kernel):
        yield "self_test", "case", Launch(kernel, (1,), args, {"BLOCK": 8})


def op_launches() -> Iterator[tuple[str, str, Launch]]:
    """(op, case, launch) of every case and dtype that an implementation takes on an sm_90 GPU.

    float16 differs from bfloat16 in the type alone: where an op has both, its first case stands for
    the rest.
    """
    cpu = torch.device("cpu")
    for op in ALL_OPS:
        for impl in op.implementations:
            if impl.launches is None:
                continue
            for dtype in op.dtypes:
                cases = op.cases(dtype, cpu, torch.Generator().manual_seed(SEED))
                if dtype == torch.float16 and torch.bfloat16 in op.dtypes:
                    cases = islice(cases, 1)
                for case in cases:
                    if impl.supports(op.describe(case.args, sm=90)):
                        continue
                    for launch in impl.launches(*case.args)[0]:
                        yield op.name, f"{case.label}, {dtype}", launch


def specialize(launch: Launch) -> tuple[str, ASTSource, dict[str, Any]]:
    """(key, source, options) exactly as Triton's own launch path derives them."""
    backend = make_backend(TARGET)
    kernel = launch.kernel
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    kwargs = {**launch.args, **launch.constexprs, **options}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(**kwargs)
    _, signature, constexprs, attrs = kernel._pack_args(
        backend, kwargs, bound, specialization, None
    )
    # Alignment alone makes no new variant here: it changes the width of accesses, not the program.
    key = f"{kernel.__module__}.{kernel.__name__} {signature} {constexprs} {options}"
    return key, ASTSource(kernel, signature, constexprs, attrs), options


def compile_unique(launches: Iterator[tuple[str, str, Launch]]) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    for op, case, launch in launches:
        result: dict[str, Any] = {"op": op, "case": case, "kernel": launch.kernel.__name__}
        started = time.perf_counter()
        try:
            key, source, options = specialize(launch)
            if key in seen:
                continue
            seen.add(key)
            compiled = triton.compile(source, target=TARGET, options=options)
            shared = compiled.metadata.shared
            assert compiled.asm["cubin"], "no cubin"
            assert shared <= MAX_SHARED_BYTES, f"{shared} bytes of shared memory"
            result["error"] = ""
        except Exception as error:  # every failure is a line of the report
            result["error"] = f"{type(error).__name__}: {error}"
        result["seconds"] = round(time.perf_counter() - started, 3)
        yield result


def main() -> None:
    if triton.knobs.runtime.interpret:
        sys.exit("TRITON_INTERPRET is set: nothing would be compiled")
    launches = self_test_launches() if "--self-test" in sys.argv else op_launches()
    for result in compile_unique(launches):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
