"""The bar of ``LLM.generate``."""

from __future__ import annotations

from threading import Lock
from typing import Any

_one_display = Lock()


class GenerateBar:
    """Shows finished requests and tokens a second, on stderr.  Importing what draws it takes 15 ms,
    in which no step would run: without a bar nothing is imported.  A terminal has room for one: of
    calls at once, the first shows its own."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._num_tokens = 0
        self._progress: Any = None
        if not enabled or not _one_display.acquire(blocking=False):
            return
        from rich import progress
        from rich.console import Console

        self._progress = progress.Progress(
            progress.TextColumn("generating"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.fields[rate]}"),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("generating", total=total, rate="")

    def __enter__(self) -> GenerateBar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
            _one_display.release()

    def advance(self, num_tokens: int) -> None:
        if self._progress is None:
            return
        self._num_tokens += num_tokens
        elapsed = self._progress.tasks[0].elapsed or 0.0
        rate = f"{self._num_tokens / elapsed:.0f} tokens/s" if elapsed > 0 else ""
        self._progress.update(self._task, advance=1, rate=rate)
