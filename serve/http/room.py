"""``Room`` counts the outputs that wait, and refuses calls when they are too many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .state import Job

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
        self._large: dict[str, Job] = {}

    def num_counted(self, num_open: int) -> int:
        """How many outputs count.

        Args:
            num_open: outputs of open jobs that have not ended.
        """
        opened = (len(job.stream.open) * job.num_outputs for job in self._large.values())
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

    def open(self, job: Job) -> None:
        """Note a job whose requests are queued."""
        if len(job.requests) * job.num_outputs > self._share:
            self._large[job.name] = job

    def close(self, job: Job) -> None:
        """Forget a job that has ended."""
        self._large.pop(job.name, None)
