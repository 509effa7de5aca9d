"""Claims about `run`, `eval` and `demo` with real models on a CPU: the bundled one, and a tiny
one with random weights; and what each kind of bad input is told."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fusewright.model_executor.abacus import FOLDER
from fusewright.model_executor.abacus.problems import TASKS, held_out
from fusewright.serve.cli import main

from .progress_lines import without_progress

Capture = pytest.CaptureFixture[str]

pytestmark = pytest.mark.usefixtures("warm")
CPU = ("--device", "cpu", "-O0")


def completed(capsys: Capture, *argv: str) -> str:
    """What a command that succeeds prints."""
    capsys.readouterr()
    code = main(argv)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def refusal(capsys: Capture, *argv: str) -> str:
    """The one line with which the command line refuses `argv`."""
    capsys.readouterr()
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"error: [^\n]+\n", captured.err), captured.err
    return captured.err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the bundled model's folder, to be damaged."""
    return Path(shutil.copytree(FOLDER, tmp_path / "model", ignore=shutil.ignore_patterns("*.py*")))


# What comes out


def test_run_streams_the_answer(capsys: Capture) -> None:
    problem = held_out(1)[0]
    out = completed(capsys, "run", "-p", problem.prompt, "--temperature", "0", *CPU)
    assert out == problem.answer + "\n"


def test_run_json_prints_an_object_a_request(capsys: Capture, tmp_path: Path) -> None:
    problems = held_out(len(TASKS))
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": p.prompt}) for p in problems))
    argv = ("run", "abacus", "--prompts-file", str(file), "--temperature", "0", "--json", *CPU)
    records = [json.loads(line) for line in completed(capsys, *argv).splitlines()]
    records.sort(key=lambda r: int(r["request_id"]))
    assert [r["prompt"] for r in records] == [p.prompt for p in problems]
    assert [r["outputs"][0]["text"] for r in records] == [p.answer for p in problems]
    for record in records:
        assert record["outputs"][0]["finish_reason"] == "stop"
        assert record["prompt_token_ids"]
        assert all(seconds >= 0 for seconds in record["timing"].values())


def test_run_json_says_logprobs_of_the_tokens_chosen(capsys: Capture) -> None:
    argv = ("run", "-p", "1+1=", "--json", "--logprobs", "2", "--temperature", "0", *CPU)
    output = json.loads(completed(capsys, *argv))["outputs"][0]
    assert len(output["logprobs"]) == len(output["token_ids"])
    for token, step in zip(output["token_ids"], output["logprobs"], strict=True):
        assert str(token) in step
        assert len(step) >= 2


def test_token_ids_give_what_their_text_gives(capsys: Capture, tmp_path: Path) -> None:
    greedy = ("--temperature", "0", "--json", *CPU)
    by_text = json.loads(completed(capsys, "run", "-p", "12+34=", *greedy))
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"prompt_token_ids": by_text["prompt_token_ids"]}))
    by_ids = json.loads(completed(capsys, "run", "--prompts-file", str(file), *greedy))
    assert by_ids["outputs"][0]["token_ids"] == by_text["outputs"][0]["token_ids"]


def test_sampling_flags_reach_the_sampler(capsys: Capture) -> None:
    def tokens(*flags: str) -> list[list[int]]:
        argv = ("run", "-p", "reverse abc=", "--json", "--max-tokens", "12", *flags, *CPU)
        return [o["token_ids"] for o in json.loads(completed(capsys, *argv))["outputs"]]

    hot = ("--temperature", "50", "--ignore-eos")
    assert tokens(*hot, "--sampling-seed", "1") == tokens(*hot, "--sampling-seed", "1")
    assert tokens(*hot, "--sampling-seed", "1") != tokens(*hot, "--sampling-seed", "2")
    several = tokens(*hot, "--n", "3")
    assert len(several) == 3
    assert all(len(one) == 12 for one in several)
    assert tokens(*hot, "--top-k", "1") == tokens("--temperature", "0", "--ignore-eos")


def test_several_prompts_are_all_answered_in_text(capsys: Capture) -> None:
    problems = held_out(3)
    flags = [word for p in problems for word in ("-p", p.prompt)]
    out = completed(capsys, "run", *flags, "--temperature", "0", *CPU)
    lines = [(f"--- prompt {n}", p.prompt + p.answer) for n, p in enumerate(problems)]
    assert out.splitlines() == [line for pair in lines for line in pair]


def test_chat_streams_and_batches_the_same_reply(capsys: Capture) -> None:
    chat = ("run", "--chat", "--temperature", "0", "--max-tokens", "8", *CPU)
    streamed = completed(capsys, *chat, "-p", "12+34=")
    record = json.loads(completed(capsys, *chat, "-p", "12+34=", "--json"))
    assert streamed == record["outputs"][0]["text"] + "\n"
    assert streamed == "46\n"


def test_eval_counts_exact_matches_a_task(capsys: Capture) -> None:
    argv = ("eval", "abacus", "-n", "60", "--batch-size", "16", "--json", *CPU)
    result = json.loads(completed(capsys, *argv))
    assert {task: entry["total"] for task, entry in result["tasks"].items()} == dict.fromkeys(
        TASKS, 10
    )
    assert result["correct"] == sum(entry["correct"] for entry in result["tasks"].values())
    assert result["accuracy"] == result["correct"] / 60 >= 0.95


def test_eval_of_random_weights_finds_nothing(capsys: Capture) -> None:
    argv = ("eval", "abacus", "-n", "12", "--load-format", "dummy", *CPU)
    last = completed(capsys, *argv).splitlines()[-2].split()
    assert (last[0], last[2]) == ("all", "12")
    assert int(last[1]) <= 1


@pytest.mark.slow
def test_demo_prints_solutions_level_fusions_and_times(tmp_path: Path) -> None:
    code = "import sys; from fusewright.serve.cli import main; sys.exit(main(sys.argv[1:]))"
    # A store of its own: the first start compiles, and the demo starts once more.
    command = [sys.executable, "-c", code, "demo", "--compile-cache-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= 32
    assert lines[0].startswith("fusewright demo: abacus")
    assert done.stdout.count("✓") >= 11, done.stdout
    for expected in ("level -O2", "fuse_add_norm", "fuse_act", "12 solved"):
        assert expected in done.stdout
    assert not re.search(r"^\w+ +0 +0 +0$", done.stdout, re.M)
    first, again = (
        re.search(words + r" ([\d.]+) s \(", done.stdout)
        for words in ("ready after", "the next start, which finds the artifact, takes")
    )
    assert first and again, done.stdout
    assert "\x1b" not in done.stdout


def test_demo_has_colours_on_a_terminal_unless_no_color_is_set() -> None:
    code = (
        "import os, sys; from fusewright.serve.cli import main\n"
        f"argv = ['demo', '-O0', '--per-task', '1', *{CPU!r}]\n"
        "main(argv); os.environ['NO_COLOR'] = '1'; print('plain'); main(argv)"
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=theirs, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while part := os.read(ours, 4096):
            said += part
    assert process.wait(timeout=300) == 0
    coloured, plain = said.decode().split("\nplain")
    assert "\x1b[32m  ✓" in coloured
    assert "\x1b" not in plain
    assert plain.count("✓") == coloured.count("✓") >= 5


# Bad input: one line that names the thing and the remedy


def test_a_truncated_weights_file(capsys: Capture, folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "model.safetensors" in refusal(capsys, "run", str(folder), "-p", "1", *CPU)


def test_an_empty_prompt(capsys: Capture, tmp_path: Path) -> None:
    """Whatever the model: it is not loaded."""
    for argv in (["-p", ""], ["-p", "1+1=", "-p", ""]):
        expected = "error: -p: the prompt is empty; expected text\n"
        assert refusal(capsys, "run", "/nope", *argv) == expected
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt_token_ids": []}')
    expected = f"error: {file}:1: the prompt is empty; expected token ids\n"
    assert refusal(capsys, "run", "/nope", "--prompts-file", str(file)) == expected


def test_a_token_outside_the_vocabulary(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt_token_ids": [1, 123456]}')
    assert "123456" in refusal(capsys, "run", "--prompts-file", str(file), *CPU)


@pytest.mark.parametrize("output", ["text", "json"])
def test_a_prompt_longer_than_max_model_len(capsys: Capture, output: str) -> None:
    argv = ("run", "-p", "1" * 40, "--max-model-len", "16", *CPU)
    line = refusal(capsys, *argv, *(["--json"] if output == "json" else []))
    assert "16" in line
    assert "max_model_len" in line or "max-model-len" in line


def test_a_kv_cache_too_small_for_one_request(capsys: Capture) -> None:
    argv = ("run", "-p", "1" * 40, "--block-size", "8", "--num-gpu-blocks-override", "1", *CPU)
    assert "KV" in refusal(capsys, *argv)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("-O0", "--cudagraph-mode", "FULL"), "cudagraph_mode=FULL"),
        (("-O2", "--cudagraph-mode", "FULL"), "CUDA graphs need a GPU"),
        (("-O0", "--passes", "cleanup"), "-O0 does not trace"),
        (("--num-gpu-blocks-override", "9", "--kv-cache-memory-bytes", "9"), "give one"),
        (("--max-num-batched-tokens", "4", "--max-num-seqs", "8"), "max_num_batched_tokens=4"),
        (("-O0", "--kernels", "rms_norm=magic"), "magic"),
        (("-O0", "--kernels", "no_such_op=native"), "no_such_op"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_contradictory_flags(capsys: Capture, flags: tuple[str, ...], named: str) -> None:
    assert named in refusal(capsys, "run", "-p", "1+1=", "--device", "cpu", *flags)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_where_one_is_required(capsys: Capture) -> None:
    line = refusal(capsys, "run", "-p", "1+1=", "--device", "cuda")
    assert "GPU" in line
    assert "cpu" in line, "the remedy"


def test_a_chat_of_token_ids_is_refused(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt_token_ids": [1, 2]}')
    assert "--chat" in refusal(capsys, "run", "--chat", "--prompts-file", str(file), *CPU)


@pytest.mark.slow
def test_a_refusal_leaves_no_process_behind() -> None:
    code = "import sys; from fusewright.serve.cli import main; sys.exit(main(sys.argv[1:]))"
    argv = ["run", "-p", "1" * 40, "--max-model-len", "16", "--device", "cpu", "-O2"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *argv],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    _, err = process.communicate(timeout=300)
    assert (process.returncode, without_progress(err).count("\n")) == (2, 1), err
    assert running_in_group(process.pid) == []


def running_in_group(group: int) -> list[str]:
    """Processes of a process group that run; a zombie is gone but for its parent's wait (Linux)."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except OSError:  # it ended meanwhile
            continue
        state, _, pgrp = rest.split()[:3]
        if int(pgrp) == group and state != "Z":
            found.append(name)
    return found


@pytest.mark.parametrize(
    "argv",
    [
        ("run", "-p", "1+1="),
        ("run", "-p", "1+1=", "-p", "2+2=", "--json"),
        ("run", "-p", "1+1=", "-p", "2+2="),
        ("eval", "abacus", "-n", "2"),
        ("demo",),
        ("bench", "throughput", "abacus", "--num-prompts", "1", "--dataset", "prefill-heavy"),
    ],
)
def test_a_step_that_fails_is_said_in_one_line(
    argv: tuple[str, ...], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no memory left\nand a long trace")

    monkeypatch.setattr("fusewright.engine.worker.model_runner.ModelRunner.launch", fail)
    assert main([*argv, *CPU]) == 2
    said = capsys.readouterr().err
    assert re.search(r"error: .*failed.*: RuntimeError: no memory left\n", said), said
    assert "Traceback" not in said and "long trace" not in said
