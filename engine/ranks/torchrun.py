"""Ranks that ``torchrun`` has started: rank 0 leads, the others follow in place of what they run.

They find each other through torchrun's store, and speak over Unix sockets as spawned ranks do.  The
agent of torchrun is the parent of all, so rank 0 watches the others through the pids of their
sockets' ends, and they watch rank 0.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from ...config import UserError
from ...model_executor.parallel import describe_ranks
from ..messages.codec import decode
from .lifetime import leave_signals_to_the_parent
from .link import Hello, Kind, Link

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_PLACE, _LEADERS = "fusewright/leader", "fusewright/leaders"
_LOOK_S = 0.2
"""Time between two looks at what a rank waits for, in seconds."""
_STORE_TIMEOUT = timedelta(seconds=60)


class Torchrun(NamedTuple):
    """What torchrun says in the environment of each process."""

    rank: int
    world: int
    local_world: int

    @classmethod
    def of_environment(cls) -> Torchrun | None:
        """None in a process that it has not started.

        Raises:
            UserError: a variable is no number.
        """
        if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys():
            return None
        world = os.environ["WORLD_SIZE"]
        variables = {"RANK": os.environ["RANK"], "WORLD_SIZE": world}
        variables["LOCAL_WORLD_SIZE"] = os.environ.get("LOCAL_WORLD_SIZE", world)
        for name, value in variables.items():
            if not value.isdecimal():
                raise UserError(
                    f"{name}={value!r} in the environment: expected a number, as torchrun sets it; "
                    "unset RANK, WORLD_SIZE and LOCAL_RANK to start ranks without torchrun"
                )
        return cls(*map(int, variables.values()))


def join_torchrun(tensor_parallel_size: int, pipeline_parallel_size: int = 1) -> Torchrun | None:
    """Take this process's place among torchrun's; None without torchrun.  Only rank 0 returns:
    another rank runs what rank 0 says, and its process ends with the engine.

    Raises:
        UserError: torchrun has started another number of processes, or on several hosts.
    """
    launch = Torchrun.of_environment()
    if launch is None:
        return None
    if launch.rank > 0:
        _follow(launch.rank)
    num_ranks = tensor_parallel_size * pipeline_parallel_size
    if launch.world != num_ranks:
        other = f"tensor_parallel_size={launch.world}"
        if pipeline_parallel_size > 1:
            other = f"sizes whose product is {launch.world}"
        raise UserError(
            f"{describe_ranks(tensor_parallel_size, pipeline_parallel_size)}: torchrun has started "
            f"WORLD_SIZE={launch.world} processes, expected one a rank; give --nproc-per-node "
            f"{num_ranks}, or {other}"
        )
    if launch.local_world != launch.world:
        raise UserError(
            f"WORLD_SIZE={launch.world}: torchrun has started {launch.local_world} of them on this "
            "host, expected all: ranks are of one host; give --nnodes 1"
        )
    return launch


def _store() -> Store:
    """The store through which the processes of this torchrun meet."""
    from torch.distributed.rendezvous import rendezvous

    store: Store = next(rendezvous("env://", timeout=_STORE_TIMEOUT))[0]
    return store


class Joined:
    """The process of another rank, which torchrun has started."""

    def __init__(self, pid: int) -> None:
        self.pid, self._pidfd = pid, os.pidfd_open(pid)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self) -> None:
        """Wait for the end; how it ended is torchrun's to know."""
        select.select([self._pidfd], [], [])


def claim_ranks() -> None:
    """Make the other ranks those of an engine of this process.

    Raises:
        UserError: they have been another's.
    """
    if _store().add(_LEADERS, 1) > 1:
        raise UserError(
            "torchrun's other ranks have been those of another engine: they serve one and end with "
            "it; start one engine a torchrun"
        )


def joined_ranks(
    world: int, folder: Path, gave_up: Callable[[], bool]
) -> Iterator[tuple[int, Joined, Link]]:
    """Every other rank with its process and the link to it, as they come.

    Args:
        folder: is there as long as ranks may come.
        gave_up: whether nobody waits any more.
    """
    place = str(folder / "leader")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen(world)
        listener.settimeout(_LOOK_S)
        _store().set(_PLACE, place)
        missing = world - 1
        while missing and not gave_up():
            with suppress(TimeoutError):
                end, _ = listener.accept()
                end.setblocking(True)
                link = Link(end)
                kind, body = link.receive()
                assert kind is Kind.HELLO
                yield decode(body, Hello).rank, Joined(_peer(end)), link
                missing -= 1


def _peer(end: socket.socket) -> int:
    """The process at the other end of a Unix socket."""
    form = struct.Struct("=3i")
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, form.size)
    pid: int = form.unpack(credentials)[0]
    return pid


def _follow(rank: int) -> NoReturn:
    """Be another rank than 0 until the engine ends."""
    from .follower import run

    store = _store()
    while not store.check([_PLACE]):  # not a call that waits: torchrun may end this process
        time.sleep(_LOOK_S)
    end = socket.socket(socket.AF_UNIX)
    end.connect(store.get(_PLACE).decode())
    leader = Joined(_peer(end))

    def end_with_leader() -> None:
        leader.wait()
        os._exit(1)

    leave_signals_to_the_parent()
    Thread(target=end_with_leader, name="rank 0", daemon=True).start()
    link = Link(end)
    link.send(Kind.HELLO, Hello(rank))
    sys.stdout.flush()
    if code := run(link):
        leader.wait()  # it says why; torchrun would end it as soon as this process has ended
    os._exit(code)
