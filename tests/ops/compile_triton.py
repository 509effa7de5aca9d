"""Compiles the launches of every Triton implementation for sm_90, without a GPU.

A program, not a test module: ``test_triton_compile.py`` runs it in a process of its own, because
Triton decides between interpreter and compiler when it is imported.  ``compile_triton.py SEED N``
draws one in N of the variants that add values alone, not a kernel or an op.  Prints one JSON line
about a table that it fills, then one a kernel variant; the last are kernels of its own, most of
them wrong.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.utils._pytree import tree_map_only

from fusewright.config.arch import HOPPER
from fusewright.config.weight_format import STORED_FORMATS
from fusewright.ops import ALL_OPS, BY_NAME, KernelTable, Launch, Variant, variants_of
from fusewright.ops.core._triton_compile import compile_variant
from fusewright.ops.experts.fused_moe import CLAMPED
from fusewright.ops.linear import lowbit
from fusewright.ops.linear.formats import dtype_of
from fusewright.ops.triton_kernels.dependent import prefetch, start_next_and_wait, wait_for_previous

SM = 90
SEED = 0  # contents do not matter to the compiler, shapes and strides do


class Needed(NamedTuple):
    """A launch, and the op, case and dtype that need it."""

    op: str
    case: str
    dtype: torch.dtype
    launch: Launch


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


def self_test_launches() -> Iterator[Needed]:
    # A launch names its kernel by module and function: this program is such a module.
    sys.modules["fusewright.ops.triton_kernels.self_test"] = sys.modules["__main__"]
    args = {"x_ptr": torch.empty(8), "n": 8}
    for kernel in (*PLAIN, *PROGRAMMATIC):
        name, fixed = f"self_test:{kernel}", {"BLOCK": 8}
        launch = Launch(name, (1,), args, fixed, programmatic=kernel in PROGRAMMATIC)
        yield Needed("self_test", kernel, torch.float32, launch)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def op_launches() -> Iterator[Needed]:
    """Launches of every case and dtype that an implementation takes on an sm_90 GPU.

    float16 differs from bfloat16 in the type alone: where an op has both, its first case stands for
    the rest.
    """
    cpu = torch.device("cpu")
    for op in ALL_OPS:
        for impl in op.implementations:
            if impl.launches is None:
                continue
            for dtype in op.dtypes:
                cases = op.cases(dtype, cpu, seeded())
                if dtype == torch.float16 and torch.bfloat16 in op.dtypes:
                    cases = islice(cases, 1)
                for case in cases:
                    if impl.supports(op.describe(case.args, sm=SM)):
                        continue
                    for launch in impl.launches(*case.args)[0]:
                        yield Needed(op.name, case.label, dtype, launch)


def large_launches() -> Iterator[Needed]:
    """Launches that only a model's sizes need, on tensors without data."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def linears(scheme: str, rows: int, n: int, k: int) -> tuple[Any, ...]:
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
    starts, table, lens = (empty(*shape, dtype=torch.int32) for shape in ((65,), (64, 512), (64,)))
    q, cache = empty(4096, 16, 512), empty(3, 2, 16, 2, 512)  # the largest tiles of bfloat16
    batch = (q, cache, table, lens, starts, q, 0.05, 0, 0.0)
    calls.append(("paged_attention", (*batch, None, None, empty(16), 8192)))
    ids = empty(4096, 8, dtype=torch.int32)
    experts = (empty(4096, 2048), empty(128, 1536, 2048), ids, None, None, None, "silu", None)
    calls.append(("expert_linear", experts))
    numbers, scales = empty(32, 5760, 1440, dtype=torch.uint8), empty(32, 5760, 90)
    for tokens in 64, 4096:
        stored = (numbers, ids[:tokens, :4], None, scales.to(torch.float8_e8m0fnu), None)
        more = (CLAMPED, None, empty(32, 5760), None, "mxfp4")
        calls.append(("expert_linear", (empty(tokens, 2880), *stored, *more)))
    for scheme in ("token", "block"):
        calls += [
            ("linear", linears(scheme, *shape)) for shape in ((64, 28672, 4096), (128, 4096, 14336))
        ]

    for rows, n, k in ((1, 28672, 4096), (64, 4096, 14336), (4096, 28672, 4096)):
        weight = empty(n, k, dtype=torch.int8), None, empty(rows, 1, dtype=torch.float32)
        scale = empty(n, 1, dtype=torch.float32), torch.bfloat16
        x = empty(rows, k, dtype=torch.int8)
        calls.append(("linear", (x, *weight, *scale, None, None, None, "w8a8_int8")))
    calls.append(
        ("add_rms_norm_quant_int8_dynamic", (*(empty(64, 4096),) * 2, empty(4096), 1e-5, 0))
    )

    def low_bit(name: str, rows: int, n: int, k: int, act: str | None = None) -> tuple[Any, ...]:
        tensors = {
            argument: empty(*tensor.shape(n, k), dtype=dtype_of(tensor))
            for argument, tensor in STORED_FORMATS[name].tensors.items()
        }
        optional = tensors.get("weight_zero"), name, tensors.get("weight_row_scale")
        weight = tensors["weight"], None, None, tensors["weight_scale"], None
        return empty(rows, k), *weight, act, None, *optional

    shapes = [("int4_g128", 1, 28672, 4096, "silu"), ("int4_zero_g32", 16, 4096, 4096, None)]
    shapes += [("int4_g128", rows, 4096, 14336, None) for rows in (32, 64, 128, 256)]
    shapes += [(name, 2, 4096, 4096, None) for name in ("mxfp4", "nvfp4", "int8_channel")]
    calls += [("linear", low_bit(*shape)) for shape in shapes]
    for shape in shapes[1], shapes[-1], shapes[-2]:
        for launch in lowbit.plan_dequantizing(*low_bit(*shape))[0]:
            yield Needed("linear", "the numbers of a weight", torch.bfloat16, launch)
    chains = BY_NAME["chain"].cases(torch.bfloat16, torch.device("cpu"), seeded())
    for case in (case for case in chains if case.label.startswith("whole layer, ")):
        on_meta = tree_map_only(torch.Tensor, lambda t: t.to("meta"), list(case.args))
        describe = BY_NAME["chain"].implementation("cuda").launches
        assert describe is not None
        for launch in describe(*on_meta)[0]:
            yield Needed("chain", case.label, torch.bfloat16, launch)
    for name, args in calls:
        describe = BY_NAME[name].implementation("triton").launches
        assert describe is not None
        for launch in describe(*args)[0]:
            yield Needed(name, "a model's size", torch.bfloat16, launch)


def values_of(needed: Needed) -> set[Any]:
    """The op, and the type or the value of each of the kernel's parameters.

    Alignment is none: it changes the width of accesses, not the program.
    """
    variant = needed.launch.variant()
    fixed = (("num_warps", variant.num_warps), ("num_stages", variant.num_stages))
    values = (*variant.signature, *variant.constexprs, *fixed)
    return {needed.op, *((variant.kernel, value) for value in values)}


def covering(launches: Iterator[Needed]) -> Iterator[Needed]:
    """Few launches that have every value of all of them: always one with the most new values."""
    left = [(needed, values_of(needed)) for needed in launches]
    while left:
        chosen, seen = max(left, key=lambda pair: len(pair[1]))
        yield chosen
        left = [(needed, new) for needed, values in left if (new := values - seen)]


def drawn(launches: Iterator[Needed], seed: int, one_of: int) -> Iterator[Needed]:
    """The first launch of each kernel by each op, which has most of its values; one in so many of
    the others."""
    rng, met = random.Random(seed), set[tuple[str, str]]()
    for needed in launches:
        pair = needed.op, needed.launch.kernel
        if pair not in met or rng.randrange(one_of) == 0:
            met.add(pair)
            yield needed


def compile_each(launches: Iterator[Needed]) -> Iterator[dict[str, Any]]:
    """Compile launches for sm_90, one report each."""
    for op, case, dtype, launch in launches:
        variant = launch.variant()
        result: dict[str, Any] = {"op": op, "case": f"{case}, {dtype}", "kernel": variant.function}
        result["programmatic"] = variant.programmatic
        try:
            binary = compile_variant(variant, SM)
            if op == "self_test":  # no instruction that an older GPU lacks
                compile_variant(variant, 80)
            assert binary.cubin, "no cubin"
            shared = binary.shared_bytes
            assert shared <= HOPPER.shared_bytes, f"{shared} bytes of shared memory"
            result["error"] = ""
        except Exception as error:  # every failure is a line of the report
            causes = [error, *([error.__cause__] if error.__cause__ else [])]
            result["error"] = "\n".join(f"{type(e).__name__}: {e}" for e in causes)
        yield result


def table_report() -> dict[str, Any]:
    """What a table compiled: two variants ahead, in threads, and a third when asked for it."""
    found = (c.launch for c in op_launches() if c.launch.kernel.startswith("activation:"))
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
    print(json.dumps(table_report()))
    # Every op and every value of a kernel's parameter at least once.  A GPU compiles every
    # combination of them, in the conformance tests.
    each_value = covering(chain(op_launches(), large_launches(), self_test_launches()))
    for result in compile_each(drawn(each_value, *map(int, sys.argv[1:]))):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
