"""Shows the progress of a start or a measurement: bars on stderr if that is a terminal, and else a
line in the log whenever ten seconds have passed.

Threads may show their bars and spinners at once.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from threading import Event, Thread
from typing import Any

from ...config.process.logs import PROGRESS

_log = logging.getLogger(PROGRESS)
_EVERY_S = 10.0


class Progress:
    """Bars and spinners of one display, or nothing.

    Args:
        display: a started ``rich.progress.Progress``, or ``_Lines``; None shows nothing.
    """

    def __init__(self, display: Any = None) -> None:
        self._display = display

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar of ``total`` units that vanishes at the end; yields what advances it."""
        if self._display is None or total == 0:
            yield lambda count: None
            return
        task = self._display.add_task(label, total=total)
        yield lambda count: self._display.advance(task, count)
        self._display.remove_task(task)

    @contextmanager
    def status(self, label: str, quiet: Collection[str] = ()) -> Iterator[Callable[[str], None]]:
        """A spinner for work of unknown length; yields what names the phase it is in.

        Args:
            quiet: phases that alone do not show it.
        """
        if self._display is None:
            yield lambda phase: None
            return
        task = self._display.add_task(label, total=None, visible=False)

        def say(phase: str) -> None:
            text = f"{label}: {phase}"
            self._display.update(task, description=text, visible=phase not in quiet or None)

        yield say
        self._display.remove_task(task)


@contextmanager
def show_progress(*, draws: bool = True) -> Iterator[Progress]:
    """The display of one start, or of one measurement.

    Args:
        draws: on a terminal show bars, which move ten times a second; a measurement shall not
            share its processor with them.
    """
    if not (draws and sys.stderr.isatty()):
        with _lines() as lines:
            yield Progress(lines)
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.SpinnerColumn(),
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TimeElapsedColumn(),
    )
    # What is printed meanwhile goes where it is printed to, and not to stderr.
    console = Console(stderr=True)
    show = progress.Progress(*columns, console=console, transient=True, redirect_stdout=False)
    with show as display:
        yield Progress(display)


@dataclass
class _Task:
    description: str
    total: int | None
    visible: bool | None
    done: int = 0
    began_s: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        share = f" {self.done / self.total:.0%}" if self.total else ""
        return f"{self.description}{share} ({time.monotonic() - self.began_s:.0f} s)"


class _Lines:
    """Takes the calls of a ``rich.progress.Progress``, and logs what goes on."""

    def __init__(self) -> None:
        self._tasks: dict[int, _Task] = {}
        self._numbers = count()

    def add_task(self, description: str, *, total: int | None, visible: bool = True) -> int:
        number = next(self._numbers)
        self._tasks[number] = _Task(description, total, visible)
        return number

    def update(self, number: int, *, description: str, visible: bool | None) -> None:
        task = self._tasks[number]
        task.description = description
        task.visible = task.visible if visible is None else visible

    def advance(self, number: int, count: int) -> None:
        self._tasks[number].done += count

    def remove_task(self, number: int) -> None:
        with suppress(KeyError):
            del self._tasks[number]

    def write(self) -> None:
        shown = [str(task) for task in list(self._tasks.values()) if task.visible]
        _log.info("%s", ", ".join(shown) or "starting")


@contextmanager
def _lines() -> Iterator[_Lines]:
    lines, done = _Lines(), Event()

    def run() -> None:
        while not done.wait(_EVERY_S):
            lines.write()

    thread = Thread(target=run, name="progress", daemon=True)
    thread.start()
    try:
        yield lines
    finally:
        done.set()
        thread.join()
