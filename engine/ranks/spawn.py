"""Starts the processes of the other ranks on this host."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from threading import Event, Thread

from .link import Link


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

    def take_gpu(self) -> None:
        """Rank 0 keeps the GPU of this thread."""

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


def _spawn() -> tuple[subprocess.Popen[bytes], Link]:
    ours, theirs = socket.socketpair()
    with theirs:
        return start_follower(theirs), Link(ours)


def start_follower(end: socket.socket, folder: str | None = None) -> subprocess.Popen[bytes]:
    """Start the process of a rank.  Rank 0 tells it over the connection what to be.

    Args:
        end: the rank's end of the connection.
        folder: the current folder of the process, if it is there.
    """
    command = [sys.executable, "-P", "-m", f"{__package__}.follower"]
    return subprocess.Popen(
        [*command, str(end.fileno()), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        cwd=folder if folder and Path(folder).is_dir() else None,
        pass_fds=[end.fileno()],
    )
