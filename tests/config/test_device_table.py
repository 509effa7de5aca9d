"""Tables of devices: what they answer, what is refused or ignored, and which table is nearest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fusewright.config import UserError
from fusewright.config.device_table import (
    Algorithm,
    DeviceTable,
    Measured,
    copy_ceiling,
    file_name,
    nearest,
    parse_table,
    read_table,
    shipped,
)
from fusewright.config.expert_tables import ExpertTable, ExpertTile

ONE = Algorithm("bfloat16", 4096, 1024, 33, 64, "0a" * 64, 10.0, 12.0)
BY = Measured("a GPU", {"cuBLASLt": "1"}, "abc1234", "a command")
TILE = ExpertTile(16, 64, 64, 1, 4, 2)
TABLE = DeviceTable(
    *("a.json", "a GPU", 90, 100, 80 << 30),
    {"copy_tb_s": BY, "rows": Measured("b GPU"), "algorithms": BY},
    copy_tb_s=2.0,
    rows={"stream fp8 token": ((64, 8), (0, 16))},
    algorithms=(ONE,),
)


def written(folder: Path, *algorithms: Algorithm, **changes: Any) -> Path:
    content = json.loads(replace(TABLE, algorithms=algorithms).text())
    path = folder / "a.json"
    path.write_text(json.dumps(content | changes))
    return path


def test_the_table_answers_for_its_rows_and_weights_alone(tmp_path: Path) -> None:
    more = msgspec.structs.replace(ONE, least_rows=65, most_rows=128, algorithm="0b" * 64)
    fp8 = msgspec.structs.replace(ONE, operands="fp8 token", algorithm="0c" * 64)
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
        ({"rows": 3}, r"unknown field `rows` - at `\$\.algorithms\[0\]`"),
        ({"us": "10"}, r"Expected `float`, got `str` - at `\$\.algorithms\[0\]\.us`"),
        ({"us": float("nan")}, "malformed"),
        ({"out_features": 1.5}, r"Expected `int`, got `float` - at .*\.out_features"),
    ],
)
def test_a_bad_entry_is_refused_by_name(entry: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = written(tmp_path, algorithms=[msgspec.structs.asdict(ONE) | entry])
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
    path = written(tmp_path, ONE, msgspec.structs.replace(ONE, least_rows=64, most_rows=96))
    with pytest.raises(UserError, match="two algorithms for 64 rows"):
        read_table(path)


def test_a_table_is_read_as_it_was_written() -> None:
    assert parse_table(TABLE.text(), "a.json") == TABLE


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tilez": {}}, "unknown: 'tilez'; expected gpu, sm"),
        ({"gpu": ""}, "gpu='', sm=90: unknown device"),
        ({"sm": 42}, "gpu='a GPU', sm=42: unknown device; expected .* of 80 to"),
        ({"sm": "90"}, r"Expected `int`, got `str` - at `\$\.sm`"),
        ({"num_sms": True}, r"Expected `int`, got `bool` - at `\$\.num_sms`"),
        ({"rows": {"flow int4": [[16, 16]]}}, r"rows\['flow int4'\]: .*last to begin at 0"),
        ({"rows": {"flow int4": 8}}, r"Expected `array`, got `int` - at `\$\.rows"),
        ({"rows": {"stream": [[0, 16]]}}, "unknown format or stage; expected bfloat16, fp8"),
        ({"rows": {"stream int4": [[0, 16]]}}, "unknown format or stage; expected bfloat16, fp8"),
        ({"rows": {"push 3 ranks": [[0, 16]]}}, "unknown format or stage; expected 2 ranks"),
        ({"rows": {"stream fp8 token": [[64, 8]]}}, r"rows\['stream .*last to begin at 0"),
        ({"rows": {"stream fp8 token": 8}}, r"Expected `array`, got `int` - at `\$\.rows"),
        ({"rows": {"stream fp8 token": [[0, "8"]]}}, r"Expected `int`, got `str` - at `\$\.rows"),
        ({"rows": []}, r"Expected `object`, got `array` - at `\$\.rows`"),
        ({"copy_tb_s": -1.0}, r"Expected `float` >= 0.0 - at `\$\.copy_tb_s`"),
        ({"copy_tb_s": "4"}, r"Expected `float`, got `str` - at `\$\.copy_tb_s`"),
        (
            {"experts": [{"kind": "fp8"}]},
            "expected an object of experts, intermediate, kind, tiles",
        ),
        (
            {"rows": {"flow int4": [[0, 16]]}, "measured": {"copy_tb_s": {"gpu": "a GPU"}}},
            r"measured\['rows'\] is missing",
        ),
        ({"measured": {}}, r"measured\['copy_tb_s'\] is missing"),
        (
            {"measured": {"tiles": {"gpu": "a GPU"}}, "copy_tb_s": 0.0},
            r"measured\['rows'\] is miss",
        ),
        (
            {"measured": {"rows": {"gpu": 3}}},
            r"Expected `str`, got `int` - at `\$\.measured\[\.\.\.\]\.gpu`",
        ),
    ],
)
def test_what_is_unknown_or_wrong_is_refused_by_file_and_key(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = written(tmp_path, ONE, **changes)
    with pytest.raises(UserError, match=words) as refused:
        shipped(tmp_path)
    assert str(refused.value).startswith(f"{path}: ") and "tune moe" in str(refused.value)


def test_rows_of_kernels_that_this_build_lacks_are_left_out_and_kept(tmp_path: Path) -> None:
    unknown = {
        "cutlass 4 bits": ((0, 64),),
        "stram sum 2 ranks": ((8, 2), (0, 4)),
        "in trun 2 ranks": ((0, 1),),
    }
    rows = {**TABLE.rows, **unknown}
    table = read_table(written(tmp_path, ONE, rows=rows))
    assert table == TABLE and repr(table) == repr(TABLE), "an artifact's key has the repr"
    assert [*table.rows] == ["stream fp8 token"] and [*table.unknown_rows] == [*unknown]
    told = table.left_out
    assert told.startswith(f"{tmp_path}/a.json: this build lacks kernel 'cutlass' of rows 'cutlass")
    assert "(known: stream, cluster, " in told
    assert "; 'stram' of rows 'stram sum 2 ranks' (did you mean stream?)" in told
    assert "(did you mean in turn?); the next row serves" in told and TABLE.left_out == ""


def test_rows_that_were_left_out_survive_a_rewrite(tmp_path: Path) -> None:
    rows = {"flow int4": [[0, 64]], **TABLE.rows}
    table = read_table(written(tmp_path, ONE, rows=rows))
    tiles = replace(TABLE, experts=(ExpertTable(8, 64, "fp8", ((16, TILE),)),), rows={})
    tiles = replace(tiles, measured={"experts": BY})  # as ``fusewright tune moe`` has them
    again = parse_table(table.updated(tiles).text(), "again")
    assert again.unknown_rows == {"flow int4": ((0, 64),)} and again.rows == TABLE.rows
    assert again.text() == parse_table(again.text(), "again").text()
    newer = table.updated(replace(TABLE, rows={"stream bfloat16": ((0, 8),)}))
    assert not newer.left_out and [*newer.rows] == ["stream bfloat16"], "they were measured anew"


def test_a_section_says_where_it_was_measured() -> None:
    elsewhere = replace(TABLE, measured={**TABLE.measured, "algorithms": Measured("b GPU")})
    with pytest.raises(UserError, match=r"measured\['algorithms'\]: on 'b GPU', not on 'a GPU'"):
        parse_table(elsewhere.text(), "a.json")
    surplus = replace(TABLE, measured={**TABLE.measured, "tiles": BY})
    with pytest.raises(UserError, match=r"measured\['tiles'\]: unknown section; expected copy"):
        parse_table(surplus.text(), "a.json")


def test_new_sections_replace_old_ones_alone() -> None:
    newer = Measured("a GPU", {"cuBLASLt": "2"})
    new = DeviceTable("", "a GPU", 90, 100, 0, {"algorithms": newer}, algorithms=(ONE, ONE))
    both = TABLE.updated(new)
    assert (both.rows, both.copy_tb_s, both.algorithms) == (TABLE.rows, 2.0, (ONE, ONE))
    tiles = [ExpertTable(8, n, "fp8", ()) for n in (64, 96, 96)]
    both = replace(TABLE, experts=tuple(tiles[:2])).updated(replace(new, experts=(tiles[2],)))
    assert both.experts == (tiles[0], tiles[2])
    assert both.measured == {**TABLE.measured, "algorithms": newer}


@pytest.mark.parametrize("table", shipped(), ids=lambda table: table.gpu)
def test_a_shipped_table_is_of_one_gpu_and_says_its_memory(table: DeviceTable) -> None:
    assert table.file == file_name(table.gpu) and table.memory_bytes > 70e9
    assert {"copy_tb_s", "rows", "algorithms"} <= table.measured.keys()
    assert all(measured.commit and measured.how for measured in table.measured.values())
    assert parse_table(table.text(), "again") == table


def test_algorithms_serve_one_gpu_and_one_version() -> None:
    assert TABLE.why_not("algorithms", "a GPU", "1") == ""
    assert (
        TABLE.why_not("algorithms", "another", "1") == "a.json: measured on a GPU, this is another"
    )
    words = "a.json: algorithms: measured with cuBLASLt 1, here is 2"
    assert TABLE.why_not("algorithms", "a GPU", "2") == words
    assert TABLE.why_not("experts", "another", "2") == "", "there are none"


def test_rows_come_from_the_nearest_gpu() -> None:
    other, older = replace(TABLE, gpu="b GPU"), replace(TABLE, gpu="c GPU", sm=80)
    tables = (older, TABLE, other)
    assert nearest("b GPU", 90, tables) is other, "its own"
    assert nearest("d GPU", 90, tables) is TABLE, "of its capability"
    assert nearest("d GPU", 120, tables) is None, "of no other"
    assert nearest("", 0, tables) is older, "no GPU is here"


def test_the_copy_ceiling_is_that_of_the_same_gpu_alone() -> None:
    measured = replace(TABLE, copy_tb_s=0.0)
    assert copy_ceiling("a GPU", (measured, TABLE)) == 2.0, "whichever table has it"
    assert copy_ceiling("a GPU", (measured,)) == copy_ceiling("b GPU", (TABLE,)) == 0
    assert copy_ceiling("NVIDIA H200", shipped()) > 4
