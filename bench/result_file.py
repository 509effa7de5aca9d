"""Reads what a bench wrote with --output: one JSON object, or one object a line (.jsonl)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..config import UserError

T = TypeVar("T")
Record = dict[str, Any]


def read_result(path: Path, commands: str, parse: Callable[[Record], T]) -> T:
    """Read a result and parse it.

    Args:
        commands: whose result it should be, for the error.

    Raises:
        UserError: it cannot be read, or ``parse`` does not find what it looks for.
    """
    return read_results(path, commands, lambda records: parse(records[0]))


def read_results(path: Path, commands: str, parse: Callable[[list[Record]], T]) -> T:
    """Read and parse the object of a .json file, or all objects of a .jsonl file.

    Raises:
        UserError: as ``read_result``.
    """
    try:
        text = path.read_text()
        lines = text.splitlines() if path.suffix == ".jsonl" else [text]
        return parse([json.loads(line) for line in lines])
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        why = "its values have other types"
        if isinstance(error, KeyError | ValueError):
            why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"{path} is not a result of `fusewright {commands}` with --output: {why}"
        ) from error
