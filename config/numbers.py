"""Numbers that would measure nothing, or never end."""

from __future__ import annotations

import math

from .errors import UserError

MOST_COUNT = 10**7
"""Most tokens or repeats of a measurement: a larger number is a slip."""
MOST_REQUESTS = 100_000
"""Most requests of one measurement: more is a slip, and making their prompts would take minutes."""


def check_counts(least: int, most: int = MOST_COUNT, **values: int) -> None:
    """Refuse counts that measure nothing or never end.

    Raises:
        UserError: names the option.
    """
    for name, value in values.items():
        if value < least:
            raise UserError(f"{name}={value}: expected at least {least}")
        if value > most:
            raise UserError(f"{name}={value}: expected at most {most}")


def check_number(**values: float) -> None:
    """Refuse a share or a tolerance that is not a finite number above 0.

    Raises:
        UserError: names the option.
    """
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise UserError(f"{name}={value}: expected a number above 0")
