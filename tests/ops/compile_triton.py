"""Compiles the launches of every Triton implementation for sm_90, without a GPU.

A program, not a test module: ``test_triton_compile.py`` runs it in a process of its own, because
Triton decides between interpreter and compiler when it is imported.  Prints one JSON line a kernel
variant; with ``--self-test`` it compiles kernels of its own instead, most of them wrong; with
``--table`` it fills a table and prints one line about it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import torch
import triton
import triton.language as tl

from fusewright.ops import ALL_OPS, BY_NAME, KernelTable, Launch, Variant, variants_of
from fusewright.ops._triton_compile import compile_variant
from fusewright.ops.triton_kernels.dependent import prefetch, start_next_and_wait, wait_for_previous

SM = 90
MAX_SHARED_BYTES = 227 * 1024  # a block's limit on sm_90
SEED = 0  # contents do not matter to the compiler, shapes and strides do


@triton.jit
def right_kernel(x_ptr, n, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    tl.store(x_ptr + cols, cols.to(x_ptr.dtype.element_ty), mask=cols < n)


@triton.jit
def wrong_kernel(x_ptr, n, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), n + undefined_name)  # noqa: F821


@triton.jit
def waiting_kernel(x_ptr, n, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr):
    wait_for_previous(PROGRAMMATIC)
    tl.store(x_ptr + tl.arange(0, BLOCK), n)


@triton.jit
def leading_kernel(x_ptr, n, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr):
    start_next_and_wait(PROGRAMMATIC)
    tl.store(x_ptr + tl.arange(0, BLOCK), n)


@triton.jit
def heedless_kernel(x_ptr, n, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), n)


@triton.jit
def hasty_kernel(x_ptr, n, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    wait_for_previous(PROGRAMMATIC)
    tl.store(x_ptr + tl.arange(0, BLOCK), x + n)


@triton.jit
def evading_kernel(x_ptr, n, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr):
    if tl.program_id(0) < n:
        wait_for_previous(PROGRAMMATIC)
        tl.store(x_ptr + tl.arange(0, BLOCK), n)


@triton.jit
def fetching_kernel(x_ptr, n, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr):
    if PROGRAMMATIC:
        prefetch(x_ptr + tl.arange(0, BLOCK))
    wait_for_previous(PROGRAMMATIC)
    tl.store(x_ptr + tl.arange(0, BLOCK), n)


PLAIN = ("right_kernel", "wrong_kernel")
PROGRAMMATIC = (
    "waiting_kernel", "leading_kernel", "fetching_kernel", "heedless_kernel", "hasty_kernel",
    "evading_kernel"
)  # fmt: skip


def self_test_launches() -> Iterator[tuple[str, str, Launch]]:
    # A launch names its kernel by module and function: this program is such a module.
    sys.modules["fusewright.ops.triton_kernels.self_test"] = sys.modules["__main__"]
    args = {"x_ptr": torch.empty(8), "n": 8}
    for kernel in (*PLAIN, *PROGRAMMATIC):
        name, fixed = f"self_test:{kernel}", {"BLOCK": 8}
        launch = Launch(name, (1,), args, fixed, programmatic=kernel in PROGRAMMATIC)
        yield "self_test", "case", launch


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
                    if impl.supports(op.describe(case.args, sm=SM)):
                        continue
                    for launch in impl.launches(*case.args)[0]:
                        yield op.name, f"{case.label}, {dtype}", launch


def large_launches() -> Iterator[tuple[str, str, Launch]]:
    """Launches that only a model's sizes need, as (op, case, launch), on tensors without data."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def products(scheme: str, rows: int, n: int, k: int) -> tuple[Any, ...]:
        one, bf16 = torch.float32, torch.bfloat16
        x, weight = (empty(size, k, dtype=torch.float8_e4m3fn) for size in (rows, n))
        if scheme == "token":
            scales = empty(rows, 1, dtype=one), empty(n, 1, dtype=one)
        else:
            scales = empty(k // 128, rows, dtype=one).t(), empty(n // 128, k // 128, dtype=one)
        return x, weight, None, *scales, bf16

    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("silu_mul_quant_dynamic", (empty(2, 2 * 14336), 0)),
        ("rms_norm_quant_dynamic", (empty(2048, 4096), empty(4096), 1e-5, 0)),
        ("rms_norm_quant_dynamic", (empty(2048, 4096), empty(4096), 1e-5, 128)),
    ]
    for scheme in ("token", "block"):
        calls += [
            ("linear", products(scheme, *shape))
            for shape in ((64, 28672, 4096), (128, 4096, 14336))
        ]
    for name, args in calls:
        describe = BY_NAME[name].implementation("triton").launches
        assert describe is not None
        for launch in describe(*args)[0]:
            yield name, "a model's size", launch


def compile_unique(launches: Iterator[tuple[str, str, Launch]]) -> Iterator[dict[str, Any]]:
    seen: set[Variant] = set()
    for op, case, launch in launches:
        variant = launch.variant()
        # Alignment alone makes no new variant here: it changes the width of accesses, not the
        # program.
        plain = dataclasses.replace(variant, divisible=())
        if plain in seen:
            continue
        seen.add(plain)
        result: dict[str, Any] = {"op": op, "case": case, "kernel": variant.function}
        result["programmatic"] = variant.programmatic
        started = time.perf_counter()
        try:
            binary = compile_variant(variant, SM)
            if op == "self_test":  # no instruction that an older GPU lacks
                compile_variant(variant, 80)
            assert binary.cubin, "no cubin"
            shared = binary.shared_bytes
            assert shared <= MAX_SHARED_BYTES, f"{shared} bytes of shared memory"
            result["error"] = ""
        except Exception as error:  # every failure is a line of the report
            result["error"] = f"{type(error).__name__}: {error}"
        result["seconds"] = round(time.perf_counter() - started, 3)
        yield result


def table_report() -> dict[str, Any]:
    """What a table compiled: two variants ahead, in threads, and a third when asked for it."""
    found = (launch for _, _, launch in op_launches() if launch.kernel.startswith("activation:"))
    *ahead, late = sorted(variants_of(islice(found, 3)), key=lambda variant: variant.name)
    table, done = KernelTable(), list[Variant]()
    table.precompile(ahead, SM, on_done=done.append, jobs=2)
    table.precompile(ahead, SM, on_done=done.append)  # nothing is left to do
    table.get(late, SM)
    table.sealed = True
    held = table.binaries()
    assert [table.get(variant, SM) for variant in ahead] == [held[variant] for variant in ahead]
    return {
        "ahead": [variant.name for variant in ahead],
        "done": sorted(variant.name for variant in done),
        "late": [variant.name for variant in table.compiled_late],
        "machine_code": all(binary.cubin[:4] == b"\x7fELF" for binary in held.values()),
        "entries": sorted({binary.function for binary in held.values()}),
        "threads": [32 * variant.num_warps == held[variant].num_threads for variant in ahead],
    }


def main() -> None:
    if triton.knobs.runtime.interpret:
        sys.exit("TRITON_INTERPRET is set: nothing would be compiled")
    if "--table" in sys.argv:
        print(json.dumps(table_report()))
        return
    launches = chain(op_launches(), large_launches())
    if "--self-test" in sys.argv:
        launches = self_test_launches()
    for result in compile_unique(launches):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
