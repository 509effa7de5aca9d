"""Shows that PyTorch is imported, which this module does not do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .worker.progress import show_progress


@contextmanager
def importing() -> Iterator[None]:
    """Show that libraries are imported: it takes ten seconds where none of their files is in memory
    yet."""
    with show_progress() as progress, progress.status("Importing") as say:
        say("PyTorch")
        yield
