"""Measures how long each phase takes, and reports what it does meanwhile."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Timer:
    """Measures the seconds of each phase, in order, and tells ``say`` the name of each."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.say(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def share(self, done: int, total: int) -> None:
        """Say how much of the running phase is done, as "measure 3 of 12"."""
        self.say(f"measure {done + 1} of {total}")

    def count(self, what: str, total: int) -> Callable[[Any], None]:
        """A function that says "kernel 3 of 12" and so on, one for each call, from any thread."""
        numbers = itertools.count(1)
        return lambda item: self.say(f"{what} {next(numbers)} of {total}")
