"""What a command shows of work that takes more than ten seconds, as it may on a busy machine."""

from __future__ import annotations

import re
from collections.abc import Sequence


def is_progress(lines: Sequence[str]) -> bool:
    """Whether all of these are lines of progress, on a stderr that is no terminal."""
    return all(line == "starting" or re.fullmatch(r"\w.* \(\d+ s\)", line) for line in lines)


def without_progress(err: str) -> str:
    """``err`` without such lines."""
    lines = err.splitlines(keepends=True)
    return "".join(line for line in lines if not is_progress([line.rstrip("\n")]))
