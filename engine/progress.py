"""Progress of a start, on stderr and only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def status(label: str) -> Iterator[Callable[[str], None]]:
    """A spinner for work of unknown length; yields what names the phase it is in."""
    if not sys.stderr.isatty():
        yield lambda phase: None
        return
    from rich.console import Console

    with Console(stderr=True).status(label) as spinner:
        yield lambda phase: spinner.update(f"{label}: {phase}")


@contextmanager
def track(label: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar of ``total`` units that vanishes at the end; yields what advances it by one."""
    if not sys.stderr.isatty() or total == 0:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (label, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
