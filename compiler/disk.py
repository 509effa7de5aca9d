"""Bytes on disk, for the store: durable writes, ownership, and locks that die with their holder.

Every file written here is 0644 and every folder 0755, whatever the umask.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FILE_MODE = 0o644
_FOLDER_MODE = 0o755


def distrust(info: os.stat_result) -> str | None:
    """Why somebody else could have written a file or folder (of ``lstat``); None if nobody could:
    it belongs to this user or to root, and no group and no other user may write it."""
    mode, user = info.st_mode, os.geteuid()
    if stat.S_ISLNK(mode):
        return "is a symbolic link, expected a file or folder"
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        return "is neither a file nor a folder"
    if info.st_uid not in (0, user):
        return f"belongs to uid {info.st_uid}, expected {user}" + (" or 0" if user else "")
    if mode & 0o022:
        return f"may be written by others (mode {stat.S_IMODE(mode):04o})"
    return None


def walk(folder: Path, prefix: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Everything below a folder, in order: name with ``/`` and its ``lstat``.

    Raises:
        OSError: the folder cannot be listed.
    """
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            info = entry.stat(follow_symlinks=False)
            yield prefix + entry.name, info
            if stat.S_ISDIR(info.st_mode):
                yield from walk(folder / entry.name, f"{prefix}{entry.name}/")


def read_file(path: Path, limit_bytes: int) -> bytes:
    """A regular file of at most ``limit_bytes``.

    Raises:
        OSError: it is missing, unreadable, larger, a symbolic link or no regular file.
    """
    # O_NONBLOCK: opening a FIFO that was put in a file's place must not wait for its writer.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if info.st_size > limit_bytes:
            reason = f"{info.st_size} bytes, expected at most {limit_bytes}"
            raise OSError(errno.EFBIG, reason, str(path))
        return file.read(limit_bytes + 1)


def write_file(path: Path, data: bytes) -> None:
    """A new file, on the disk when this returns.

    Raises:
        OSError: it exists or cannot be written.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, _FILE_MODE)
        file.write(data)
        file.flush()
        os.fsync(fd)


def replace_file(path: Path, data: bytes, partial: Path) -> None:
    """Write a file by way of ``partial`` on the same file system: readers see old or new."""
    partial.unlink(missing_ok=True)
    try:
        write_file(partial, data)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """A folder in an existing one; nothing when it is there."""
    try:
        path.mkdir(_FOLDER_MODE)
    except FileExistsError:
        return
    path.chmod(_FOLDER_MODE)


def sync_folder(path: Path) -> None:
    """Have the names in a folder on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems without it
            raise
    finally:
        os.close(fd)


def remove_tree(path: Path) -> None:
    """Remove a file, a link or a folder with all below it, as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


@contextmanager
def held(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[bool]:
    """Hold the lock that is ``path``; the kernel releases it when this process dies.

    Args:
        on_wait: told once before waiting for another holder; without it there is no waiting.

    Yields:
        whether the lock is held: False only without ``on_wait``.
    """
    fd = _acquire(path, on_wait)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            # Closing alone would leave it to forked children that share the descriptor.
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


def _acquire(path: Path, on_wait: Callable[[], None] | None) -> int | None:
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, _FILE_MODE)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if on_wait is None:
                    os.close(fd)
                    return None
                on_wait()
                fcntl.flock(fd, fcntl.LOCK_EX)
            # Its holder may have deleted it, and another made it anew, while this one waited.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), path.lstat()):
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
