"""Says where artifacts are looked for; the one place that reads the environment for it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_BAKED = "/opt/fusewright/artifacts"


def baked_path() -> Path:
    """The store of a container image or system: ``$FUSEWRIGHT_BAKED_DIR``, or a folder in /opt."""
    return Path(os.environ.get("FUSEWRIGHT_BAKED_DIR") or _BAKED)


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


def default_search_paths() -> tuple[Path, ...]:
    """The baked store, then the user's."""
    user = user_path()
    return (baked_path(), user) if user else (baked_path(),)


def search_paths(asked: Iterable[str] = ()) -> tuple[tuple[Path, ...], Path | None]:
    """The stores to search, in order, and the one that new artifacts go to.

    Args:
        given: folders, or lists of folders with colons, in place of the user's store; new artifacts
            go to the first.  Commas are the command line's, for this list as for all others.
    """
    folders = [Path(name).expanduser() for item in asked for name in item.split(":") if name]
    if folders:
        return (baked_path(), *folders), folders[0]
    return default_search_paths(), user_path()
