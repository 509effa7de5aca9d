"""Starts the processes of the other ranks before rank 0 imports torch: all import it at once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from ...config import EngineOptions
from .link import Link
from .torchrun import Torchrun


class SpawnedRanks:
    """Processes that wait to be told which rank they are, from rank 1 on.

    The kernel ends a rank with the thread that started it (``lifetime.end_with``), so that thread
    lives as long as they do.
    """

    def __init__(self, count: int) -> None:
        self._count, self._started, self._over = count, Event(), Event()
        self._processes: list[tuple[subprocess.Popen[bytes], Link]] = []
        self._error: BaseException | None = None
        Thread(target=self._hold, name="spawned ranks", daemon=True).start()

    def _hold(self) -> None:
        try:
            for _ in range(self._count):
                self._processes.append(_spawn())
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()
        self._over.wait()

    def processes(self) -> list[tuple[subprocess.Popen[bytes], Link]]:
        """Each rank's process and rank 0's end of its socket.

        Raises:
            OSError: a process could not be started.
        """
        self._started.wait()
        if self._error is not None:
            raise self._error
        return self._processes

    def close(self) -> None:
        """End those that still run."""
        self._started.wait()
        for process, link in self._processes:
            process.kill()
            process.wait()
            link.close()
        self._over.set()


@contextmanager
def spawned_ranks(options: EngineOptions) -> Iterator[SpawnedRanks | None]:
    """The ranks of an engine that the block makes, which ends them itself unless the block fails;
    None for one rank, and under torchrun, which has started them.

    Raises:
        UserError: torchrun's environment is damaged.
    """
    if options.num_ranks == 1 or Torchrun.of_environment() is not None:
        yield None
        return
    spawned = SpawnedRanks(options.num_ranks - 1)
    try:
        yield spawned
    except BaseException:
        spawned.close()
        raise


def _spawn() -> tuple[subprocess.Popen[bytes], Link]:
    """Start the process of a rank, which the link tells what to be."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-P", "-m", f"{__package__}.follower"]
        process = subprocess.Popen(
            [*command, str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    return process, Link(ours)
