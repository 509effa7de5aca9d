"""Tuned tiles of experts: the common format is read, and what cannot serve is named and ignored."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fusewright.config import EngineOptions, Hardware, ModelLimits, UserError, resolve
from fusewright.config.expert_tables import (
    ExpertTable,
    ExpertTile,
    file_name,
    parse_table,
    read_folder,
)
from fusewright.config.key_factors import key_factors

GPU, TRITON = "NVIDIA H200", "3.6.0"
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
    table = parse_table(NAME, content(), GPU, TRITON)
    assert table.shape == (128, 768, "bfloat16")
    assert [tokens for tokens, _ in table.tiles] == [1, 64]
    assert table.tiles[0][1] == ExpertTile(16, 128, 64, 1, 4, 3)


@pytest.mark.parametrize(("tokens", "rows"), [(1, 16), (32, 16), (33, 32), (4096, 32)])
def test_the_nearest_number_of_tokens_has_the_tile(tokens: int, rows: int) -> None:
    assert parse_table(NAME, content(), GPU, TRITON).find(tokens).rows == rows


@pytest.mark.parametrize("kind", ["bfloat16", "fp8", "fp8 block"])
def test_what_is_written_is_read_again(kind: str) -> None:
    table = ExpertTable(8, 14336, kind, ((16, ExpertTile(16, 64, 128, 8, 4, 4)),))
    text = table.text(TRITON)
    assert parse_table(file_name(table.shape, GPU), text, GPU, TRITON) == table
    assert json.loads(text)["triton_version"] == TRITON


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("E=8,N=14336.json", content(), "expected a name as E=8,N=14336,device_name=NVIDIA_H200"),
        (NAME.replace("H200", "A100"), content(), "measured on NVIDIA_A100, this is NVIDIA_H200"),
        (NAME.replace(".json", ",dtype=int8_w8a16.json"), content(), "which no kernel has"),
        (NAME, "{", "not JSON"),
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
        parse_table(name, text, GPU, TRITON)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_is_read_and_its_other_files_named(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(content())
    (tmp_path / NAME.replace("H200", "A100")).write_text(content())
    (tmp_path / "notes.txt").write_text("none")
    (table,), ignored = read_folder(tmp_path, GPU, TRITON)
    assert table.shape == (128, 768, "bfloat16")
    assert list(ignored) == ["E=128,N=768,device_name=NVIDIA_A100.json"]
    with pytest.raises(UserError, match=r"tuned_config_dir=.*: No such file or directory"):
        read_folder(tmp_path / "absent", GPU, TRITON)


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
