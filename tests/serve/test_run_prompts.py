"""Claims about files of prompts through `run`: options of a record, order, interrupts."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fusewright.serve.cli import main
from tests.serve.test_run import CPU, Capture, completed, refusal

pytestmark = pytest.mark.usefixtures("warm")


def test_options_of_a_record_win_over_the_flags(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    records: list[dict[str, Any]] = [
        {"prompt": "12+34="},
        {"prompt": "12+34=", "max_tokens": 1},
        {"prompt": "12+34=", "stop": "6"},
        {"messages": [{"role": "user", "content": "12+34="}]},
    ]
    file.write_text("\n".join(map(json.dumps, records)))
    argv = ("run", "--prompts-file", str(file), "--temperature", "0", "--max-tokens", "9", *CPU)
    out = completed(capsys, *argv)
    texts = [line for line in out.splitlines() if not line.startswith("--- prompt ")]
    assert texts == ["12+34=46", "12+34=4", "12+34=4", "46"]


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"prompt": "1", "max_tokens": 0}, "SamplingParams: max_tokens=0"),
        ({"prompt": "1", "temperature": "hot"}, "SamplingParams: temperature='hot'"),
        ({"prompt": "1", "nonsense": 0}, "unknown key 'nonsense'"),
        ({"prompt_token_ids": [1, 123456]}, "123456"),
        ({"messages": []}, "messages is empty"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(
    record: dict[str, Any], told: str, capsys: Capture, tmp_path: Path
) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"prompt": "1+1="}) + "\n" + json.dumps(record))
    line = refusal(capsys, "run", "--prompts-file", str(file), *CPU)
    assert line.startswith(f"error: {file}:2: ")
    assert told in line


def test_outputs_are_printed_in_order_as_they_finish_and_survive_an_interrupt(
    tmp_path: Path,
) -> None:
    lengths = [30, 100_000, 1, *[100_000] * 60]  # the third is done long before the first
    file = tmp_path / "p.jsonl"
    lines = [{"prompt": f"{n}+1=", "max_tokens": length} for n, length in enumerate(lengths)]
    file.write_text("\n".join(map(json.dumps, lines)))
    # A job that a shell started in the background inherits "ignore", and Python keeps it.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from fusewright.serve.cli import main; sys.exit(main(sys.argv[1:]))"
    argv = ["run", "--prompts-file", str(file), "--ignore-eos", "--max-num-seqs", "3", *CPU]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    head, first = process.stdout.readline(), process.stdout.readline()
    process.send_signal(signal.SIGINT)
    rest, said = process.communicate(timeout=300)
    assert process.returncode == 130
    assert head == "--- prompt 0\n" and first.startswith("0+1=")
    assert "2+1=" in rest, "finished, and behind one that is not"
    assert re.search(r"^interrupted: \d+ of 63 prompts are done\n", said, re.M)


def test_outputs_of_one_prompt_are_told_apart(capsys: Capture) -> None:
    argv = ("run", "-p", "1+1=", "--n", "2", "--top-k", "1", *CPU)
    assert completed(capsys, *argv).splitlines() == [
        *("--- prompt 0, output 0 of 2", "1+1=2"),
        *("--- prompt 0, output 1 of 2", "1+1=2"),
    ]


def test_logprobs_that_nobody_would_see_are_refused(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "1+1=", "logprobs": 1}')
    told = "logprobs are shown with --json alone; give it, or ask for none"
    for argv, where in (
        (("-p", "1+1=", "--logprobs", "2"), ""),
        (("--prompts-file", str(file)), f"{file}:1: "),
    ):
        assert main(["run", *argv, *CPU]) == 2
        assert capsys.readouterr().err == f"error: {where}{told}\n"
