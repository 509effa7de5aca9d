"""The other ranks of a model, as the stages of a worker's start meet them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from threading import Event, Thread
from typing import Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    FileStore,
    PrefixStore,
    ProcessGroup,
    Store as MeetingStore,
    TCPStore,
)

from ...compiler.artifacts.artifact import Artifact
from ...compiler.artifacts.key import Key
from ...compiler.artifacts.store import Store
from ...config import EngineDeadError, StoreConfig
from ...model_executor.parallel import GROUP, STAGES
from ...ops.collective import peer_memory as _peer_memory
from ...ops.collective.process_group import process_group
from .place import Place
from .source import artifact_store

_TIMEOUT = timedelta(seconds=120)
"""Longest time that a rank waits for the others in a collective; they are watched besides."""


_LOOK_S = 0.1
"""Time between two looks at the other ranks while one waits for them, in seconds."""


class RankGroup:
    """The process groups of a model's ranks, and what workers exchange in them beside the program:
    a group of the ranks of this one's stage, and one of the ranks that hold the same part of every
    stage.  What is exchanged is enqueued on the current stream.

    Args:
        place: this rank's host, GPU and number.
        meeting: opens the store in which the ranks meet; called while they are watched.
        device: where tensors are; those on "cuda" go over NCCL and peer memory, others over gloo.
        check: raises if a rank has ended; called while the others are waited for.

    Raises:
        EngineDeadError: a connection broke; or what ``check`` raises.
    """

    def __init__(
        self,
        place: Place,
        meeting: Callable[[], MeetingStore],
        device: str,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.num_stages = place.rank, place.num_stages
        self.stage, self.tp_rank = divmod(place.rank, place.size)
        self._device, self._stack = device, ExitStack()
        self._groups: dict[str, ProcessGroup] = {}
        self.why_no_peer_memory = "" if device == "cuda" else f"on {device}, not CUDA"
        try:
            wait_watched(lambda: self._meet(meeting(), place), check)
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError):  # of gloo or NCCL
                why = str(error).splitlines()[0]
                raise EngineDeadError(f"the ranks cannot meet: {why}; start again") from error
            raise

    def _meet(self, meeting: MeetingStore, place: Place) -> None:
        """Make the groups, and run a first collective in each: NCCL connects no sooner, and cannot
        be aborted until then."""
        stage, tp_rank = self.stage, self.tp_rank
        for name, which, number, size in (
            (GROUP, stage, tp_rank, place.size),
            (STAGES, tp_rank, stage, place.num_stages),
        ):
            if size > 1:
                self._groups[name] = self._stack.enter_context(
                    process_group(
                        name,
                        PrefixStore(f"{name}/{which}", meeting),
                        number,
                        size,
                        timeout=_TIMEOUT,
                        on_gpus=self._device == "cuda",
                        address=place.address,
                    )
                )
        self.least(0)
        if self._device == "cuda" and place.size > 1:
            devices = place.stage_gpus
            reason = "the ranks of the stage are on several hosts"
            if devices:
                reason = _peer_memory.why_no_peers(devices)
            # Ranks that differ in this would wait for each other.
            if reason or self._least_of(GROUP, value=int(not reason)) == 0:
                self.why_no_peer_memory = reason or "another rank of the stage has none"
                return
            memory = PrefixStore(f"{GROUP}/{stage}/memory", meeting)
            self._stack.enter_context(_peer_memory.peer_memory(GROUP, memory, tp_rank, devices))

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` by that of the stage's first rank."""
        if GROUP in self._groups:
            torch.ops._c10d_functional.broadcast_(tensor, 0, GROUP)
            torch.ops._c10d_functional.wait_tensor(tensor)

    def send(self, tensor: Tensor, stage: int) -> None:
        """Send a contiguous tensor to the rank of ``stage`` that holds the same part of it."""
        self._groups[STAGES].send([tensor], stage, 0).wait()

    def receive(self, tensor: Tensor, stage: int) -> None:
        """Fill a contiguous tensor by what that rank of ``stage`` sends."""
        self._groups[STAGES].recv([tensor], stage, 0).wait()

    def least(self, value: int) -> int:
        return self._least_of(*self._groups, value=value)

    def _least_of(self, *names: str, value: int) -> int:
        tensor = torch.tensor([value], dtype=torch.int64, device=self._device)
        for name in names:
            torch.ops._c10d_functional.all_reduce_(tensor, "min", name)
            torch.ops._c10d_functional.wait_tensor(tensor)
        return int(tensor.item())

    def abort(self) -> None:
        """Make collectives that wait for a lost rank end.  Those of gloo do so by themselves."""
        if self._device == "cuda":
            _peer_memory.abort(GROUP)
            for group in self._groups.values():
                group.abort()

    def close(self) -> None:
        self._stack.close()


def meeting_store(name: str, num_ranks: int, listener: int | None = None) -> MeetingStore:
    """The store in which ranks meet.

    Args:
        name: a file, for ranks of one host, or HOST:PORT, where rank 0 listens.
        listener: the socket that listens there, on rank 0; the store closes it.
    """
    if name.startswith("/"):
        return FileStore(name, num_ranks)
    host, _, port = name.rpartition(":")
    return TCPStore(
        host,
        int(port),
        is_master=listener is not None,
        wait_for_workers=False,
        timeout=_TIMEOUT,
        master_listen_fd=listener,
    )


def wait_watched(work: Callable[[], None], check: Callable[[], None]) -> None:
    """Run ``work``, which may wait for a rank that has ended, in a thread of its own.  Returns when
    it is done, or raises what ``check`` does; a thread that still waits is left behind."""
    done, failed = Event(), list[BaseException]()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            work()
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()

    Thread(target=run, name="meeting", daemon=True).start()
    while not done.wait(_LOOK_S):
        check()
    if failed:
        raise failed[0]


class Peers(Protocol):
    """The calls of a worker's start, in this order; ``store`` and ``share`` only where a program is
    compiled.  Each may raise what ended another rank."""

    @property
    def rank(self) -> int: ...

    @property
    def compiles(self) -> bool:
        """Whether this rank finds or compiles the program, for others of its stage too."""

    def check(self) -> None:
        """Raises if a rank has ended."""

    def agree(self, key: Callable[[int], Key]) -> None:
        """Raises if another rank would run another program than rank 0 expects of its stage.
        ``key`` takes the stage's number."""

    def store(self, config: StoreConfig) -> AbstractContextManager[Store]:
        """The store of the program.  A stage's other ranks wait until its first rank has it."""

    def share(self, artifact: Artifact) -> None:
        """Called within the context of ``store`` when the program is loaded."""

    def meet(self) -> RankGroup | None:
        """Waits until all ranks have program and weights; their group, None for one rank."""


class Alone:
    """One rank has no peers."""

    rank, compiles = 0, True

    def check(self) -> None:
        """Nobody else can have ended."""

    def agree(self, key: Callable[[int], Key]) -> None:
        """Nobody else has a key."""

    def store(self, config: StoreConfig) -> AbstractContextManager[Store]:
        return artifact_store(config)

    def share(self, artifact: Artifact) -> None:
        """Nobody else waits for it."""

    def meet(self) -> RankGroup | None:
        return None
