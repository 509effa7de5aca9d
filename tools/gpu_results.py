"""A pytest plugin that keeps the outcome of each test: `pytest -p gpu_results --results FILE`.

A run that is cut off, as on a machine that is lent for a limited time, then goes on where it was:
tests that passed or were skipped according to FILE are left out. A second FILE gets the same lines.
Why a test failed is in FILE.failed.txt as soon as it has: pytest's own account comes last.
With xdist the workers leave tests out, and the process that gathers their reports writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpu_stamp import outcomes

_WORST_LAST = ("passed", "skipped", "failed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", action="append", type=Path, default=[], metavar="FILE")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Keeper(config.getoption("results")), "gpu_results keeper")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        done = {*config.workerinput["done"]}
    else:
        done = config.pluginmanager.get_plugin("gpu_results keeper").done
    if found := [item for item in items if item.nodeid in done]:
        config.hook.pytest_deselected(items=found)
        items[:] = [item for item in items if item.nodeid not in done]


class Keeper:
    """Knows which tests had ended before, and appends a line to each file when one ends."""

    def __init__(self, files: list[Path]) -> None:
        self.done = {test for test, how in outcomes(files[0]).items() if how != "failed"}
        self._files, self._worst = files, dict[str, str]()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker of xdist.  One that takes the place of another must find the same tests, so
        it does not read the files."""
        node.workerinput["done"] = sorted(self.done)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called after a test's setup, its call and its teardown, which is always the last; xdist
        has one report, of neither, where a worker crashed."""
        if report.failed:
            for file in self._files:
                with file.with_name(f"{file.name}.failed.txt").open("a") as end:
                    end.write(f"=== {report.nodeid} ({report.when})\n{report.longreprtext}\n")
        worst = max(self._worst.pop(report.nodeid, "passed"), report.outcome, key=_WORST_LAST.index)
        if report.when in ("setup", "call"):
            self._worst[report.nodeid] = worst
            return
        for file in self._files:
            with file.open("a") as end:
                end.write(json.dumps([report.nodeid, worst]) + "\n")
