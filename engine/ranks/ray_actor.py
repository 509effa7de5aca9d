"""Ray runs this on the node of each rank: an actor that holds the rank's GPU and runs the rank.

The rank is a process of its own, as a spawned one is, and its link is a TCP connection to rank 0.
The actor looks on: it ends the rank when the connection breaks, and tells rank 0 how the rank has
ended.  Ray carries the arguments of the actors, and no message of ours.
"""

from __future__ import annotations

import os
import platform
import select
import socket
import subprocess
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..worker.place import Seat
from .lifetime import BROKEN, LOOK_S, STOPPED, StoppedWatch, how_rank_ended
from .link import Ended, Hello, Kind, Link
from .spawn import start_follower

_PACKAGE = Path(__file__).resolve().parents[2]
_CONNECT_S = 20.0
"""Longest time to connect to rank 0."""
_SILENT_S = 6
"""Seconds after which a host that does not answer counts as lost."""


class RankActor:
    """One rank on the node where Ray has put this.

    Args:
        address: where rank 0 listens.
        secret: rank 0 reads it first, and listens to nobody without it.
        folder: rank 0's current folder, to which options with paths may be relative.
    """

    def __init__(self, rank: int, address: tuple[str, int], secret: bytes, folder: str) -> None:
        self._rank, self._address, self._secret, self._folder = rank, address, secret, folder

    def run(self) -> None:
        """Run the rank until it ends or the connection breaks.  Rank 0 runs elsewhere, and this
        only holds its GPU."""
        with socket.create_connection(self._address, _CONNECT_S) as end:
            end.settimeout(None)
            notice_lost_hosts(end)
            end.sendall(self._secret)
            link = Link(end)
            if self._rank == 0:
                link.send(Kind.HELLO, Hello(0, 0, _seat(), versions()))
                _watch(end, None)
                return
            with start_follower(end, self._folder) as process:
                link.send(Kind.HELLO, Hello(self._rank, process.pid, _seat(), versions()))
                how = _watch(end, process)
                process.kill()
            with suppress(OSError):
                link.send(Kind.ENDED, Ended(how))


def _seat() -> Seat:
    import ray

    gpu = os.environ["CUDA_VISIBLE_DEVICES"] if ray.get_gpu_ids() else ""
    return Seat(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), gpu)


def _watch(end: socket.socket, process: subprocess.Popen[bytes] | None) -> str:
    """Wait until the connection breaks, or the process ends or is stopped; returns which."""
    poll = select.poll()
    poll.register(end, select.POLLRDHUP)
    if process is None:
        poll.poll()
        return BROKEN
    exited, stopped = os.pidfd_open(process.pid), StoppedWatch(process.pid)
    try:
        poll.register(exited, select.POLLIN)
        while True:
            ready = dict(poll.poll(LOOK_S * 1e3))
            if exited in ready:
                return how_rank_ended(process.wait())
            if ready:
                return BROKEN
            if stopped.look():
                return STOPPED
    finally:
        os.close(exited)


def notice_lost_hosts(end: socket.socket) -> None:
    """Have the kernel send at once, and break the connection when the other host is silent."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENT_S - 2)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_S * 1000)


def versions() -> dict[str, str]:
    """Ranks must have this in common before one reads the other's messages; the keys of their
    artifacts compare the rest."""
    sources = sha256()
    for folder in ("config", "engine", "model_executor"):
        for file in sorted((_PACKAGE / folder).rglob("*.py")):
            sources.update(file.read_bytes())
    named = {"machine": platform.machine(), "Python": platform.python_version()}
    named["sources of fusewright"] = sources.hexdigest()[:12]
    for package in ("torch", "msgspec", "numpy"):
        with suppress(PackageNotFoundError):
            named[package] = version(package)
    return named
