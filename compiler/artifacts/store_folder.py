"""One store's folder: how artifacts come into it and leave it, never half of one.

artifacts/<key>/    the artifacts, whole at every moment: they are renamed into place
locks/<key>.lock    held while a key is compiled
used/<key>          its time is the last use
tmp/                what is being written or thrown away
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...config import UserError
from . import disk
from .archive import ARTIFACTS
from .artifact import DIGEST

LOCKS, USED, TMP = "locks", "used", "tmp"
TRUST_REMEDY = "if you trust its content, chown it to yourself and chmod go-w; else delete it"
_OBJECT = re.compile(r"([0-9a-f]{2})/\1[0-9a-f]{62}")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class StoreError(UserError):
    """A store cannot be written."""


def prepare(root: Path) -> None:
    """Make a store's folders where they are missing.

    Raises:
        StoreError: they cannot be made, or others may write them.
    """
    with writing(root):
        root.parent.mkdir(parents=True, exist_ok=True)
        for folder in (root, *(root / n for n in (ARTIFACTS, LOCKS, USED, TMP))):
            disk.make_folder(folder)
            if reason := disk.distrust(info := folder.lstat()):
                raise StoreError(f"{folder}: {reason}; {TRUST_REMEDY}")
            if not stat.S_ISDIR(info.st_mode):
                remedy = "name a folder" if folder == root else "delete it"
                raise StoreError(f"{folder}: is a file, expected a folder; {remedy}")


def lock_path(root: Path, digest: str) -> Path:
    return root / LOCKS / f"{digest}.lock"


def folders(root: Path) -> list[Path]:
    """The artifacts of a store; none when it is missing or cannot be listed."""
    try:
        paths = sorted((root / ARTIFACTS).iterdir())
    except OSError:
        return []
    return [path for path in paths if DIGEST.fullmatch(path.name)]


def last_use(root: Path, path: Path) -> float:
    """Unix time of an artifact's last use, or else of its making."""
    for place in (root / USED / path.name, path):
        with suppress(OSError):
            return place.lstat().st_mtime
    return 0.0


def touch(root: Path, digest: str) -> None:
    """Note the use, where there is a folder for it; a read-only store has or needs none."""
    mark = root / USED / digest
    with suppress(OSError):
        if mark.parent.is_dir():
            os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644))
            os.utime(mark)


@contextmanager
def writing(root: Path) -> Iterator[None]:
    """Turn an OSError into a StoreError that names the path and the remedy."""
    try:
        yield
    except OSError as error:
        where = os.fsdecode(error.filename or root)
        remedy = "give another --compile-cache-dir"
        if error.errno in _FULL:
            remedy = f"free space (`fusewright cache prune`) or {remedy}"
        raise StoreError(
            f"{where}: the artifact store cannot be written: {error.strerror}; {remedy}"
        ) from error


@contextmanager
def staging(root: Path) -> Iterator[Path]:
    """A folder in ``tmp/`` that is this process's own while its lock is held."""
    while True:
        folder = root / TMP / os.urandom(8).hex()
        lock = folder.with_suffix(".lock")
        with disk.held(lock) as ours:
            if not ours:  # taken for a stale one between its making and its locking
                continue
            try:
                disk.make_folder(folder)
                yield folder
                return
            finally:
                disk.remove_tree(folder)
                disk.remove_tree(lock)


def remove_stale(root: Path) -> None:
    """Remove what killed processes left in ``tmp/``: the locks that can be taken."""
    for lock in sorted((root / TMP).glob("*.lock")):
        with disk.held(lock) as dead:
            if dead:
                disk.remove_tree(lock.with_suffix(""))
                disk.remove_tree(lock)


def num_bytes(path: Path) -> int:
    """Sizes of an artifact's files, as far as it can be listed."""
    total = 0
    with suppress(OSError):
        for _, info in disk.walk(path):
            total += info.st_size if stat.S_ISREG(info.st_mode) else 0
    return total


def remove_objects(root: Path) -> None:
    """Remove ``objects/ab/<sha256>``: older versions kept a hard link to every artifact's file
    there, and these links would hold the space of artifacts that are pruned."""
    objects = root / "objects"
    with suppress(OSError):
        for folder in [] if disk.distrust(objects.lstat()) else objects.iterdir():
            with suppress(OSError):
                for path in [] if disk.distrust(folder.lstat()) else folder.iterdir():
                    if _OBJECT.fullmatch(f"{folder.name}/{path.name}"):
                        path.unlink()
                folder.rmdir()
        objects.rmdir()


def prune(
    root: Path,
    aside: Path,
    max_bytes: int | None,
    unused_since: float | None = None,
    keep: str | None = None,
) -> list[str]:
    """Move artifacts to ``aside``, but not that of key ``keep``: see ``Store.prune()``."""
    sizes = {path: num_bytes(path) for path in folders(root)}
    left_bytes = sum(sizes.values())
    removed = []
    for path in sorted(sizes, key=lambda path: last_use(root, path)):
        too_much = max_bytes is not None and left_bytes > max_bytes
        too_old = unused_since is not None and last_use(root, path) < unused_since
        if path.name == keep or not (too_much or too_old):
            continue
        lock = lock_path(root, path.name)
        with disk.held(lock) as free:
            if free:
                with suppress(FileNotFoundError):  # another process was faster
                    path.rename(aside / path.name)
                    removed.append(path.name)
                disk.remove_tree(root / USED / path.name)
                disk.remove_tree(lock)
                left_bytes -= sizes[path]
    remove_objects(root)
    return removed
