"""A device table of another build: rows of kernels that this one lacks are left out, and said."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fusewright import LLM
from fusewright.config.device_table import DeviceTable, Measured, read_table
from fusewright.ops.core import device_table as _device_table
from fusewright.serve.cli import main

STREAM, CUTLASS = "stream bfloat16", "cutlass bfloat16"
ROWS = {STREAM: ((0, 7),), CUTLASS: ((0, 256),)}


@pytest.fixture(autouse=True)
def no_tables() -> Iterator[None]:
    _device_table.forget()
    yield
    _device_table.forget()


def written(folder: Path, gpu: str, rows: dict[str, Any] = ROWS) -> str:
    """A folder with the table of a GPU."""
    table = DeviceTable("", gpu, 90, 132, measured={"rows": Measured(gpu)}, rows=rows)
    folder.mkdir()
    (folder / "other.json").write_text(table.text())
    return str(folder)


@pytest.mark.parametrize("rows", [ROWS, {CUTLASS: ((0, 256),)}], ids=["some", "all"])
def test_the_next_row_serves(rows: dict[str, Any], tmp_path: Path) -> None:
    path = Path(written(tmp_path / "tables", "a GPU", rows)) / "other.json"
    without = _device_table.most_rows(STREAM, 4096)
    _device_table.take_all((read_table(path),))
    assert _device_table.most_rows(STREAM, 4096) == (7 if STREAM in rows else without) > 0
    (told,) = _device_table.report(torch.device("cpu"))["left_out"]
    assert told.startswith(f"{path}: this build lacks kernel 'cutlass' of rows '{CUTLASS}'")
    serves = "the next row serves" if STREAM in rows else "the rows of the next table serve"
    assert told.endswith(serves)


def test_explain_names_the_kernel_and_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path / "tables", "sm_90")
    command = ["explain", "abacus", "--target-sm", "90", "--tuned-config-dir", folder]
    assert main([*command, "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    (note,) = (note for note in notes if "cutlass" in note)
    assert f"{folder}/other.json: this build lacks kernel 'cutlass'" in note
    assert note.endswith("the next row serves")
    assert main(command) == 0
    assert "this build lacks kernel 'cutlass'" in " ".join(capsys.readouterr().out.split())


def test_a_start_says_it_once(tmp_path: Path, said: list[logging.LogRecord]) -> None:
    path = Path(written(tmp_path / "tables", "a GPU")) / "other.json"
    _device_table.take_all((read_table(path),))
    with LLM("abacus", device="cpu", optimization_level=0) as llm:
        told = llm.report()["device_table"]["left_out"]
    (line,) = (line for line in said if "cutlass" in line.getMessage())
    assert line.levelno == logging.WARNING and told == [line.getMessage()]
    assert f"{path}: this build lacks kernel 'cutlass'" in line.getMessage()
