"""The display of a start: bars on a terminal, side by side; in a pipe, lines of a log."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys

import pytest

from fusewright.bench.serving import run
from fusewright.bench.workloads import equal
from fusewright.compiler.compiled import LOOKUPS
from fusewright.config.process.logs import be_quiet
from fusewright.engine.frontend.outputs import RequestOutput
from fusewright.engine.importing import importing
from fusewright.engine.llm import LLM
from fusewright.engine.worker import progress as progress_module
from fusewright.engine.worker.progress import show_progress
from tests.serve.server_process import wait_for

from .toy import Setup


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stderr", [Terminal(), io.StringIO()])
def test_bars_and_spinners_show_on_a_terminal_only(
    stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stderr)
    with show_progress() as progress:
        with progress.bar("Loading weights", 100) as advance, progress.status("Compiling") as say:
            advance(50)
            say("trace")
            if stderr.isatty():
                assert progress._display is not None
                progress._display.refresh()
        with progress.bar("nothing", 0) as advance:
            advance(0)
    text = stderr.getvalue()
    assert ("Loading weights" in text) == stderr.isatty()
    assert ("50%" in text and "Compiling: trace" in text) == stderr.isatty()
    assert bool(text) == stderr.isatty()


def test_a_spinner_shows_with_the_first_phase_that_is_not_quiet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    told = []
    for phases in (["find artifact", "load"], ["find artifact", "trace", "load"]):
        stderr = Terminal()
        monkeypatch.setattr(sys, "stderr", stderr)
        with show_progress() as progress, progress.status("Compiling", quiet=LOOKUPS) as say:
            for phase in phases:
                say(phase)
                assert progress._display is not None
                progress._display.refresh()
        told.append(stderr.getvalue())
    assert "Compiling" not in told[0]
    assert "Compiling: trace" in told[1]
    assert "Compiling: load" in told[1]


def test_in_a_pipe_long_work_has_a_line_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, said: list[logging.LogRecord]
) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    be_quiet()
    with show_progress() as progress, progress.bar("Loading weights", 100) as advance:
        advance(50)
    assert not said
    monkeypatch.setattr(progress_module, "_EVERY_S", 0.01)
    with show_progress() as progress:
        wait_for(lambda: said)
        with (
            progress.bar("Loading weights", 100) as advance,
            progress.status("Compiling", quiet=LOOKUPS) as say,
        ):
            advance(50)
            say("load")
            say("trace")
            # Lines may come before this is reached, and say less.
            told = re.compile(r"Loading weights 50% \(\d+ s\), Compiling: trace \(\d+ s\)")
            wait_for(lambda: any(told.fullmatch(record.getMessage()) for record in said))
            # A command shows it although it logs nothing.
            wait_for(lambda: any(map(told.fullmatch, stderr.getvalue().splitlines())))


@pytest.mark.parametrize("stderr", [Terminal(), io.StringIO()], ids=["terminal", "pipe"])
def test_what_is_measured_has_lines_alone(
    stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch, said: list[logging.LogRecord]
) -> None:
    """Bars that move would take processor time from what is measured."""
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(progress_module, "_EVERY_S", 0.01)
    llm = LLM.from_engine(Setup().engine())
    step = llm.engine.step

    def is_told() -> bool:
        return any(record.getMessage().startswith("Measuring: requests 0%") for record in said)

    def slow_step() -> list[RequestOutput]:
        wait_for(is_told)
        return step()

    monkeypatch.setattr(llm.engine, "step", slow_step)
    run(llm.engine, equal(4, 5, 3, llm.engine.inputs.vocab_size))
    assert is_told()
    assert "\x1b" not in stderr.getvalue()


def test_an_import_shows_what_takes_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    with importing():
        wait_for(lambda: "Importing: PyTorch" in stderr.getvalue())


def test_the_display_imports_no_torch() -> None:
    code = "import sys, fusewright.engine.importing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code]).returncode == 0
