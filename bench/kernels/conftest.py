"""Before the benchmarks that were chosen everything is compiled; while they run, a bar shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ...engine.worker.progress import show_progress
from ...ops import KERNELS
from .figures import add, figure_of
from .fusion import InductorFusion, precompile_fusions
from .harness import OURS, this_sm


class FigureWriter:
    """A plugin: writes down each figure, and advances a bar, so that pytest need not list them."""

    def __init__(self, path: Path | None, advance: Callable[[int], None]) -> None:
        self._path, self._advance = path, advance

    def pytest_runtest_teardown(self, item: Any) -> None:
        benchmark = item.funcargs.get("benchmark")
        if self._path is not None and benchmark is not None and benchmark.stats is not None:
            add(self._path, figure_of(benchmark.extra_info, benchmark.stats.stats.data))

    def pytest_runtest_logfinish(self) -> None:
        self._advance(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--figures", type=Path, help="Append each figure to this file.")


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: Any) -> Iterator[None]:
    config = session.config
    with show_progress() as progress:
        if torch.cuda.is_available() and not config.option.collectonly:
            with progress.status("compiling") as say:
                _compile([item.callspec.params for item in session.items], say)
        with progress.bar("measuring", len(session.items)) as advance:
            config.pluginmanager.register(FigureWriter(config.option.figures, advance))
            return (yield)


def _compile(chosen: list[dict[str, Any]], say: Callable[[str], None]) -> None:
    say("Inductor's fusions")
    libraries = [params["work"].libraries.get(params["contender"]) for params in chosen]
    precompile_fusions(library for library in libraries if isinstance(library, InductorFusion))
    say("kernels")
    works = dict.fromkeys(p["work"] for p in chosen if p["contender"] == OURS)
    KERNELS.precompile([v for work in works for v in work.variants(this_sm())], this_sm())


def pytest_report_teststatus(report: Any) -> tuple[str, str, str] | None:
    """Print no letter for passed and skipped tests, since the progress bar counts them."""
    silent = report.skipped or (report.passed and report.when == "call")
    return (report.outcome, "", "") if silent else None
