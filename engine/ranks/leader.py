"""``Leader`` stands in rank 0's process for the other ranks: it tells their processes what to run,
and watches them, so that the end of one is the end of all."""

from __future__ import annotations

import logging
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch._C._distributed_c10d import Store as MeetingStore

from ...compiler.artifacts.artifact import Artifact
from ...compiler.artifacts.key import Key, differences
from ...compiler.artifacts.scratch import scratch_folder
from ...compiler.artifacts.store import Store
from ...config import EngineDeadError, EngineOptions, Hardware, StoreConfig, UserError
from ...model_executor.parallel import describe_ranks
from ..messages.codec import decode, encode
from ..worker.peers import RankGroup, meeting_store
from ..worker.place import LOOPBACK, places
from ..worker.source import artifact_store
from .executor import StartedRanks, start_others
from .lifetime import BROKEN, LOOK_S, STOPPED, StoppedWatch, how_rank_ended
from .link import ArtifactFolder, ArtifactKey, Ended, Kind, Link, RankFailed, Start
from .ray import LOST, RayRank, RayRanks
from .torchrun import Joined, joined_ranks

_logger = logging.getLogger("fusewright")
_GATHER_S = 0.3
"""Time in which the causes of an end are gathered: a rank that loses its peer ends too."""
_BROKEN_S = 2.0
"""Longest time from the end of a connection to that of its process, which may free a GPU first."""
_CAUSE_S = 3.0
"""Longest wait, after an error of rank 0, for the end of a rank that may have caused it."""
_END_S = 5.0
"""Longest time that ranks may take to end when they are told to."""
_UNKNOWN = "torchrun says how"
_Process = subprocess.Popen[bytes] | Joined | RayRank
_alone = threading.Lock()
"""Held by the process's one leader: programs know their process group by a fixed name."""


class Leader:
    """Starts all ranks but 0 and stands for them in rank 0's process.

    It is the ``Peers`` of rank 0's worker.  Any thread may call ``stop``; the others are for the
    thread that drives the engine.

    Args:
        options, hardware: those of rank 0; the others get the same.
        torchrun: the others are torchrun's processes, and are waited for.
        others: the other ranks, if they have been started; they end with this.

    Raises:
        UserError: this process already has an engine with several ranks.
    """

    rank, compiles = 0, True

    def __init__(
        self,
        options: EngineOptions,
        hardware: Hardware,
        *,
        torchrun: bool = False,
        others: StartedRanks | None = None,
    ) -> None:
        self.world, self._hardware = options.num_ranks, hardware
        self._sizes = options.tensor_parallel_size, options.pipeline_parallel_size
        if not _alone.acquire(blocking=False):
            raise UserError(
                f"{describe_ranks(*self._sizes)}: this process has an engine with several ranks "
                "already, and can have one; close() that one first"
            )
        try:
            self._scratch = scratch_folder()
            self._folder = self._scratch.__enter__()
            self._others = others if others or torchrun else start_others(options)
        except BaseException:
            _alone.release()
            raise
        self._changed = threading.Condition()
        self._heard: dict[Kind, dict[int, bytes]] = {}
        self._ended: dict[int, str] = {}
        self._failed: dict[int, RankFailed] = {}
        self._failure: UserError | None = None
        self._stopping, self._closed, self._stopped_at = False, False, 0.0
        self._group: RankGroup | None = None
        self._links: dict[int, Link] = {}
        self._processes: dict[int, _Process] = {}
        self._torchrun, self._places = torchrun, places(*self._sizes)
        store, num_threads = str(self._folder / "ranks"), torch.get_num_threads()
        self._start = Start(options, hardware, self._places[0], store, num_threads)
        self._stopped: dict[int, StoppedWatch] = {}
        self._broken: dict[int, float] = {}
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._thread.start()

    # What rank 0's worker calls

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def agree(self, key: Callable[[int], Key]) -> None:
        """Compare the keys of the ranks' programs with those that rank 0 would have in their stage.

        Raises:
            UserError: names the factors in which one differs.
        """
        stages = [key(number).factors for number in range(self._sizes[1])]
        for rank, body in self._wait_for(Kind.KEY).items():
            ours = {name: str(value) for name, value in stages[rank // self._sizes[0]].items()}
            differing = differences(ours, decode(body, ArtifactKey).factors)
            if differing:
                raise UserError(
                    f"rank {rank}{self._where(rank)} would run another program than rank 0 (rank 0 "
                    f"-> rank {rank}): {', '.join(map(str, differing))}; start all ranks from one "
                    "installation, on equal GPUs"
                )

    def store(self, config: StoreConfig) -> AbstractContextManager[Store]:
        return artifact_store(config)  # rank 0's own

    def share(self, artifact: Artifact) -> None:
        """Have every rank load the artifact of its stage's first rank on its host, which for this
        host and the first stage is rank 0's."""
        folder = encode(ArtifactFolder(str(artifact.path.parent.parent)))
        firsts = sorted({place.first for place in self._places})
        for first in firsts:
            if first:
                folder = self._wait_for(Kind.ARTIFACT, first)[first]
            others = [place.rank for place in self._places if place.first == first]
            self.send(Kind.ARTIFACT, folder, to=others[1:])
        self._wait_for(Kind.PROGRAM)
        self.send(Kind.PROGRAM, to=firsts[1:])

    def meet(self) -> RankGroup:
        """Wait for the weights of all ranks, then join them."""
        self._wait_for(Kind.WEIGHTS)
        self.send(Kind.MEET)
        place, device = self._places[0], self._hardware.device
        with self.guard():
            group = RankGroup(place, self._open_meeting, device, self.check)
        with self._changed:
            self._group = group
        if device == "cuda" and place.size > 1 and group.why_no_peer_memory:
            _logger.warning(
                "NCCL alone sums over the ranks, which takes three times as long or more for few "
                "tokens: %s",
                group.why_no_peer_memory,
            )
        return group

    def _open_meeting(self) -> MeetingStore:
        ray = self._others if isinstance(self._others, RayRanks) else None
        listener = ray.listener.detach() if ray and ray.listener else None
        return meeting_store(self._start.store, self.world, listener)

    # What the engine calls

    def ready(self) -> None:
        self._wait_for(Kind.READY)

    def capture_next(self) -> None:
        """Have every rank capture the graph that rank 0 is about to capture."""
        self.send(Kind.CAPTURE)

    def report(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def peer_memory(self) -> str:
        """Whether ranks of a stage write into each other's memory: "connected", or why not."""
        return (self._group and self._group.why_no_peer_memory) or "connected"

    def send(
        self, kind: Kind, message: Struct | bytes = b"", to: Iterable[int] | None = None
    ) -> None:
        """Tell all ranks, or those of ``to``.

        Raises:
            UserError: what ended one of them.
        """
        self.check()
        body = message if isinstance(message, bytes) else encode(message)
        with self.guard():
            for rank in self._links if to is None else to:
                self._links[rank].send(kind, body)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Raise what ended a rank in place of an error that may come of it."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            with self._changed:
                self._changed.wait_for(lambda: self._failure is not None, _CAUSE_S)
            if self._failure is not None:
                raise self._failure from error
            raise

    def lose(self, reason: str) -> None:
        """End all ranks: they are not in step any more."""
        self._fail(EngineDeadError(reason))

    def stop(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = self._stopping = True
            self._stopped_at = time.monotonic()
        for link in self._links.values():
            with suppress(OSError):
                link.send(Kind.STOP)
        if threading.current_thread() is not self._thread:  # a finalizer may run in any thread
            self._thread.join()
        if self._group is not None:
            self._group.close()
        self._scratch.__exit__(None, None, None)
        _alone.release()

    def _wait_for(self, kind: Kind, *ranks: int) -> dict[int, bytes]:
        """The messages of one kind, once all ``ranks`` have sent theirs: every other one unless
        some are named."""
        expected = {*(ranks or range(1, self.world))}

        def complete() -> bool:
            return self._failure is not None or expected <= self._heard.get(kind, {}).keys()

        with self._changed:
            self._changed.wait_for(complete)
        self.check()
        return self._heard[kind]

    # The thread that starts and watches the ranks

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            try:
                for rank, process, link in self._come():
                    self._take(rank, process, link, selector)
                lost_at: float | None = None
                while self._failure is None and not self._all_stopped:
                    for key, _ in selector.select(LOOK_S if lost_at is None else _GATHER_S / 3):
                        key.data()
                    self._look_for_lost()
                    if lost_at is None and (self._failed or self._ended) and not self._stopping:
                        lost_at = time.monotonic()
                    if lost_at is not None and time.monotonic() - lost_at > _GATHER_S:
                        self._fail(self._cause())
            except UserError as error:
                self._fail(error)
            except Exception as error:  # nobody sees what a thread raises
                self._fail(EngineDeadError(f"the ranks cannot be watched: {error}"))
        self._reap()

    @property
    def _all_stopped(self) -> bool:
        is_late = time.monotonic() - self._stopped_at > _END_S
        return self._stopping and (len(self._ended) == self.world - 1 or is_late)

    def _come(self) -> Iterator[tuple[int, _Process, Link]]:
        if self._others is None:
            yield from joined_ranks(self.world, self._folder, lambda: self._stopping)
            return
        processes: list[tuple[_Process, Link]] = []
        if isinstance(self._others, RayRanks):
            processes += self._others.processes(lambda: self._stopping)
            self._places = self._others.places
            self._start = replace(self._start, store=self._others.store)
        else:
            processes += self._others.processes()
        for rank, (process, link) in enumerate(processes, 1):
            yield rank, process, link

    def _take(
        self, rank: int, process: _Process, link: Link, selector: selectors.BaseSelector
    ) -> None:
        self._processes[rank], self._links[rank] = process, link
        with suppress(OSError):  # a rank that has ended at once is noticed below
            link.send(Kind.START, replace(self._start, place=self._places[rank]))

        def hear() -> None:
            try:
                self._hear(rank, *link.receive())
            except (OSError, EOFError):
                selector.unregister(link)
                self._broken[rank] = time.monotonic()
                if isinstance(process, RayRank):  # whose actor has told how it ended, if it could
                    self._ended.setdefault(rank, LOST)

        selector.register(link, selectors.EVENT_READ, hear)
        if isinstance(process, RayRank):
            return
        exited = os.pidfd_open(process.pid)

        def end() -> None:
            selector.unregister(exited)
            os.close(exited)
            code = process.wait()
            self._ended[rank] = _UNKNOWN if code is None else how_rank_ended(code)

        selector.register(exited, selectors.EVENT_READ, end)
        self._stopped[rank] = StoppedWatch(process.pid)

    def _hear(self, rank: int, kind: Kind, body: bytes) -> None:
        with self._changed:
            if kind is Kind.FAILED:
                self._failed[rank] = decode(body, RankFailed)
            elif kind is Kind.ENDED:
                self._ended[rank] = decode(body, Ended).how
            self._heard.setdefault(kind, {})[rank] = body
            self._changed.notify_all()

    def _look_for_lost(self) -> None:
        """End all when somebody has stopped a process, or a connection broke and its process goes
        on: others wait for it."""
        for rank, stopped in self._stopped.items():
            if rank not in self._ended and stopped.look():
                self._fail(self._lost(rank, STOPPED))
        for rank, since in self._broken.items():
            if rank not in self._ended and time.monotonic() - since > _BROKEN_S:
                self._fail(self._lost(rank, BROKEN))

    def _cause(self) -> UserError:
        """What ended first, as far as one can tell: a process that was killed takes the others'
        collectives down, and they say so."""
        killed = [
            rank
            for rank, how in self._ended.items()
            if not (how.startswith("exit code") or (rank in self._failed and how == _UNKNOWN))
        ]
        if self._failed and not killed:
            rank, failed = max(self._failed.items(), key=lambda item: item[1].exit_code)
            sys.stderr.write(failed.traceback)
            message = f"{self._name(rank)}: {failed.message}"
            return UserError(message) if failed.exit_code == 2 else EngineDeadError(message)
        rank = (killed or list(self._ended))[0]
        return self._lost(rank, self._ended[rank])

    def _lost(self, rank: int, how: str) -> EngineDeadError:
        return EngineDeadError(f"{self._name(rank)} has ended ({how}); restart the engine")

    def _name(self, rank: int) -> str:
        size, num_stages = self._sizes
        stage = f" (stage {rank // size} of {num_stages})" if num_stages > 1 else ""
        return f"rank {rank} of {self.world}{stage}{self._where(rank)}"

    def _where(self, rank: int) -> str:
        address = self._places[rank].address
        return "" if address == LOOPBACK else f" on {address}"

    def _fail(self, failure: UserError) -> None:
        """Keep the first failure, and end what may still wait for the rank that is lost."""
        with self._changed:
            if self._failure is None and not self._stopping:
                self._failure = failure
                if self._torchrun:  # it ends this process too, perhaps before the error is told
                    sys.stderr.write(f"error: {failure}\n")
            group = self._group
            self._changed.notify_all()
        for rank, process in self._processes.items():
            if rank not in self._ended:
                process.kill()
        if group is not None:
            group.abort()

    def _reap(self) -> None:
        for rank, process in self._processes.items():
            if rank not in self._ended:
                process.kill()
            process.wait()
            self._links[rank].close()
        if self._others is not None:
            self._others.close()
