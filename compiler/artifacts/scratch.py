"""Makes folders in TMPDIR that do not outlive their process by long: the folder of a killed process
is removed by the next one that needs such a folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ...config import UserError
from . import disk

_PREFIX = "fusewright-"
_LOCK = "in_use.lock"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """An empty folder inside one that is this process's own while its lock is held.

    Raises:
        UserError: none can be made.
    """
    _remove_stale()
    while True:
        try:
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        except OSError as error:
            raise UserError(
                f"{os.environ.get('TMPDIR', '/tmp')}: no temporary folder can be made: "
                f"{error.strerror}; free space, or set TMPDIR to a folder that can be written"
            ) from error
        with ExitStack() as stack:
            stack.callback(disk.remove_tree, folder)
            try:
                ours = stack.enter_context(disk.held(folder / _LOCK))
            except FileNotFoundError:
                ours = False
            if ours:  # else taken for a stale one between its making and its locking
                inner = folder / "content"
                disk.make_folder(inner)
                yield inner
                return


def _remove_stale() -> None:
    """Remove the folders of this user whose lock can be taken: their process is dead."""
    with suppress(OSError):
        for folder in sorted(Path(tempfile.gettempdir()).glob(_PREFIX + "*")):
            with suppress(OSError):
                lock = folder / _LOCK
                if disk.distrust(folder.lstat()) or not lock.is_file():
                    continue
                with disk.held(lock) as dead:
                    if dead:
                        disk.remove_tree(folder)
