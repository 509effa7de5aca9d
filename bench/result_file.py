"""Reading what a bench wrote with --output."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..config import UserError

T = TypeVar("T")


def read_result(path: Path, benches: str, parse: Callable[[dict[str, Any]], T]) -> T:
    """What ``parse`` makes of a result.

    Args:
        benches: whose result it should be, for the error.

    Raises:
        UserError: it cannot be read, or ``parse`` does not find what it looks for.
    """
    try:
        return parse(json.loads(path.read_text()))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(
            f"{path} is not a result of `fusewright bench {benches}` with --output: {error!r}"
        ) from error
