"""The table of compiled kernels, and their launch through the CUDA driver."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fusewright.ops import BY_NAME, Binary, KernelMissingError, KernelTable, Launch, Variant
from fusewright.ops.conformance import compare
from fusewright.ops.core import driver as driver, launch as launch_module
from fusewright.ops.core.variant import param_layout, struct_format

VARIANT = Variant(
    kernel="norm:_rms_norm_kernel",
    signature=(("x_ptr", "*bf16"), ("num_rows", "i32"), ("far", "i64"), ("eps", "fp32")),
    constexprs=(("residual_ptr", None), ("ADD", False), ("ROWS", 4), ("MODE", "ieee"), ("U", 0.5)),
    divisible=("x_ptr",),
    num_warps=4,
    num_stages=3,
)
BINARY = Binary("_rms_norm_kernel", 90, 0, 128, b"\x7fELF")


def changes() -> dict[str, Any]:
    return {
        "kernel": "norm:_other_kernel",
        "signature": (("x_ptr", "*fp16"), *VARIANT.signature[1:]),
        "constexprs": (*VARIANT.constexprs[:2], ("ROWS", 8), *VARIANT.constexprs[3:]),
        "divisible": ("x_ptr", "far"),
        "num_warps": 8,
        "num_stages": 2,
        "programmatic": True,
        "max_registers": 64,
    }


def test_a_variant_survives_json() -> None:
    back = Variant.from_json(VARIANT.to_json())
    assert back == VARIANT and hash(back) == hash(VARIANT) and back.name == VARIANT.name
    early = dataclasses.replace(VARIANT, programmatic=True)
    assert Variant.from_json(early.to_json()) == early
    kinds = [type(value) for _, value in back.constexprs]
    assert kinds == [type(None), bool, int, str, float]


def test_every_field_of_a_variant_is_in_its_name() -> None:
    changed = changes()
    assert changed.keys() == {field.name for field in dataclasses.fields(Variant)}
    others = [dataclasses.replace(VARIANT, **{name: value}) for name, value in changed.items()]
    assert len({VARIANT.name, *(other.name for other in others)}) == 1 + len(others)
    assert VARIANT.name.startswith("_rms_norm_kernel-")


@pytest.mark.parametrize(
    ("types", "layout"),
    [
        (["*bf16", "i32", "fp32"], [(0, 8), (8, 4), (12, 4)]),
        (["i32", "*i64", "i32"], [(0, 4), (8, 8), (16, 4)]),
        (["fp32", "i64", "i32", "i32", "*fp32"], [(0, 4), (8, 8), (16, 4), (20, 4), (24, 8)]),
        (["i32", "fp64"], [(0, 4), (8, 8)]),
        ([], []),
    ],
)
def test_parameters_are_packed_as_c_does(types: list[str], layout: list[tuple[int, int]]) -> None:
    form = struct_format(types)
    assert param_layout(form) == layout
    values = [1.5 if kind.startswith("fp") else 2**30 + i for i, kind in enumerate(types)]
    packed = struct.pack(form, *values)
    assert len(packed) == (sum(layout[-1]) if layout else 0)
    for (offset, size), code, value in zip(layout, form[1:], values, strict=True):
        assert packed[offset : offset + size] == struct.pack(f"={code}", value)


def test_launch_structures_are_laid_out_as_in_cuda_h() -> None:
    sizes = (ctypes.sizeof(driver._Attribute), ctypes.sizeof(driver._Config))
    offsets = [getattr(driver._Config, name).offset for name, *_ in driver._Config._fields_]
    assert sizes == (72, 56) and driver._Attribute.value.offset == 8
    assert offsets == [0, 4, 8, 12, 16, 20, 24, 32, 40, 48]


def test_a_parameter_that_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ValueError, match="type fp16"):
        struct_format(["*fp16", "fp16"])


def test_a_sealed_table_names_what_it_lacks_and_the_remedy() -> None:
    table = KernelTable()
    table.add(VARIANT, BINARY)
    table.sealed = True
    assert table.get(VARIANT, 90) is BINARY and table.binaries() == {VARIANT: BINARY}
    wide = dataclasses.replace(VARIANT, constexprs=changes()["constexprs"], num_warps=8)
    with pytest.raises(KernelMissingError) as raised:
        table.get(wide, 90)
    message = str(raised.value)
    assert wide.name in message and "rebuild the artifact" in message
    assert "ROWS is 8, there 4; num_warps is 8, there 4" in message
    assert "ADD" not in message and not table.compiled_late
    with pytest.raises(KernelMissingError, match="sm_90, expected sm_100"):
        table.get(VARIANT, 100)
    with pytest.raises(KernelMissingError, match="no variant of it"):
        table.get(dataclasses.replace(VARIANT, kernel="norm:_other_kernel"), 90)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles here")
def test_nothing_is_compiled_while_triton_interprets() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        KernelTable().precompile([VARIANT], 90)


def test_tensors_off_the_gpu_are_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch_module, "_INTERPRETED", False)
    launch = Launch("tokens:_keep_tokens_kernel", (1,), {"ids_ptr": torch.zeros(4)})
    with pytest.raises(ValueError, match="ids_ptr is on cpu, expected one GPU"):
        launch.run()


# On a GPU.  A table of the test's own: the process's may hold the kernels already.

NAMES = ("rms_norm", "add_rms_norm", "silu_mul", "rotary_embedding", "gather_last_token", "argmax")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> KernelTable:
    table = KernelTable()
    monkeypatch.setattr(launch_module, "KERNELS", table)
    return table


def cases(name: str, dtype: torch.dtype = torch.bfloat16) -> Iterator[tuple[Any, ...]]:
    generator = torch.Generator("cuda").manual_seed(0)
    for case in BY_NAME[name].cases(dtype, torch.device("cuda"), generator):
        yield case.args


def assert_like_reference(name: str, got: Any, args: tuple[Any, ...]) -> None:
    tolerance, want = BY_NAME[name].tolerances[torch.bfloat16], BY_NAME[name].overload()(*args)
    pairs = [(got, want)] if torch.is_tensor(got) else zip(got, want, strict=True)
    for actual, expected in pairs:
        compare(actual, expected, tolerance, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_driver_launches_match_the_reference(name: str, table: KernelTable) -> None:
    for args in cases(name):
        assert_like_reference(name, BY_NAME[name].overload("triton")(*args), args)
    assert table.compiled_late and {*table.compiled_late} == {*table.binaries()}


def assert_graph_follows_its_inputs(name: str, args: tuple[Any, ...]) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = BY_NAME[name].overload("triton")(*args)
    for tensor in args:
        if torch.is_tensor(tensor) and tensor.is_floating_point():
            tensor.mul_(0.5)
    graph.replay()
    assert_like_reference(name, got, args)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_driver_launches_are_captured(name: str, table: KernelTable) -> None:
    for args in cases(name):
        if args[0].numel() == 0:
            continue  # an empty graph
        BY_NAME[name].overload("triton")(*args)
        assert_graph_follows_its_inputs(name, args)


@pytest.mark.gpu
def test_a_kernel_may_be_loaded_inside_a_capture(
    table: KernelTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded, not compiled: a warm start has its machine code before it captures."""
    args = next(cases("silu_mul"))
    BY_NAME["silu_mul"].overload("triton")(*args)
    fresh = KernelTable()
    for variant, binary in table.binaries().items():
        fresh.add(variant, binary)
    fresh.sealed = True
    monkeypatch.setattr(launch_module, "KERNELS", fresh)
    assert_graph_follows_its_inputs("silu_mul", args)


@pytest.mark.gpu
def test_a_side_stream_and_a_new_thread_launch_where_they_are(table: KernelTable) -> None:
    from concurrent.futures import ThreadPoolExecutor

    args = next(cases("silu_mul"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()

    def run() -> torch.Tensor:
        with torch.cuda.stream(stream):
            got: torch.Tensor = BY_NAME["silu_mul"].overload("triton")(*args)
        stream.synchronize()
        return got

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(run) for _ in range(50)]:
            assert_like_reference("silu_mul", future.result(), args)


SEALED = """
import sys
from pathlib import Path
import torch
from fusewright.ops import BY_NAME, KERNELS, Binary, Variant
from fusewright.ops.conformance import check_case

folder = Path(sys.argv[1])
for path in folder.glob("*.json"):
    cubin = path.with_suffix(".cubin").read_bytes()
    function, shared_bytes, num_threads = path.with_suffix(".txt").read_text().split()
    sm = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    binary = Binary(function, sm, int(shared_bytes), int(num_threads), cubin)
    KERNELS.add(Variant.from_json(path.read_text()), binary)
KERNELS.sealed = True


class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ImportError(f"{name} is forbidden")


sys.meta_path.insert(0, Forbidden())
generator = torch.Generator("cuda").manual_seed(0)
for name in sys.argv[2:]:
    op = BY_NAME[name]
    for case in op.cases(torch.bfloat16, torch.device("cuda"), generator):
        check_case(op, op.overload("triton"), case, op.tolerances[torch.bfloat16])
assert not KERNELS.compiled_late and "triton" not in sys.modules
"""


@pytest.mark.gpu
def test_a_sealed_table_launches_where_triton_cannot_be_imported(
    table: KernelTable, tmp_path: Path
) -> None:
    for name in NAMES:
        for args in cases(name):
            BY_NAME[name].overload("triton")(*args)
    for variant, binary in table.binaries().items():
        (tmp_path / f"{variant.name}.json").write_text(variant.to_json())
        facts = (binary.function, str(binary.shared_bytes), str(binary.num_threads))
        (tmp_path / f"{variant.name}.txt").write_text(" ".join(facts))
        (tmp_path / f"{variant.name}.cubin").write_bytes(binary.cubin)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-P", "-c", SEALED, str(tmp_path), *NAMES]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
