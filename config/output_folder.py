"""Makes the folder that an option names for results, before the work that they come from."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile

from .errors import UserError


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
