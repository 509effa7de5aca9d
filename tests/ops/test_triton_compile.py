"""Every Triton kernel compiles for sm_90 without a GPU, with every value of its parameters: a run
draws a quarter of the variants that add a value alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fusewright.ops import ALL_OPS

PROGRAM = Path(__file__).with_name("compile_triton.py")
WITH_TRITON = [op.name for op in ALL_OPS if any(i.launches for i in op.implementations)]


@pytest.fixture(scope="module")
def report(fw_seed: int, fw_cases: int) -> list[dict[str, Any]]:
    """The program's lines, from a process in which Triton compiles instead of interprets."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["CC"] = "/bin/false"  # Triton's driver would call it
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, str(PROGRAM), str(fw_seed), str(4 if fw_cases == 1 else 1)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def own(report: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Lines about the program's own kernels, by their names."""
    return {line["kernel"]: line for line in report[1:] if line["op"] == "self_test"}


@pytest.mark.parametrize("op", WITH_TRITON)
def test_kernels_compile_for_sm_90(op: str, report: list[dict[str, Any]]) -> None:
    variants = [line for line in report[1:] if line["op"] == op]
    assert variants, f"{op} has a Triton implementation, but none of its cases was compiled"
    failed = [f"{v['kernel']} ({v['case']}): {v['error']}" for v in variants if v["error"]]
    assert not failed, "\n".join(failed)


def test_a_kernel_that_does_not_compile_is_reported(own: dict[str, dict[str, Any]]) -> None:
    assert not own["right_kernel"]["error"]
    assert "undefined_name" in own["wrong_kernel"]["error"]


def test_code_for_programmatic_launches_must_wait_first(own: dict[str, dict[str, Any]]) -> None:
    """``compile_variant`` reads each kernel's PTX, so that what compiles above does wait."""
    errors = {name: line["error"] for name, line in own.items() if line["programmatic"]}
    for right in ("waiting_kernel", "leading_kernel", "fetching_kernel"):
        assert not errors.pop(right)
    assert "but there is none" in errors.pop("heedless_kernel")
    assert "but ld.global" in errors.pop("hasty_kernel")
    assert "but bra comes first" in errors.pop("evading_kernel")
    assert not errors


def test_every_kernel_is_launched_programmatically(report: list[dict[str, Any]]) -> None:
    lines = [line for line in report[1:] if line["op"] != "self_test"]
    assert not {line["kernel"] for line in lines if not line["programmatic"]}


def test_a_table_compiles_ahead_in_threads_and_the_rest_when_asked(
    report: list[dict[str, Any]],
) -> None:
    table = report[0]
    assert table["done"] == table["ahead"] and len(table["ahead"]) == 2
    assert len(table["late"]) == 1 and table["late"][0] not in table["ahead"]
    assert table["machine_code"] and all(table["threads"])
    assert table["entries"] == ["_gated_activation_kernel"]


_WATCHED = """
import ast, importlib.util, sys, threading, time

spec = importlib.util.spec_from_file_location("fusewright.ops.triton_kernels.few", sys.argv[1])
sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

from fusewright.ops import KernelTable, Variant

parse, inside, calls, overlaps = ast.parse, threading.Lock(), [], []

def watched(*args, **kwargs):
    calls.append(threading.get_ident())
    if not inside.acquire(blocking=False):
        overlaps.append(calls[-1])
        return parse(*args, **kwargs)
    try:
        time.sleep(0.01)  # another thread takes its turn here, if nothing keeps it out
        return parse(*args, **kwargs)
    finally:
        inside.release()

ast.parse = watched
variants = [
    Variant(f"few:kernel_{i}", (("x_ptr", "*fp32"),), (), (), num_warps=1, num_stages=1)
    for i in range(6)
]
table = KernelTable()
table.precompile(variants, 90, jobs=3)
assert table.binaries().keys() == {*variants}
print(len({*calls}), len(overlaps))
"""


def test_one_thread_at_a_time_is_in_tritons_front_end(tmp_path: Path) -> None:
    """Kernels compile in threads, but ``ast.parse`` of Python 3.11 fails when two take turns in
    it."""
    kernels = "import triton\nimport triton.language as tl\n" + "".join(
        f"\n\n@triton.jit\ndef kernel_{i}(x_ptr):\n    tl.store(x_ptr, {i}.0)\n" for i in range(6)
    )
    (tmp_path / "few.py").write_text(kernels)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    env["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, "-c", _WATCHED, str(tmp_path / "few.py")],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    threads, overlaps = map(int, done.stdout.split())
    assert threads > 1 and overlaps == 0
