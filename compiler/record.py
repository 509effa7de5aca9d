"""What a build shows of itself while it runs.  ``inspect/dump.py`` writes it down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .capture.trace import Traced


class Record:
    """Is shown the graph after each phase, and the files in the end; keeps nothing of either."""

    def graph(self, title: str, traced: Traced) -> None:
        """The graph in its present state: later phases change it in place."""

    def write(self, files: Mapping[str, bytes], label: str) -> None:
        """The artifact's files, and what it is."""
