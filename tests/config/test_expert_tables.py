"""Tuned tiles of experts: the common format is read, and what cannot serve is named and ignored."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fusewright.config import EngineOptions, Hardware, ModelLimits, UserError, resolve
from fusewright.config.device_table import DeviceTable, Measured, find_experts, tables_for
from fusewright.config.expert_tables import (
    ExpertTable,
    ExpertTile,
    parse_vllm,
    vllm_name,
    vllm_text,
)
from fusewright.config.key_factors import key_factors

GPU, TRITON = "NVIDIA H200", "3.6.0"
HERE = DeviceTable("", GPU, 90, 132)
TILE = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 128,
    "BLOCK_SIZE_K": 64,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 3,
}
NAME = "E=128,N=768,device_name=NVIDIA_H200.json"


def content(**changes: Any) -> str:
    return json.dumps({"1": TILE, "64": TILE | {"BLOCK_SIZE_M": 32, **changes}})


def test_a_file_as_vllm_writes_it_is_read() -> None:
    table = parse_vllm(NAME, content(), GPU, TRITON)
    assert table.shape == (128, 768, "bfloat16")
    assert [tokens for tokens, _ in table.tiles] == [1, 64]
    assert table.tiles[0][1] == ExpertTile(16, 128, 64, 1, 4, 3)


@pytest.mark.parametrize(("tokens", "rows"), [(1, 16), (32, 16), (33, 32), (4096, 32)])
def test_the_nearest_number_of_tokens_has_the_tile(tokens: int, rows: int) -> None:
    assert parse_vllm(NAME, content(), GPU, TRITON).find(tokens).rows == rows


@pytest.mark.parametrize("kind", ["bfloat16", "fp8", "fp8 block"])
def test_what_is_written_is_read_again(kind: str) -> None:
    table = ExpertTable(8, 14336, kind, ((16, ExpertTile(16, 64, 128, 8, 4, 4)),))
    text = vllm_text(table, TRITON)
    assert parse_vllm(vllm_name(table.shape, GPU), text, GPU, TRITON) == table
    assert json.loads(text)["triton_version"] == TRITON


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("E=8,N=14336.json", content(), "expected a name as E=8,N=14336,device_name=NVIDIA_H200"),
        (NAME.replace("H200", "A100"), content(), "measured on NVIDIA_A100, this is NVIDIA_H200"),
        (NAME.replace(".json", ",dtype=int8_w8a16.json"), content(), "which no kernel has"),
        (NAME, "{", "not JSON"),
        (NAME, "[" * 9999, "not JSON"),
        (NAME, "[]", "holds no object of tiles"),
        (NAME, "{}", "holds no tile"),
        (NAME, json.dumps({"few": TILE}), "key 'few', expected a number of tokens"),
        (NAME, json.dumps({"triton_version": "3.1.0", "1": TILE}), "with Triton 3.1.0, here is 3"),
        (NAME, content(BLOCK_SIZE_N=96), "BLOCK_SIZE_N of 64 tokens is 96, expected 16 to 256"),
        (NAME, content(num_warps=None), "num_warps of 64 tokens is None"),
        (NAME, content(num_stages=8, BLOCK_SIZE_K=256), "bytes of shared memory, at most 232448"),
    ],
)
def test_a_file_that_cannot_serve_says_why(name: str, text: str, said: str) -> None:
    with pytest.raises(UserError, match=f"^{name.replace('[', '.')}: .*") as caught:
        parse_vllm(name, text, GPU, TRITON)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_is_read_and_its_other_files_named(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(content())
    (tmp_path / NAME.replace("H200", "A100")).write_text(content())
    (tmp_path / "notes.txt").write_text("none")
    (tmp_path / "other.json").write_text("{}")
    (table,), ignored = tables_for(HERE, TRITON, tmp_path, ())
    (experts,) = table.experts
    assert experts.shape == (128, 768, "bfloat16")
    assert [*ignored] == [NAME.replace("H200", "A100"), "other.json"]
    with pytest.raises(UserError, match=r"tuned_config_dir=.*: No such file or directory"):
        tables_for(HERE, TRITON, tmp_path / "absent", ())


def test_a_folder_has_device_tables_too_and_a_bad_one_is_refused(tmp_path: Path) -> None:
    own, other = (
        DeviceTable("", gpu, 90, 132, measured={"experts": Measured(gpu, {"Triton": TRITON})},
                    experts=(ExpertTable(*shape, ((16, ExpertTile(16, 64, 64, 8, 4, 4)),)),))
        for gpu, shape in ((GPU, (8, 64, "fp8")), ("NVIDIA A100", (8, 96, "fp8")))
    )  # fmt: skip
    (tmp_path / "own.json").write_text(own.text())
    (tmp_path / "other.json").write_text(other.text())
    (tmp_path / NAME).write_text(content())
    (table, of_vllm), ignored = tables_for(HERE, TRITON, tmp_path, (own,))[0][:2], tables_for(
        HERE, TRITON, tmp_path, ())[1]  # fmt: skip
    assert find_experts((table, of_vllm), (8, 64, "fp8")) == own.experts[0]
    assert find_experts((table, of_vllm), (128, 768, "bfloat16"))
    assert ignored == {"other.json": "other.json: measured on NVIDIA A100, this is NVIDIA H200"}
    (without, _), ignored = tables_for(HERE, "4.0", tmp_path, ())
    assert not without.experts and "measured with Triton 3.6.0, here is 4.0" in ignored["own.json"]
    (shipped,), _ = tables_for(HERE, TRITON, None, (own, other))
    assert shipped.experts == own.experts, "this GPU's alone"
    (tmp_path / "own.json").write_text(own.text().replace('"fp8"', '"int4"'))
    with pytest.raises(UserError, match=r"own\.json: kind 'int4' is unknown.*tune moe"):
        tables_for(HERE, TRITON, tmp_path, ())


def test_tiles_are_in_the_key_and_their_folder_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["fusewright.config.resolve"]
    monkeypatch.setattr(module, "installed_triton", lambda: TRITON)
    limits = ModelLimits(max_position_embeddings=4096, dtype="bfloat16")
    hardware = Hardware("cuda", GPU, sm=90, num_sms=132, graphs="cuda")

    def factors(folder: Path | None) -> dict[str, str]:
        options = EngineOptions(tuned_config_dir=None if folder is None else str(folder))
        return key_factors(resolve(options, hardware, limits), "config")

    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
        (folder / NAME).write_text(content())
    assert factors(first) == factors(second) != factors(None)
    (second / NAME).write_text(content(num_stages=2))
    assert factors(first) != factors(second)
