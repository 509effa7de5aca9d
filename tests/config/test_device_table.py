"""Tables of devices: what they answer, what is refused or ignored, and which table is nearest."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from fusewright.config import UserError
from fusewright.config.device_table import (
    Algorithm,
    DeviceTable,
    copy_ceiling,
    nearest,
    parse_table,
    read_table,
    shipped,
)

ONE = Algorithm("bfloat16", 4096, 1024, 33, 64, "0a" * 64, 10.0, 12.0)
TABLE = DeviceTable("a.json", "a GPU", 90, 100, 1, (ONE,), {"stream fp8 token": ((64, 8), (0, 16))})


def written(folder: Path, *algorithms: Algorithm, **changes: Any) -> Path:
    content = json.loads(replace(TABLE, algorithms=algorithms).text())
    path = folder / "a.json"
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
    path = tmp_path / "a.json"
    for text in ("", "[]", "{}", '{"gpu": "a", "algorithms": []}', "[1", '{"gpu": 1, "sm": 90}'):
        path.write_text(text)
        with pytest.raises(UserError, match="not a table of a device"):
            read_table(path)
    with pytest.raises(UserError, match="not a table of a device"):
        read_table(tmp_path / "none.json")


def test_two_algorithms_for_one_call_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, ONE, replace(ONE, least_rows=64, most_rows=96))
    with pytest.raises(UserError, match="two algorithms for 64 rows"):
        read_table(path)


def test_a_table_is_read_as_it_was_written() -> None:
    assert parse_table(TABLE.text(), "a.json") == TABLE


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tilez": {}}, "unknown: tilez"),
        ({"rows": {"stream int4": [[0, 16]]}}, "unknown: rows of stream int4"),
    ],
)
def test_a_file_with_unknown_entries_is_ignored_with_the_reason(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = written(tmp_path, ONE, **changes)
    (tmp_path / "b.json").write_text(TABLE.text())
    found = shipped(tmp_path)
    assert [Path(table.name).name for table in found.tables] == ["b.json"]
    assert words in found.ignored[path.name]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sm": "90"}, "sm='90', expected int"),
        ({"rows": {"stream fp8 token": [[64, 8]]}}, "expected the last to begin at 0"),
        ({"rows": {"stream fp8 token": 8}}, "not iterable"),
        ({"copy_tb_s": -1.0}, "copy_tb_s=-1.0, expected 0 or more"),
        ({"copy_tb_s": "4"}, "not supported between"),
    ],
)
def test_a_bad_value_is_refused_by_name(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = written(tmp_path, ONE, **changes)
    with pytest.raises(UserError, match=words) as refused:
        shipped(tmp_path)
    assert str(path) in str(refused.value)


def test_algorithms_serve_one_gpu_and_one_version() -> None:
    assert TABLE.why_no_algorithms("a GPU", 1) == ""
    assert TABLE.why_no_algorithms("another", 1) == "a.json: measured on a GPU, this is another"
    words = "a.json: measured with cuBLASLt 1, here is 2"
    assert TABLE.why_no_algorithms("a GPU", 2) == words


def test_rows_come_from_the_nearest_gpu() -> None:
    other, older = replace(TABLE, gpu="b GPU"), replace(TABLE, gpu="c GPU", sm=80)
    tables = (older, TABLE, other)
    assert nearest("b GPU", 90, tables) is other, "its own"
    assert nearest("d GPU", 90, tables) is TABLE, "of its capability"
    assert nearest("d GPU", 120, tables) is None, "of no other"
    assert nearest("", 0, tables) is older, "no GPU is here"


def test_the_copy_ceiling_is_that_of_the_same_gpu_alone() -> None:
    measured = replace(TABLE, copy_tb_s=2.5, cublaslt=2)
    assert copy_ceiling("a GPU", (TABLE, measured)) == 2.5, "whichever version measured it"
    assert copy_ceiling("a GPU", (TABLE,)) == copy_ceiling("b GPU", (measured,)) == 0
    assert copy_ceiling("NVIDIA H200", shipped().tables) > 4
