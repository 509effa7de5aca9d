"""What ``bench kernels`` would time: every work is complete, and its rival is compiled as said."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import fusewright.bench.kernels as folder
from fusewright.bench.kernels import gemm_rivals
from fusewright.bench.kernels.bench_rows import make
from fusewright.bench.kernels.figures import load, save
from fusewright.bench.kernels.fusion import InductorFusion, find_fusions
from fusewright.bench.kernels.harness import KernelWork
from fusewright.bench.kernels.run import _FAMILIES, run_benchmarks
from fusewright.config import UserError
from fusewright.ops import BY_NAME

HOPPER = 90
NAMES = sorted(path.stem for path in Path(folder.__file__).parent.glob("bench_*.py"))
CPU = torch.device("cpu")


def works() -> Iterator[KernelWork]:
    for name in NAMES:
        yield from importlib.import_module(f"{folder.__name__}.{name}").works()


def test_every_work_has_a_kernel_a_cost_and_a_name_of_its_own() -> None:
    measured = [*works()]
    labels = Counter((work.op, work.label) for work in measured)
    assert max(labels.values()) == 1
    for work in measured:
        cost = BY_NAME[work.op].cost(work.describe(HOPPER))
        moved = cost.bytes.subs(work.symbols) if hasattr(cost.bytes, "subs") else cost.bytes
        assert float(moved) > 0, work.label
        variants = work.variants(HOPPER)
        assert variants or work.implementation(HOPPER).name != "triton", work.label


def test_every_fused_elementwise_kernel_has_a_rival_at_every_size() -> None:
    alone = {"linear", "paged_attention", "argmax", "sample", "fused_moe", "expert_linear"}
    for work in works():
        assert work.op in alone or isinstance(work.libraries["inductor"], InductorFusion), (
            work.label
        )


@pytest.fixture
def compiled() -> Iterator[Any]:
    """How many graphs Dynamo has made since."""
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    yield lambda: counters["stats"]["unique_graphs"] - before
    torch._dynamo.reset()


def test_a_rival_is_compiled_for_its_width_and_three_ranges_of_tokens(compiled: Any) -> None:
    def call(hidden: int, rows: int) -> None:
        made = partial(make, False, hidden, "token")
        name = "rms_norm_quant_dynamic"
        rival = InductorFusion(name, f"{hidden} {compiled}", rows, made, backend="eager")
        with torch.inference_mode():
            args = made(rows, CPU)
            results = rival(*args)
        for got, want in zip(results, BY_NAME[name].reference(*args), strict=True):
            assert torch.equal(got.float(), want.float())

    for hidden in (64, 128):
        for rows in (1, 2, 16, 32, 33, 200, hidden):
            call(hidden, rows)
    assert compiled() == 6


def test_what_is_compiled_ahead_is_found_by_its_key() -> None:
    found = find_fusions()
    assert {key for key in found if key[0] == "rms_norm"} == {
        ("rms_norm", f"{hidden} ", least) for hidden in (2048, 4096) for least in (1, 2, 33)
    }
    libraries = [library for work in works() for library in work.libraries.values()]
    assert {f.key for f in libraries if isinstance(f, InductorFusion)} == found.keys()


def test_every_file_of_works_is_run() -> None:
    assert {f"bench_{name}" for name in _FAMILIES} == {*NAMES}


BENCHMARKS = """
from time import sleep
from fusewright.bench.kernels.conftest import FigureWriter

def pytest_configure(config):
    config.pluginmanager.register(FigureWriter(config.rootpath / "figures.jsonl", print))

def test_one(benchmark):
    facts = dict(op="argmax", label="1", contender="torch", library=True, calls=2)
    benchmark.extra_info.update(facts, bytes=3.0, flops=4.0)
    benchmark.pedantic(sleep, args=(0.01,), rounds=3)

def test_two():
    pass
"""


@pytest.mark.product(2, of="commands that measure")
def test_figures_are_written_as_benchmarks_end(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(BENCHMARKS)
    (tmp_path / "test_these.py").write_text("from conftest import test_one, test_two")
    save(tmp_path / "figures.jsonl", {}, [])
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), str(tmp_path)]
    # Inside a worker of xdist pytest-benchmark measures nothing.
    alone = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    run = subprocess.run([*command, "-p", "no:cacheprovider"], check=False, cwd=tmp_path, env=alone)
    (figure,) = load(tmp_path / "figures.jsonl")[1]
    assert run.returncode == 0 and figure.library
    assert 5000 < figure.us < 50000


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="torch sees no CUDA GPU"):
        run_benchmarks(None, tmp_path / "r.jsonl")


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_ours_and_the_library_are_timed_on_the_same_work(tmp_path: Path) -> None:
    environment, figures = run_benchmarks("argmax and sampling", tmp_path / "r.jsonl")
    assert environment["device"] == torch.cuda.get_device_name(0)
    assert {(f.op, f.library) for f in figures} == {("argmax", False), ("argmax", True)}
    for figure in figures:
        assert 0.5 < figure.us < 1000
        assert figure.bytes > 2 * int(figure.label.split()[0]) * int(figure.label.split()[2])


def test_a_rival_that_cannot_be_built_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_rivals, "_nvcc", lambda: "/usr/bin/nvcc")
    monkeypatch.setattr(gemm_rivals, "_headers", lambda: None)
    with pytest.raises(pytest.skip.Exception, match="no headers; pip install nvidia-cutlass"):
        gemm_rivals.cutlass(torch.ones(2, 64), torch.ones(8, 64))
    monkeypatch.setattr(gemm_rivals, "_nvcc", lambda: None)
    assert gemm_rivals.why_no_cutlass() == "CUTLASS: no nvcc; install the CUDA toolkit"


@pytest.mark.parametrize(
    ("name", "tiles"),
    [
        ("cutlass_linear.cu", gemm_rivals.CUTLASS_TILES),
        ("cutlass_mixed.cu", gemm_rivals.MIXED_TILES),
    ],
)
def test_a_source_of_cutlass_takes_every_macro_of_a_tile(name: str, tiles: Any) -> None:
    files = (Path(folder.__file__).with_name(each) for each in (name, "cutlass_call.cuh"))
    source = "".join(map(Path.read_text, files))
    for tile in tiles:
        command = gemm_rivals.build_command(tile, Path("out.so"), name)
        assert str(Path(folder.__file__).with_name(name)) in command
        defined = [word[2:] for word in command if word[:2] == "-D" and "=" in word]
        macros = [word.partition("=")[0] for word in defined]
        assert len(macros) == len(tile) and all(macro in source for macro in macros)
