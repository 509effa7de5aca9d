"""Says where artifacts are looked for."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ...config.folders import user_path

_BAKED = "/opt/fusewright/artifacts"


def baked_path() -> Path:
    """The store of a container image or system: ``$FUSEWRIGHT_BAKED_DIR``, or a folder in /opt."""
    return Path(os.environ.get("FUSEWRIGHT_BAKED_DIR") or _BAKED)


def default_search_paths() -> tuple[Path, ...]:
    """The baked store, then the user's."""
    user = user_path()
    return (baked_path(), user) if user else (baked_path(),)


def named_folders(asked: Iterable[str]) -> list[Path]:
    """The folders of ``--compile-cache-dir``, each item a folder or several with colons between.
    Commas are the command line's, for this list as for all others."""
    return [Path(name).expanduser() for item in asked for name in item.split(":") if name]


def search_paths(asked: Iterable[str] = ()) -> tuple[tuple[Path, ...], Path | None]:
    """The stores to search, in order, and the one that new artifacts go to.

    Args:
        asked: as ``named_folders`` takes them, in place of the user's store; new artifacts go to
            the first.
    """
    if folders := named_folders(asked):
        return (baked_path(), *folders), folders[0]
    return default_search_paths(), user_path()
