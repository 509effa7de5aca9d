"""Shows the progress of a start on stderr, if that is a terminal.

Threads may show their bars and spinners at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any


class Progress:
    """Bars and spinners of one display, or nothing.

    Args:
        display: a started ``rich.progress.Progress``; None shows nothing.
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
def show_progress() -> Iterator[Progress]:
    """The display of one start."""
    if not sys.stderr.isatty():
        yield Progress()
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
