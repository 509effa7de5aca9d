"""The process of a rank other than 0: it starts as rank 0 does, and runs the batches that come.

Run as ``python -m fusewright.engine.ranks.follower FD PARENT_PID``, where FD is its end of the
socket.  It ends with rank 0, whatever ends that.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ...config import collecting_rarely
from ..messages.codec import decode
from ..messages.step import Batch
from .lifetime import LOST_LINK, Failure, end_with, leave_signals_to_the_parent
from .link import ArtifactFolder, ArtifactKey, Kind, Link, RankFailed, Start

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as MeetingStore

    from ...compiler.artifacts.artifact import Artifact
    from ...compiler.artifacts.key import Key
    from ...compiler.artifacts.store import Store
    from ...config import StoreConfig
    from ..worker.model_runner import LaunchedStep
    from ..worker.peers import RankGroup
    from ..worker.worker import Worker

_MOST_IN_FLIGHT = 2
"""Steps that may run when the next is launched: the memory of inputs is written in turn."""


class Follower:
    """The ``Peers`` of a rank other than 0: it speaks with rank 0 alone."""

    def __init__(self, link: Link, start: Start) -> None:
        self.rank, self._link, self._start = start.place.rank, link, start
        self._stage = self.rank // start.place.size
        self.compiles = start.place.first == self.rank

    def check(self) -> None:
        """Rank 0 watches; this process ends with it."""

    def agree(self, key: Callable[[int], Key]) -> None:
        """Tell rank 0, which compares."""
        factors = {name: str(value) for name, value in key(self._stage).factors.items()}
        self._link.send(Kind.KEY, ArtifactKey(factors))

    @contextmanager
    def store(self, config: StoreConfig) -> Iterator[Store]:
        """This rank's own store if it is the first of its stage on its host, else the one in which
        that rank's artifact is; waits until it is there."""
        from ...compiler.artifacts.store import Store
        from ..worker.source import artifact_store

        if self.compiles:
            with artifact_store(config) as store:
                yield store
            return
        folder = decode(self._expect(Kind.ARTIFACT), ArtifactFolder).store
        yield Store(
            [Path(folder)], trusted_keys=[Path(name).expanduser() for name in config.trusted_keys]
        )

    def share(self, artifact: Artifact) -> None:
        """Tell rank 0 that the artifact is read, and where it is for the others of the stage on
        this host, which are waited for."""
        if self.compiles:
            self._link.send(Kind.ARTIFACT, ArtifactFolder(str(artifact.path.parent.parent)))
        self._link.send(Kind.PROGRAM)
        if self.compiles:
            self._expect(Kind.PROGRAM)

    def meet(self) -> RankGroup:
        """Say that the weights are loaded, and join the others."""
        from ..worker.peers import RankGroup, meeting_store

        self._link.send(Kind.WEIGHTS)
        self._expect(Kind.MEET)
        start = self._start

        def meeting() -> MeetingStore:
            return meeting_store(start.store, start.options.num_ranks)

        return RankGroup(start.place, meeting, start.hardware.device)

    def _expect(self, expected: Kind) -> bytes:
        kind, body = self._link.receive()
        if kind is Kind.STOP:
            raise EOFError("rank 0 has given up")
        assert kind is expected, f"{kind.name} in place of {expected.name}"
        return body


def start_worker(link: Link) -> Worker:
    # Only now, when this process ends with its parent: the import of torch takes seconds.  Rank 0
    # imports it meanwhile.
    import logging

    import torch

    from ..worker.hardware import detect_hardware
    from ..worker.progress import Progress
    from ..worker.startup import read_model
    from ..worker.startup_report import StartupReport
    from ..worker.worker import Worker

    kind, body = link.receive()
    assert kind is Kind.START
    start = decode(body, Start)
    logging.getLogger("fusewright").setLevel(logging.ERROR)  # rank 0 has said the rest
    torch.set_num_threads(start.num_threads)
    hardware = start.hardware
    if hardware.device == "cuda":
        if start.place.visible_gpus:  # CUDA reads it at its first call, which is the next
            os.environ["CUDA_VISIBLE_DEVICES"] = start.place.visible_gpus
        torch.cuda.set_device(start.place.gpu)
        # Its own GPU, which the key tells from rank 0's; limits follow rank 0's memory.
        hardware = replace(detect_hardware("cuda"), memory_bytes=hardware.memory_bytes)
    folder, spec, config = read_model(start.options, hardware, weights=True)
    peers = Follower(link, start)
    return Worker(folder, spec, config, StartupReport(), Progress(), peers)


def serve(link: Link, worker: Worker) -> None:
    import torch

    in_flight: deque[LaunchedStep] = deque()
    while True:
        kind, body = link.receive()
        if kind is Kind.STEP:
            if len(in_flight) == _MOST_IN_FLIGHT:
                in_flight.popleft().wait()
            in_flight.append(worker.runner.launch(decode(body, Batch)))
        elif kind is Kind.CAPTURE:
            with torch.inference_mode():
                worker.graphs.capture_next()
        elif kind is Kind.STOP:
            return


def main(argv: list[str]) -> NoReturn:
    link = Link(socket.socket(fileno=int(argv[0])))
    end_with(int(argv[1]))
    leave_signals_to_the_parent()
    # Not sys.exit: torch would free its graphs, find a lost device, and abort.
    os._exit(run(link))


def run(link: Link) -> int:
    """Start as rank 0 says, run its batches, and return the process's exit code."""
    try:
        with collecting_rarely():
            worker = start_worker(link)
        link.send(Kind.READY)
        gc.freeze()
        serve(link, worker)
        return 0
    except (EOFError, ConnectionError, TimeoutError):  # rank 0 may have ended
        return LOST_LINK
    except Exception as error:
        failure = Failure.of(error)
        with suppress(OSError):
            link.send(Kind.FAILED, RankFailed(*failure))
        return failure.exit_code


if __name__ == "__main__":
    main(sys.argv[1:])
