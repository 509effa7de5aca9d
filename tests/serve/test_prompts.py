"""Claims about prompts and options on their way from the command line to the engine."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fusewright.config import UserError
from fusewright.serve.commands.prompts import read_prompts
from fusewright.serve.console.options import merge


def test_prompts_of_flags_come_before_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("three\n\n  four \r\n", encoding="utf-8")
    given = read_prompts(["one", "two"], str(file))
    assert [p.prompt for p in given] == ["one", "two", "three", "  four "]


def test_jsonl_prompts_are_text_token_ids_or_messages(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    messages = [{"role": "user", "content": "hi"}]
    records = [{"prompt": "a\nb"}, {"prompt_token_ids": [1, 2]}, {"messages": messages}]
    file.write_text("\n\n".join(map(json.dumps, records)))
    text, ids, chat = read_prompts([], str(file))
    assert (text.prompt, ids.prompt, chat.prompt) == ("a\nb", [1, 2], None)
    assert chat.messages == tuple(messages)


def test_a_record_brings_its_sampling_options_and_its_place(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('\n{"max_tokens": 3, "prompt": "a", "stop": ["b"]}\n')
    (given,) = read_prompts([], str(file))
    assert given.sampling == {"max_tokens": 3, "stop": ["b"]}
    assert given.where == f"{file}:2"


def test_an_unknown_key_is_refused_with_what_it_may_have_meant(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    for key, told in (
        ("max_token", "did you mean max_tokens?"),
        ("zzz", "known: prompt, "),
        ("temp", "did you mean temperature?"),
    ):
        file.write_text(json.dumps({"prompt": "a", key: 1}))
        with pytest.raises(UserError) as refused:
            read_prompts([], str(file))
        assert str(refused.value).startswith(f"{file}:1: unknown key {key!r}: {told}")


def test_what_editors_add_is_no_part_of_a_prompt(tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\n\r\n\ntwo\xef\xbb\xbf")
    assert [p.prompt for p in read_prompts([], str(file))] == ["one", "two\ufeff"]


def test_a_pipe_is_a_file_of_prompts(tmp_path: Path) -> None:
    pipe = tmp_path / "p.jsonl"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        written = pool.submit(pipe.write_text, '{"prompt": "a"}')
        assert [p.prompt for p in read_prompts([], str(pipe))] == ["a"]
        written.result()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "p.txt: holds no prompt"),
        (b"\xef\xbb\xbf\n \r\n", "p.txt: holds no prompt"),
        (b"one\ntwo \xff\n", "p.txt:2: not UTF-8 text (byte 5 of the line is 0xff)"),
    ],
)
def test_a_file_without_a_prompt_or_of_bytes_is_named(
    content: bytes, told: str, tmp_path: Path
) -> None:
    file = tmp_path / "p.txt"
    file.write_bytes(content)
    with pytest.raises(UserError) as refused:
        read_prompts(["there is one"], str(file))
    assert told in str(refused.value)


def test_a_folder_of_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Is a directory; give a readable text file"):
        read_prompts([], str(tmp_path))


def test_half_a_character_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(r'{"prompt": "ab\ud800"}')
    with pytest.raises(UserError, match=r"p.jsonl:1: the prompt's character 3 is '\\ud800'"):
        read_prompts([], str(file))
    with pytest.raises(UserError, match=r"^-p: the prompt's character 1"):
        read_prompts(["\udcff"], None)


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
        '{"prompt": "a", "messages": []}',
        '{"messages": "a"}',
        '{"messages": ["a"]}',
        '{"prompt": ' + "1" * 5000 + "}",
        "[" * 100_000,
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
