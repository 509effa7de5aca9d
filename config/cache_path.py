"""Says where the files of this user are kept; the one place that reads the environment for it."""

from __future__ import annotations

import os
from pathlib import Path


def user_path() -> Path | None:
    """The user's own store: ``$FUSEWRIGHT_CACHE_DIR``, or ``fusewright`` in ``$XDG_CACHE_HOME``
    or ``~/.cache``; None for a user without a home."""
    if folder := os.environ.get("FUSEWRIGHT_CACHE_DIR"):
        return Path(folder)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    try:
        return cache.expanduser() / "fusewright"
    except RuntimeError:
        return None
