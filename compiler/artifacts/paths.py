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
