"""Claims about help: short, without heavy imports, and a way to all of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fusewright.config import option_specs
from fusewright.config.speculative import METHODS
from fusewright.config.vllm.speculative import SPECULATIVE
from fusewright.engine.core.drafters import _DRAFTERS
from fusewright.serve.cli import main

COMMANDS = [
    ["run"],
    ["eval"],
    ["demo"],
    ["compile"],
    ["explain"],
    ["bisect"],
    ["profile"],
    ["env"],
    ["bench", "latency"],
    ["bench", "throughput"],
    ["bench", "startup"],
    ["cache", "ls"],
]
ENGINE = [words for words in COMMANDS if words[0] not in ("env", "cache")]
COMMON = ("--dtype", "--quantization", "--kv-cache-dtype", "--max-model-len", "--max-num-seqs")
COMMON += ("-O", "--gpu-memory-utilization", "--seed", "--load-format", "--tensor-parallel-size")


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_is_a_screen(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, *command, "--help").splitlines()
    assert len(lines) <= 48
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("command", ENGINE, ids=" ".join)
def test_help_has_the_common_options_and_counts_the_others(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    short = shown(capsys, *command, "--help")
    assert set(COMMON) <= set(short.replace(",", " ").split())
    every = shown(capsys, *command, "--help-all")
    assert {spec.flag for spec in option_specs()} <= set(every.replace(",", " ").split())
    found = re.search(r"--help-all shows (\d+) more options", short)
    assert found
    flags = [len(re.findall(r"^  (?:-\w, )?--", text, re.M)) for text in (short, every)]
    assert flags[1] - flags[0] == int(found[1]) + 1, "and --help-all itself"


def test_values_of_flags_are_named_and_defaults_shown(capsys: pytest.CaptureFixture[str]) -> None:
    every = " ".join(shown(capsys, "run", "--help-all").split())
    for words in (
        "--kernels OP=IMPL,…",
        "--passes PASS,…",
        "--max-num-seqs INT",
        "--gpu-memory-utilization FLOAT",
        "--tokenizer DIR",
        "--dtype auto|bfloat16|float16|float32 weights and activations [default: auto]",
        "--prompt TEXT",
        "[default: 0.9]",
        "[default: on]",
    ):
        assert words in every
    assert not re.search(r"<\w+(\[\w+\])?>", every)
    assert "[[" not in every


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["help"], ["--help"]),
        (["help", "run"], ["run", "--help"]),
        (["help", "bench", "latency"], ["bench", "latency", "--help"]),
        (["cache", "help", "ls"], ["cache", "ls", "--help"]),
    ],
    ids=" ".join,
)
def test_help_may_be_a_word(
    argv: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(capsys, *argv) == shown(capsys, *expected)


def test_a_prompt_may_be_a_flag_of_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-p", "--help", "-O7"]) == 2
    assert "optimization_level=7" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--help"], ["run", "--help"], ["bench", "-h"], ["--version"]])
def test_help_imports_its_own_command_alone(argv: list[str]) -> None:
    code = (
        "import sys; from fusewright.serve.cli import main\n"
        f"code = main({argv!r})\n"
        "heavy = {'torch', 'triton', 'rich', 'numpy', 'pydantic', 'tokenizers'}\n"
        "heavy |= {f'fusewright.serve.{n}' for n in ('cache', 'compile', 'profile', 'env')}\n"
        "heavy &= set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("command", "usage", "argument"),
    [
        ("run", "run [OPTIONS] [MODEL]", "MODEL"),
        ("eval", "eval [OPTIONS] SUITE", "SUITE"),
        ("cache show", "show [OPTIONS] KEY", "KEY"),
        ("cache verify", "verify [OPTIONS] [KEY]", "KEY"),
        ("models check", "check [OPTIONS] [FOLDER|TYPE]...", "FOLDER|TYPE"),
        ("bench plot", "plot [OPTIONS] PICTURE RESULTS...", "RESULTS"),
    ],
)
def test_a_line_of_usage_is_the_same_with_every_typer(
    command: str, usage: str, argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Versions of it put brackets and braces of their own around arguments."""
    assert main([*command.split(), "--help"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.endswith(usage)
    assert any(line.startswith(f"  {argument} ") for line in rest)


@pytest.mark.parametrize("flag", ["--spec-method", "--spec-model"])
def test_flags_of_drafts_name_every_method(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "run", "--help-all").partition(f"{flag} ")[2]
    text = re.split(r"\n +-", text)[0]
    assert [method for method in METHODS if not re.search(rf"\b{method}\b", text)] == []
    assert SPECULATIVE["method"].says == ", ".join(METHODS), "the page for users of vLLM"
    assert list(_DRAFTERS) == list(METHODS), "the engine's drafters"


def test_no_default_is_shown_as_python_writes_it() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/reference.md").read_text()
    assert "default: [" not in page and "default: (" not in page
