"""A build shows its graphs and files to a ``Record``; ``inspect/dump.py`` writes them down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .capture.trace import Traced


class Record:
    """This one keeps nothing of the graphs and files that it is shown; subclasses do."""

    def graph(self, title: str, traced: Traced) -> None:
        """Called after a phase with its graph, which later phases change in place."""

    def write(self, files: Mapping[str, bytes], label: str) -> None:
        """Called at the end with the artifact's files, by name, and its label."""
