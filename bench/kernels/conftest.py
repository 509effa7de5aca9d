"""Before the benchmarks that were chosen everything is compiled; while they run, a bar shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ...engine.progress import show_progress
from ...ops import KERNELS
from .fusion import Fusion, compile_ahead
from .harness import Work, this_sm


class Bar:
    """A plugin: advances a bar with every benchmark, which pytest then need not list."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self._advance = advance

    def pytest_runtest_logfinish(self) -> None:
        self._advance(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: Any) -> Iterator[None]:
    with show_progress() as progress:
        if torch.cuda.is_available() and not session.config.option.collectonly:
            with progress.status("compiling") as say:
                _compile([item.callspec.params["work"] for item in session.items], say)
        with progress.bar("measuring", len(session.items)) as advance:
            session.config.pluginmanager.register(Bar(advance))
            return (yield)


def _compile(works: list[Work], say: Callable[[str], None]) -> None:
    say("Inductor's fusions")
    compile_ahead(w.op for w in works if any(isinstance(f, Fusion) for f in w.libraries.values()))
    say("kernels")
    wanted = [v for work in dict.fromkeys(works) for v in work.variants(this_sm())]
    KERNELS.precompile(wanted, this_sm())


def pytest_report_teststatus(report: Any) -> tuple[str, str, str] | None:
    """No letter for what passed or was skipped: the bar tells."""
    silent = report.skipped or (report.passed and report.when == "call")
    return (report.outcome, "", "") if silent else None
