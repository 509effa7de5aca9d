"""Claims about the command line that need no model: flags, help, exit codes, prompts, env."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import termios
from array import array
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from fusewright import __version__
from fusewright.config import LEVELS, PASSES, EngineOptions, option_specs
from fusewright.engine.messages.sampling_params import SamplingParams
from fusewright.serve.cli import main
from fusewright.serve.commands.env import collect
from fusewright.serve.console.flags import SAMPLING, takes_flags

from .server_process import wait_for

COMMANDS = ("run", "eval", "demo", "compile", "cache", "bench", "explain", "env")


def python(code: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, **more
    )


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line with which the command line refuses `argv`."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.endswith("\n")
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("error: ").removesuffix("\n")


# Help and version


@pytest.mark.parametrize(
    "argv",
    [["--help"], ["-h"], ["--version"], ["run", "-h"], ["eval", "-h"], ["explain", "--levels"]],
)
def test_help_and_version_do_not_import_torch(argv: list[str]) -> None:
    done = python(
        "import sys; from fusewright.serve.cli import main\n"
        f"code = main({argv!r})\n"
        "heavy = {'torch', 'triton', 'transformers', 'numpy', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fusewright {__version__}\n"


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_every_command(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert set(COMMANDS) <= set(listed)


@pytest.mark.parametrize("command", ["run", "eval", "demo"])
def test_help_names_every_engine_flag_in_full(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help-all"]) == 0
    words = set(capsys.readouterr().out.replace(",", " ").split())
    assert {spec.flag for spec in option_specs()} <= words
    assert {spec.name for spec in option_specs()} == {f.name for f in fields(EngineOptions)}
    assert "-O" in words


def test_no_command_prints_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Commands:" in capsys.readouterr().err


# Flags


def parse(*argv: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a command receives for its flags: engine options, sampling options."""
    received: list[tuple[dict[str, Any], dict[str, Any]]] = []
    app = typer.Typer()

    @app.command()
    @takes_flags(engine=option_specs(), sampling=SAMPLING)
    def command(engine: dict[str, Any], sampling: dict[str, Any]) -> None:
        received.append((engine, sampling))

    app(argv, standalone_mode=False)
    return received[0]


def example_of(kind: str, choices: tuple[str, ...]) -> tuple[list[str], Any]:
    """Command-line words for a value of a type, and that value."""
    if choices:
        return [choices[-1]], choices[-1]
    return {
        "str": (["x"], "x"),
        "int": (["3"], 3),
        "float": (["0.25"], 0.25),
        "list[str]": (["x"], ["x"]),
        "tuple[str, ...]": (["a=1, b"], ("a=1", "b")),
        "tuple[int, ...]": (["1,2,4"], (1, 2, 4)),
    }[kind.removesuffix(" | None")]


@pytest.mark.parametrize("spec", [*option_specs(), *SAMPLING], ids=lambda s: s.flag)
def test_every_option_has_its_flag(spec: Any) -> None:
    cases = [([spec.flag], True), (["--no-" + spec.flag.removeprefix("--")], False)]
    if spec.type != "bool":
        words, value = example_of(spec.type, spec.choices)
        flags = [spec.flag, spec.alias] if spec.alias else [spec.flag]
        cases = [([flag, *words], value) for flag in flags]
    index = 1 if spec in SAMPLING else 0
    for argv, value in cases:
        received = parse(*argv)
        assert received[index] == {spec.name: value}
        assert received[1 - index] == {}


def test_engine_options_accept_what_flags_give() -> None:
    engine, _ = parse("-O3", "--passes", "cleanup,fuse_act", "--no-async-scheduling")
    expected = EngineOptions(
        optimization_level=3, passes=("cleanup", "fuse_act"), async_scheduling=False
    )
    assert EngineOptions(**engine) == expected


@pytest.mark.parametrize("argv", [["-O1"], ["-O", "1"], ["--optimization-level", "1"]])
def test_spellings_of_the_level(argv: list[str]) -> None:
    assert parse(*argv) == ({"optimization_level": 1}, {})


def test_zero_and_off_are_given_values() -> None:
    engine, sampling = parse("--seed", "0", "-O0", "--no-verify", "--temperature", "0")
    assert engine == {"seed": 0, "optimization_level": 0, "verify": False}
    assert sampling == {"temperature": 0.0}


def test_the_two_seeds_are_told_apart() -> None:
    assert parse("--seed", "1", "--sampling-seed", "2") == ({"seed": 1}, {"seed": 2})


def test_stop_repeats() -> None:
    assert parse("--stop", "a", "--stop", "b,c") == ({}, {"stop": ["a", "b,c"]})


def test_sampling_flags_are_sampling_params() -> None:
    changed = {"temperature": 0.5, "top_p": 0.5, "min_p": 0.5, "n": 2, "ignore_eos": True}
    for spec in SAMPLING:
        value = changed.get(spec.name, ("x",) if spec.name == "stop" else 3)
        value = 1.5 if spec.name.endswith("penalty") else value
        params = SamplingParams(**{spec.name: value})
        assert getattr(params, spec.name) == value
        default = getattr(SamplingParams(), spec.name)
        assert default != value
        # The help text must not promise another default than the one that applies.
        assert spec.name == "max_tokens" or (default or None) == (spec.default or None)


# Refusals


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--foo"], "No such option: --foo (see `fusewright --help`)"),
        (["xyzzy"], "No such command 'xyzzy'. (see `fusewright --help`)"),
        (["env", "--foo"], "No such option: --foo (see `fusewright env --help`)"),
        (
            ["run", "--device", "tpu"],
            (
                "Invalid value for '--device': 'tpu' is not one of auto, cpu, cuda. "
                "(see `fusewright run --help`)"
            ),
        ),
        (
            ["run", "--cudagraph-capture-sizes", "1,b"],
            (
                "Invalid value for '--cudagraph-capture-sizes' / '--cudagraph-sizes': '1,b' is not "
                "a list of integers such as 1,2,4. (see `fusewright run --help`)"
            ),
        ),
        (["eval", "mmlu"], "unknown suite 'mmlu'; known: abacus"),
        (
            ["run", "abacus"],
            "no prompt: give -p TEXT, or --prompts-file FILE with one prompt a line",
        ),
        (
            ["run", "one", "--model", "two", "-p", "x"],
            "--model two contradicts one: give one of them",
        ),
        (
            ["eval", "abacus", "--batch-size", "8", "--max-num-seqs", "9"],
            "--max-num-seqs 9 contradicts 8: give one of them",
        ),
        (
            ["run", "--prompts-file", "/nowhere/p.txt"],
            "--prompts-file /nowhere/p.txt: No such file or directory; give a readable text file",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refusal(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, *argv) == message


@pytest.mark.parametrize(
    "argv", [["run", "-Ofast"], ["run", "--max-num-seqs", "many"], ["eval"], ["demo", "x"]]
)
def test_malformed_flags_are_refused_in_one_line(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"(see `fusewright {argv[0]} --help`)" in refusal(capsys, *argv)


def test_a_flag_without_its_value_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "run", "-O").startswith("Option '-O' requires an argument.")


def test_a_message_of_several_lines_becomes_one(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, "run", "c", "--model", "a\n\n b", "-p", "x")
    assert message == "--model a b contradicts c: give one of them"


# Exit codes of the process


def test_interrupt_exits_130_without_a_traceback() -> None:
    # A job that a shell started in the background inherits "ignore", and Python keeps it.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from fusewright.serve.cli import main; print('up', flush=True); "
    process = subprocess.Popen(
        [sys.executable, "-c", code + "sys.exit(main(['run', '--prompts-file', '-']))"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "up\n"
    # It reads standard input, which stays open: only the signal can end it.
    process.stdin.write("1+1=\n")
    process.stdin.flush()
    wait_until_read(process.stdin.fileno())
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=300) == 130
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()


def wait_until_read(pipe: int) -> None:
    """Until the other side has read all that is in a pipe (Linux)."""

    def is_empty() -> bool:
        left = array("i", [0])
        fcntl.ioctl(pipe, termios.FIONREAD, left)
        return left[0] == 0

    wait_for(is_empty)


SCRIPT = Path(sys.executable).with_name("fusewright")


@pytest.mark.parametrize(
    "program",
    [
        [sys.executable, "-m", "fusewright.serve.cli"],
        pytest.param(
            [str(SCRIPT)],
            marks=pytest.mark.skipif(not SCRIPT.exists(), reason="fusewright is not installed"),
        ),
    ],
    ids=["-m", "script"],
)
def test_the_exit_code_reaches_the_shell(program: list[str]) -> None:
    done = subprocess.run([*program, "run"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


# explain, env


def test_explain_levels_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--levels"]) == 0
    _, summaries, _, switches = capsys.readouterr().out.split("\n\n")
    for line, (number, level) in zip(summaries.splitlines(), LEVELS.items(), strict=True):
        assert line == f"-O{number}  {level.summary}"
    heading, _, *lines = switches.splitlines()
    assert heading.split() == [f"-O{number}" for number in LEVELS]
    cells = {name: row for name, *row in (re.split(r"  +", line) for line in lines)}
    assert cells["CUDA graphs"] == [level.cudagraph_mode.value for level in LEVELS.values()]
    assert cells["tuned"] == ["yes" if level.tune else "-" for level in LEVELS.values()]
    for name in PASSES:
        for cell, level in zip(cells[name], LEVELS.values(), strict=True):
            assert (cell == "yes") == (name in level.passes)


def test_env_reports_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["fusewright"].startswith(__version__)
    assert facts["python"].startswith(".".join(map(str, sys.version_info[:3])))
    import torch

    assert facts["torch"] == torch.__version__
    assert (facts["GPU"] == "none") == (not torch.cuda.is_available())
    assert {"git", "OS", "CPU", "memory", "driver", "nvcc", "environment"} <= set(facts)
    assert all(value for value in facts.values())


def test_env_names_our_environment_variables_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE", "/c")
    monkeypatch.setenv("HF_TOKEN", "a secret")
    environment = collect()["environment"]
    assert "FUSEWRIGHT_CACHE=/c" in environment
    assert "secret" not in environment


def test_env_works_without_torch() -> None:
    # A finder that refuses torch is what an environment without it looks like to `import`.
    done = python(
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': raise ModuleNotFoundError(\"No module named 'torch'\")\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from fusewright.serve.cli import main\n"
        "sys.exit(main(['env']))",
        env={**os.environ, "PATH": "/nonexistent"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "cannot be imported: ModuleNotFoundError: No module named 'torch'" in done.stdout
