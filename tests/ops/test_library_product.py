"""The table of library algorithms: what it answers, what it refuses, and each algorithm on a GPU
against float64."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.bench.ops.tune_linear import LEAST_ROWS, main
from fusewright.config import UserError
from fusewright.ops import BY_NAME, _cublaslt, _library_product, load_cuda_library
from fusewright.ops._library_product import TABLE, Algorithm, Table, read_table, table_of

SHIPPED = read_table()
ONE = Algorithm("bfloat16", 4096, 1024, 33, 64, "0a" * 64, 10.0, 12.0)


def written(folder: Path, *algorithms: Algorithm, **changes: Any) -> Path:
    content = {"gpu": "a GPU", "cublaslt": 1, "algorithms": [asdict(a) for a in algorithms]}
    path = folder / "algorithms.json"
    path.write_text(json.dumps(content | changes))
    return path


def test_the_table_answers_for_its_rows_and_weights_alone(tmp_path: Path) -> None:
    more = replace(ONE, least_rows=65, most_rows=128, algorithm="0b" * 64)
    fp8 = replace(ONE, operands="fp8 token", algorithm="0c" * 64)
    table = read_table(written(tmp_path, more, ONE, fp8))
    found = {rows: table.find("bfloat16", rows, 4096, 1024) for rows in (32, 33, 64, 65, 128, 129)}
    first, second = b"\x0a" * 64, b"\x0b" * 64
    assert found == {32: None, 33: first, 64: first, 65: second, 128: second, 129: None}
    assert table.find("fp8 token", 64, 4096, 1024) == b"\x0c" * 64
    assert table.find("fp8 tensor", 64, 4096, 1024) is None
    assert table.find("bfloat16", 64, 1024, 4096) is None


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"operands": "float16"}, "operands 'float16', expected one of"),
        ({"algorithm": "0a"}, "expected 128 digits"),
        ({"algorithm": "zz" * 64}, "hexadecimal"),
        ({"least_rows": 65}, "rows 65 to 64"),
        ({"least_rows": 0}, "rows 0 to 64"),
        ({"rows": 3}, "unexpected keyword argument 'rows'"),
    ],
)
def test_a_bad_entry_is_refused_by_name(entry: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = written(tmp_path, algorithms=[asdict(ONE) | entry])
    with pytest.raises(UserError, match=words) as refused:
        read_table(path)
    assert str(path) in str(refused.value)
    assert "tune_linear" in str(refused.value)


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "algorithms.json"
    for text in ("", "[]", "{}", '{"gpu": "a", "cublaslt": 1}'):
        path.write_text(text)
        with pytest.raises(UserError, match="not a table of algorithms"):
            read_table(path)
        read_table.cache_clear()
    with pytest.raises(UserError, match="not a table of algorithms"):
        read_table(tmp_path / "none.json")


def test_two_algorithms_for_one_call_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, ONE, replace(ONE, least_rows=64, most_rows=96))
    with pytest.raises(UserError, match="two algorithms for 64 rows"):
        read_table(path)


def test_every_shipped_algorithm_gained_when_it_was_measured() -> None:
    assert SHIPPED.algorithms
    for a in SHIPPED.algorithms:
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


@pytest.fixture
def table() -> Table:
    found = table_of(torch.device("cuda", torch.cuda.current_device()))
    if found is None:
        pytest.skip(f"{TABLE.name} is of {SHIPPED.gpu} with cuBLASLt {SHIPPED.cublaslt}")
    return found


def operands(a: Algorithm, rows: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """x, weight and their scales, if any; and the exact product."""
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
    return (x, scales[0], weight, scales[1]), exact


@pytest.mark.gpu
@pytest.mark.parametrize(
    "a", SHIPPED.algorithms, ids=lambda a: f"{a.operands}-{a.out_features}-{a.most_rows}"
)
def test_each_algorithm_is_near_float64(a: Algorithm, table: Table, fw_seed: int) -> None:
    torch.manual_seed(fw_seed)
    name = "linear" if a.operands == "bfloat16" else "linear_fp8"
    rest: tuple[Any, ...] = (None,) if name == "linear" else (None, torch.bfloat16)
    op = BY_NAME[name].overload("skinny")
    for rows in sorted({a.least_rows, a.most_rows - 1, a.most_rows}):
        if rows < a.least_rows:
            continue
        args, exact = operands(a, rows)
        algorithm = bytes.fromhex(a.algorithm)
        shape = (rows, a.out_features, a.in_features)
        planned = _library_product._planned(a.operands, args[0].device, *shape)
        assert planned is not None and planned[1] == algorithm
        product = _cublaslt.Product(a.operands, 0, *shape)
        y = torch.full(exact.shape, torch.nan, dtype=torch.bfloat16, device="cuda")
        x, weight = (args[0], args[-1 if len(args) == 2 else 2])
        product.run(x, weight, y, algorithm, *args[1::2] if len(args) == 4 else ())
        error = float(((y.double() - exact).abs().max() / exact.abs().max()).nan_to_num(torch.inf))
        assert error <= 2.0**-8, f"{rows} rows: {error}, --fw-seed={fw_seed}"
        for _ in range(3):
            assert torch.equal(op(*args, *rest), y), f"{rows} rows: the op gives something else"


@pytest.mark.gpu
def test_the_library_takes_each_algorithm_for_every_number_of_rows(table: Table) -> None:
    refused = {}
    for a in table.algorithms:
        for rows in range(a.least_rows, a.most_rows + 1):
            product = _cublaslt.Product(a.operands, 0, rows, a.out_features, a.in_features)
            if reason := product.refuses(bytes.fromhex(a.algorithm)):
                refused[a.weight, rows] = reason
    assert not refused


@pytest.mark.gpu
def test_a_graph_holds_the_algorithm(table: Table) -> None:
    a = next(a for a in table.algorithms if a.operands == "bfloat16" and a.most_rows <= 128)
    (x, weight), _ = operands(a, a.most_rows)
    op = BY_NAME["linear"].overload("skinny")
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


@pytest.mark.gpu
def test_tuning_writes_a_table_that_keeps_other_weights(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not load_cuda_library():
        pytest.skip("needs csrc")
    some = next(a for a in table.algorithms if a.operands == "bfloat16")
    other, old = replace(some, out_features=64), replace(some, out_features=4096, in_features=4096)
    path = written(tmp_path, other, old, gpu=table.gpu, cublaslt=table.cublaslt)
    words = "tune_linear --models llama3-8b --operands bfloat16 --rows 96 --json"
    monkeypatch.setattr("sys.argv", [*words.split(), str(path)])
    main()
    read_table.cache_clear()
    new = read_table(path)
    assert (new.gpu, new.cublaslt) == (table.gpu, table.cublaslt)
    assert other in new.algorithms
    tuned = [a for a in new.algorithms if a != other]
    assert tuned, "another algorithm was worth 15 % of o's product at 96 rows when this was written"
    assert all(a.least_rows in (17, 89) and a.most_rows == 96 for a in tuned), tuned
    assert all(a.us <= 0.98 * a.us_before for a in tuned)
