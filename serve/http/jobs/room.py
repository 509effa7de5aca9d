"""``Room`` counts the outputs that wait, and refuses calls when they are too many."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

_CALLS_THAT_FILL = 8


class Room:
    """The outputs of calls that wait, or are about to.

    Of one call at most a share counts: thousands of outputs that one caller asks for must not keep
    all others out.

    Args:
        max_waiting: outputs that may wait.
    """

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self._share = max(max_waiting // _CALLS_THAT_FILL, 1)
        self._num_preparing = 0
        self._large: dict[str, tuple[Collection[str], int]] = {}
        """The calls of more outputs than a share: their open requests, and the outputs of each."""

    def num_counted(self, num_open: int) -> int:
        """How many outputs count.

        Args:
            num_open: outputs of open jobs that have not ended.
        """
        opened = (len(requests) * num_outputs for requests, num_outputs in self._large.values())
        beyond = sum(max(count - self._share, 0) for count in opened)
        return max(num_open - beyond, 0) + self._num_preparing

    @contextmanager
    def preparing(self, num_outputs: int) -> Iterator[None]:
        """Count the outputs of a call while its prompts are made and encoded."""
        counted = min(num_outputs, self._share)
        self._num_preparing += counted
        try:
            yield
        finally:
            self._num_preparing -= counted

    def open(self, name: str, requests: Collection[str], num_outputs: int) -> None:
        """Note a call whose requests are queued.

        Args:
            requests: those that are open, now and later.
            num_outputs: outputs of each request.
        """
        if len(requests) * num_outputs > self._share:
            self._large[name] = requests, num_outputs

    def close(self, name: str) -> None:
        self._large.pop(name, None)
