"""The table of library algorithms: what it answers, what it refuses, and each algorithm on a GPU
against float64."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from ctypes import c_void_p
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from fusewright.bench.ops.tune_linear import main
from fusewright.compiler.lowering.tune_library import LEAST_ROWS
from fusewright.config.device_table import Algorithm, DeviceTable, read_table, shipped
from fusewright.ops import BY_NAME, load_cuda_library
from fusewright.ops.core import cublaslt as _cublaslt, device_table as _device_table
from fusewright.ops.linear import _cublaslt as _cublaslt_linear
from fusewright.ops.linear.csrc import cluster_rows
from fusewright.ops.linear.desc import LinearDesc
from tests.ops.replays import on_two_streams

TABLES = shipped()
_GPU = _device_table.gpu_of(torch.device("cuda"))[0]
SHIPPED = next((table for table in TABLES if table.gpu == _GPU), TABLES[0])
"""That of the GPU here, which alone can run its algorithms."""
ONE = Algorithm("bfloat16", 4096, 1024, 33, 64, "0a" * 64, 10.0, 12.0)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.gpu)
def test_every_shipped_algorithm_gained_when_it_was_measured(table: DeviceTable) -> None:
    assert table.algorithms
    for a in table.algorithms:
        assert a.us < a.us_before, a
        assert a.least_rows >= LEAST_ROWS[a.operands], f"{a}: those rows stream"


def test_a_missing_library_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "7.5")
    _cublaslt._library.cache_clear()
    try:
        with pytest.raises(_cublaslt.CublasLtError, match=r"libcublasLt\.so\.7"):
            _cublaslt.version()
    finally:
        _cublaslt._library.cache_clear()


class Library:
    """The part of cuBLASLt that describes GEMMs.  Descriptors are numbers; ``fails_at`` is the
    one that cannot be made."""

    def __init__(self, fails_at: int = 0) -> None:
        self.made, self.live, self.fails_at = 0, set[int](), fails_at

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*args: Any) -> int:
            if name.endswith("Create"):
                self.made += 1
                if self.made == self.fails_at:
                    return 3
                args[0]._obj.value = self.made
                self.live.add(self.made)
            elif name.endswith("Destroy"):
                self.live.remove(args[0].value)
            return 0

        return call


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(_cublaslt, "_library", lambda: made)
    monkeypatch.setattr(_cublaslt, "handle", lambda device: c_void_p(1))
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    return made


def test_descriptors_go_with_their_plan(library: Library) -> None:
    plan = _cublaslt.GemmPlan("fp8 token", 0, 64, 128, 256)
    assert len(library.live) == 4  # the operation; weight, x and y
    plan.algorithms(8)
    assert len(library.live) == 4
    del plan
    assert not library.live
    library.fails_at = library.made + 3
    with pytest.raises(_cublaslt.CublasLtError, match="cublasLtMatrixLayoutCreate: cuBLAS status"):
        _cublaslt.GemmPlan("bfloat16", 0, 64, 128, 256)
    assert not library.live


def test_an_evicted_plan_goes_unless_somebody_runs_it(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = replace(
        SHIPPED, algorithms=(msgspec.structs.replace(ONE, least_rows=1, most_rows=1 << 20),)
    )
    monkeypatch.setattr(_device_table, "serving", lambda device: (found,))
    _cublaslt_linear._planned.cache_clear()

    def planned(rows: int) -> Any:
        return _cublaslt_linear._planned("bfloat16", torch.device("cuda", 0), rows, 4096, 1024)

    running = planned(1)
    most = _cublaslt_linear._SHAPES
    for rows in range(2, most + 10):
        planned(rows)
    assert len(library.live) == 4 * (most + 1)
    assert planned(1) is not running, "it was evicted"
    del running
    assert len(library.live) == 4 * most
    _cublaslt_linear._planned.cache_clear()
    assert not library.live


def test_operands_of_two_devices_are_refused_by_name() -> None:
    x = torch.ones(2, 16, dtype=torch.bfloat16)
    words = "linear: weight is on meta, expected cpu, where x is"
    with pytest.raises(ValueError, match=words):
        weight = torch.ones(4, 16, dtype=x.dtype, device="meta")
        _cublaslt_linear.run(x, weight, None, None, None, None)
    fp8 = [torch.ones(n, 16).to(torch.float8_e4m3fn) for n in (2, 4)]
    scales = [torch.ones(1, 1), torch.ones(1, 1, device="meta")]
    words = "linear: weight_scale is on meta, expected cpu, where x is"
    with pytest.raises(ValueError, match=words):
        _cublaslt_linear.run(*fp8, None, *scales, torch.bfloat16)


@pytest.fixture
def table() -> DeviceTable:
    found = _device_table.serving(torch.device("cuda", torch.cuda.current_device()))
    if SHIPPED not in found:
        pytest.skip(f"{SHIPPED.name} is of {SHIPPED.gpu} measured by {SHIPPED.measured}")
    return SHIPPED


def operands(a: Algorithm, rows: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """x, weight and their scales, if any; and the exact result."""
    shapes = ((rows, a.in_features), (a.out_features, a.in_features))
    x, weight = (torch.randn(shape, device="cuda") for shape in shapes)
    if a.operands == "bfloat16":
        x, weight = x.bfloat16(), (weight * a.in_features**-0.5).bfloat16()
        return (x, weight), x.double() @ weight.double().T
    x, weight = ((100 * t).clamp_(-448, 448).to(torch.float8_e4m3fn) for t in (x, weight))
    many = a.operands == "fp8 token"
    scales = [0.5 + torch.rand(n if many else 1, 1, device="cuda") for n in (rows, a.out_features)]
    scales[1] *= 1e-4 * a.in_features**-0.5
    exact = (x.double() * scales[0].double()) @ (weight.double() * scales[1].double()).T
    return (x, weight, None, *scales, torch.bfloat16), exact


@pytest.mark.gpu
@pytest.mark.parametrize(
    "a", SHIPPED.algorithms, ids=lambda a: f"{a.operands}-{a.out_features}-{a.most_rows}"
)
def test_each_algorithm_is_near_float64(a: Algorithm, table: DeviceTable, fw_seed: int) -> None:
    torch.manual_seed(fw_seed)
    desc = LinearDesc(a.operands, torch.bfloat16, a.out_features, a.in_features)
    for rows in sorted({a.least_rows, a.most_rows - 1, a.most_rows}):
        if rows < a.least_rows:
            continue
        args, exact = operands(a, rows)
        algorithm = bytes.fromhex(a.algorithm)
        shape = (rows, a.out_features, a.in_features)
        planned = _cublaslt_linear._planned(a.operands, args[0].device, *shape)
        assert planned is not None and planned[1] == algorithm
        plan = _cublaslt.GemmPlan(a.operands, 0, *shape)
        y = torch.full(exact.shape, torch.nan, dtype=torch.bfloat16, device="cuda")
        x, weight, _, *scales = args[:5] if len(args) > 2 else (*args, None)
        plan.run(x, weight, y, algorithm, *scales)
        error = float(((y.double() - exact).abs().max() / exact.abs().max()).nan_to_num(torch.inf))
        # Half a unit in the last place is 2^-8 of the least bfloat16 of a binade; sums add to it.
        assert error <= 2.0**-8 + 2.0**-14, f"{rows} rows: {error}, --fw-seed={fw_seed}"
        # Up to some rows the table serves only where csrc is not built.
        op = BY_NAME["linear"].overload("library" if rows <= cluster_rows(desc) else "skinny")
        for _ in range(3):
            assert torch.equal(op(*args), y), f"{rows} rows: the op gives something else"


@pytest.mark.gpu
def test_the_library_takes_each_algorithm_for_every_number_of_rows(table: DeviceTable) -> None:
    refused = {}
    for a in table.algorithms:
        for rows in range(a.least_rows, a.most_rows + 1):
            plan = _cublaslt.GemmPlan(a.operands, 0, rows, a.out_features, a.in_features)
            if reason := plan.refuses(bytes.fromhex(a.algorithm)):
                refused[a.weight, rows] = reason
    assert not refused


@pytest.mark.gpu
def test_a_graph_holds_the_algorithm(table: DeviceTable) -> None:
    a = next(a for a in table.algorithms if a.operands == "bfloat16" and a.most_rows <= 128)
    (x, weight), _ = operands(a, a.most_rows)
    op = BY_NAME["linear"].overload("library")
    op(x, weight, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = op(x, weight, None)
    for _ in range(20):
        x.normal_()
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, op(x, weight, None))


def split(rows: int, n: int, k: int) -> tuple[_cublaslt.GemmPlan, bytes]:
    """A plan and an algorithm that adds partial sums in its workspace."""
    plan = _cublaslt.GemmPlan("bfloat16", 0, rows, n, k)
    for algorithm in plan.algorithms(64):
        for parts in (4, 3, 2):
            for reduction in (2, 4):
                found = _cublaslt.changed(algorithm, split_k=parts, reduction=reduction)
                if found and not plan.refuses(found) and plan.workspace_bytes(found):
                    return plan, found
    pytest.fail("no algorithm of this library divides K")


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "a graph beside"])
def test_gemms_of_two_streams_at_the_same_time(table: DeviceTable, captured: bool) -> None:
    rows, n, k, count = 64, 1024, 8192, 200
    plan, algorithm = split(rows, n, k)
    xs, weights = (torch.randn(2, m, k, device="cuda").bfloat16() for m in (rows, n))
    ys = torch.full((2, count, rows, n), torch.nan, dtype=torch.bfloat16, device="cuda")

    def run(which: int, at: int) -> Tensor:
        return plan.run(xs[which], weights[which], ys[which, at], algorithm)

    wanted = [run(which, 0).clone() for which in (0, 1)]
    exact = xs.double() @ weights.double().mT
    for which in (0, 1):
        apart = (wanted[which].double() - exact[which]).abs().max() / exact[which].abs().max()
        assert float(apart) <= 2.0**-8
        assert torch.equal(run(which, 0), wanted[which]), "an algorithm whose sums have no order"
    ys.fill_(torch.nan)
    graph = torch.cuda.CUDAGraph() if captured else None
    if graph is not None:
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for at in range(count):
                run(0, at)
    on_two_streams(run, count, graph)
    for which in (0, 1):
        wrong = sum(not torch.equal(y, wanted[which]) for y in ys[which])
        assert not wrong, f"{wrong} of {count} GEMMs of stream {which}"


@pytest.mark.gpu
def test_a_plan_outlives_its_eviction_while_threads_run_it(
    table: DeviceTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = next(a for a in table.algorithms if a.operands == "fp8 token" and a.most_rows <= 64)
    calls, call = Counter[str](), _cublaslt._call

    def counted(name: str, *args: object) -> None:
        calls[name] += 1
        call(name, *args)

    monkeypatch.setattr(_cublaslt, "_call", counted)
    _cublaslt_linear._planned.cache_clear()
    given = [operands(a, rows)[0] for rows in (a.most_rows, a.most_rows - 1)]

    def linear(which: int) -> Tensor:
        found = _cublaslt_linear.run(*given[which])
        assert found is not None
        return found

    wanted = [linear(which) for which in (0, 1)]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(which: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for done in count():
                if not torch.equal(linear(which), wanted[which]):
                    wrong.append(which)
                if done >= 40 and calls["cublasLtMatmulDescCreate"] > 10:
                    return

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1, 1)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        _cublaslt_linear._planned.cache_clear()
    for thread in threads:
        thread.join()
    assert not wrong
    _cublaslt_linear._planned.cache_clear()
    for kind in ("MatmulDesc", "MatrixLayout"):
        made, gone = (calls[f"cublasLt{kind}{end}"] for end in ("Create", "Destroy"))
        assert made == gone > 10


@pytest.mark.gpu
def test_tuning_writes_a_table_that_keeps_other_weights(
    table: DeviceTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not load_cuda_library():
        pytest.skip("needs csrc")
    some = next(a for a in table.algorithms if a.operands == "bfloat16")
    other = msgspec.structs.replace(some, out_features=64)
    old = msgspec.structs.replace(some, out_features=4096, in_features=4096)
    path = tmp_path / "table.json"
    path.write_text(replace(table, algorithms=(other, old)).text())
    words = "tune_linear --models llama3-8b --operands bfloat16 --rows 96 --output"
    monkeypatch.setattr("sys.argv", [*words.split(), str(path)])
    main()
    new = read_table(path)
    assert (new.gpu, new.rows, new.experts) == (table.gpu, table.rows, table.experts)
    assert new.memory_bytes and new.measured["rows"] == table.measured["rows"]
    assert other in new.algorithms
    tuned = [a for a in new.algorithms if a != other]
    assert tuned, "another algorithm was worth 15 % of o's GEMM at 96 rows when this was written"
    assert all(a.least_rows in (17, 89) and a.most_rows == 96 for a in tuned), tuned
    assert all(a.us <= 0.98 * a.us_before for a in tuned)
