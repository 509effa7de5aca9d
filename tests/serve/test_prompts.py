"""Claims about prompts and options on their way from the command line to the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusewright.config import UserError
from fusewright.serve.options import merge
from fusewright.serve.prompts import read_prompts


def test_prompts_of_flags_come_before_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("three\n\n  four \r\n", encoding="utf-8")
    assert read_prompts(["one", "two"], str(file)) == ["one", "two", "three", "  four "]


def test_jsonl_prompts_are_text_or_token_ids(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a\\nb", "id": 7}\n\n{"prompt_token_ids": [1, 2]}\n')
    assert read_prompts([], str(file)) == ["a\nb", [1, 2]]


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[]",
        "{}",
        '{"text": "a"}',
        '{"prompt": 1}',
        '{"prompt": [1]}',
        '{"prompt_token_ids": "a"}',
        '{"prompt_token_ids": [true]}',
        '{"prompt_token_ids": [1.5]}',
        '{"prompt": "a", "prompt_token_ids": [1]}',
    ],
)
def test_a_bad_jsonl_line_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(UserError, match="expected") as refused:
        read_prompts([], str(file))
    assert str(refused.value).startswith(f"{file}:2: ")


def test_a_binary_prompts_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8 text"):
        read_prompts([], str(file))


def test_merge_accepts_agreement_and_adds_what_is_implied() -> None:
    assert merge({"model": "m"}, model="m", max_num_seqs=8) == {"model": "m", "max_num_seqs": 8}
    assert merge({"model": "m"}, model=None) == {"model": "m"}
