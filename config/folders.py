"""Folders: where the user's files are kept, and one that an option names for results, which is made
before the work that they come from."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryFile

from .errors import UserError


def user_path() -> Path | None:
    """The user's own store: ``$FUSEWRIGHT_CACHE_DIR``, or ``fusewright`` in ``$XDG_CACHE_HOME``
    or ``~/.cache``; None for a user without a home.  The one place that reads these variables."""
    if folder := os.environ.get("FUSEWRIGHT_CACHE_DIR"):
        return Path(folder)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        return cache.expanduser() / "fusewright"
    except RuntimeError:
        return None


def make_output_folder(option: str, folder: Path) -> None:
    """Make a folder with its parents, unless it is there.

    Raises:
        UserError: it cannot be made, or no file can be written to it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(
            f"{option}={folder}: {error.strerror}; give a folder to write to"
        ) from error
