"""Claims about what the machine fails at: streams, disks, compilers.  One line, exit code 1."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main

from fusewright.compiler.emit.cpp_compiler import compiler_files
from fusewright.config import MachineError, UserError
from fusewright.serve.cli import app, main
from tests.warm import warm_starts

from .progress_lines import is_progress

PROGRAM = f"{sys.executable} -m fusewright.serve.cli"
CPU = "--device cpu"


def shell(line: str, **environment: str) -> tuple[int, str]:
    """Exit code and stderr of a shell's line, in which $fw is the program."""
    done = subprocess.run(
        ["bash", "-c", line],
        env={**os.environ, "fw": PROGRAM, **environment},
        capture_output=True,
        text=True,
        timeout=500,
    )
    return done.returncode, done.stderr


def line_of(said: tuple[int, str], code: int = 1) -> str:
    """The one line that was said, with this exit code; a busy machine may have shown progress."""
    assert said[0] == code, said
    *before, line = said[1].splitlines()
    assert is_progress(before), said
    assert line.startswith("error: ") and said[1].endswith("\n"), said
    return line + "\n"


# Streams


@pytest.mark.parametrize("buffered", ["", "1"])
@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("$fw explain --levels >/dev/full", "standard output cannot be written: No space left"),
        ("$fw explain --levels >&-", "standard output is closed"),
        ("$fw --help >&-", "standard output is closed"),
    ],
)
def test_an_output_that_fails_is_one_line(line: str, told: str, buffered: str) -> None:
    assert told in line_of(shell(line, PYTHONUNBUFFERED=buffered))


@pytest.mark.parametrize("line", ["$fw cache ls --json", "$fw --help", "$fw bench latency --help"])
def test_a_reader_that_has_gone_is_no_error(line: str) -> None:
    """As ``head`` goes: nothing is said, and the exit code is that of a program SIGPIPE ends."""
    assert shell(f"{line} | :; exit ${{PIPESTATUS[0]}}") == (141, "")


def commands(group: Any, context: Any, *names: str) -> Iterator[list[str]]:
    """The words of every command that there is."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield [*names, name]
        if hasattr(command, "list_commands"):
            yield from commands(command, context, *names, name)


def test_no_command_minds_that_its_reader_has_gone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    group = typer.main.get_command(app)
    helps = [[*words, "--help"] for words in commands(group, typer.Context(group))]
    assert len(helps) > 25
    for argv in (*helps, ["env"], ["cache", "ls"], ["explain", "--levels"], ["explain", "abacus"]):
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            assert main(argv) == 141, argv
            os.dup2(os.open(os.devnull, os.O_WRONLY), writer)
        assert is_progress(capsys.readouterr().err.splitlines()), argv


def test_a_run_without_stdout_is_one_line() -> None:
    assert "standard output is closed" in line_of(shell(f"$fw run -p 1+1= {CPU} -O0 >&-"))


@pytest.mark.parametrize("closed", ["2>&-", "2>/dev/full"])
def test_without_stderr_the_exit_code_speaks(closed: str) -> None:
    assert shell(f"$fw nonsense {closed}") == (2, "")
    assert shell(f"$fw explain --levels {closed} >/dev/null") == (0, "")


def test_a_closed_stdin_is_named() -> None:
    line = line_of(shell("$fw run --prompts-file - <&-"), 2)
    assert "--prompts-file -: standard input is closed" in line


# Errors that no command expects


def fail(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: Any) -> None:
        raise error

    monkeypatch.setattr("fusewright.serve.commands.explain.levels_table", stop)


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (OSError(5, "Input/output error", "/some/file"), 1, "/some/file: Input/output error"),
        (ValueError("no\nway"), 1, "internal error: ValueError: no; run with --debug"),
        (MemoryError(), 1, "out of memory"),
        (EOFError(), 1, "internal error: EOFError: no message"),
        (UserError("x=1: expected 2"), 2, "x=1: expected 2"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_any_error_is_one_line_and_debug_adds_its_traceback(
    error: Exception,
    code: int,
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fail(error, monkeypatch)
    assert told in line_of((main(["explain", "--levels"]), capsys.readouterr().err), code)
    for argv in (["--debug", "explain", "--levels"], ["explain", "--levels", "--debug"]):
        assert main(argv) == code
        said = capsys.readouterr().err
        assert said.startswith("Traceback")
        assert told in said.splitlines()[-1]


def test_an_interrupt_says_nothing_and_exits_130(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(KeyboardInterrupt(), monkeypatch)
    assert main(["explain", "--levels"]) == 130
    assert capsys.readouterr().err == ""


def test_debug_is_a_prompt_where_a_prompt_is_expected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-p", "--debug", "--max-num-seqs", "0", "-O0"]) == 2
    assert "Traceback" not in capsys.readouterr().err


# Compilers and their files


def compiled(
    tmp_path: Path, *, program: Sequence[str] = PROGRAM.split(), **environment: str
) -> str:
    """What a start that must compile for a CPU says."""
    env = os.environ | {
        "FUSEWRIGHT_CACHE_DIR": str(tmp_path / "store"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    command = [*program, "compile", "-O2", *CPU.split(), "--no-verify"]
    done = subprocess.run(
        command, env=env | environment, capture_output=True, text=True, timeout=500
    )
    return line_of((done.returncode, done.stderr))


@pytest.mark.product(2, of="starts that cannot compile")
def test_a_missing_compiler_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    line = compiled(tmp_path, CXX="/nonexistent/g++")
    assert "no C++ compiler: /nonexistent/g++ cannot be run" in line
    assert "install g++" in line
    assert "-O0" in line


@pytest.mark.product(2, of="starts that cannot compile")
@pytest.mark.slow
def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    lines = ["#!/bin/sh", '[ "$1" = --version ] && echo g++ 1 && exit']
    lines += ["echo 'x.h: fatal error: no header' >&2", "exit 1"]
    compiler.write_text("\n".join(lines))
    compiler.chmod(0o755)
    with warm_starts():
        line = compiled(tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert "the C++ compiler fails: x.h: fatal error: no header" in line


def test_a_c_compiler_that_triton_misses_is_named() -> None:
    told = r"no C compiler: .*install gcc, or name one in CC"
    with pytest.raises(MachineError, match=told), compiler_files():
        raise RuntimeError("Failed to find C compiler. Please specify via CC")
    with pytest.raises(RuntimeError, match="another"), compiler_files():
        raise RuntimeError("another")


KERNELS_ALONE = """
from fusewright.compiler.artifacts.key import Key, Wanted
from fusewright.compiler.artifacts.store import Store
from fusewright.compiler.compiled import compile_kernels
from fusewright.config import EngineOptions, Hardware, MachineError, ModelLimits, resolve
from fusewright.engine.worker.drafts.state import draft_calls

gpu = Hardware("cuda", "sm_90", sm=90, graphs="cuda")
config = resolve(EngineOptions(model="abacus"), gpu, ModelLimits(256, "float32")).compile
wanted = Wanted(Key({}), [], "kernels", "cuda", 90)
try:
    compile_kernels(lambda _, num_seqs: draft_calls(num_seqs, 1), config, wanted, Store(()))
except MachineError as error:
    print(error)
"""


@pytest.mark.product(2, of="starts that cannot compile")
def test_a_folder_that_triton_cannot_write_is_named() -> None:
    env = os.environ | {"TRITON_CACHE_DIR": "/proc/x", "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", KERNELS_ALONE]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.stdout.startswith("compiling fails at /proc/x: "), done.stderr
    assert "TRITON_CACHE_DIR" in done.stdout


@pytest.mark.product(2, of="starts that cannot compile")
def test_a_folder_that_inductor_cannot_write_is_named(tmp_path: Path) -> None:
    line = compiled(tmp_path, TORCHINDUCTOR_CACHE_DIR="/dev/null/x")
    assert "compiling fails at /dev/null/x: Not a directory" in line
    assert "TMPDIR" in line


def test_it_is_named_too_where_inductor_has_been_imported_before(tmp_path: Path) -> None:
    """Then the folder is first made while the model is traced."""
    code = """import os, sys, torch._inductor.compile_fx
os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/dev/null/x"
from fusewright.serve.cli import main
sys.exit(main(sys.argv[1:]))"""
    with warm_starts():
        line = compiled(tmp_path, program=[sys.executable, "-c", code])
    assert "compiling fails at /dev/null/x: Not a directory" in line


def test_a_dump_on_a_full_disk_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path / "store"))
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump/00-traced.txt").symlink_to("/dev/full")
    argv = ["compile", "-O2", *CPU.split(), "--no-verify", "--dump", f"{tmp_path}/dump"]
    line = line_of((main(argv), capsys.readouterr().err))
    assert f"dump={tmp_path}/dump: 00-traced.txt cannot be written: No space left" in line
