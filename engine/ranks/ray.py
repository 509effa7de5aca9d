"""Ranks that Ray places on the nodes of its cluster; rank 0 is the process that the user started.

``RayRanks`` reserves a GPU for each rank, starts an actor beside each, and listens until all have
come.  ``ray_actor`` is what runs on their nodes.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import Any

from msgspec import MsgspecError
from msgspec.structs import replace

from ...compiler.artifacts.key import differences
from ...config import EngineOptions, MachineError, UserError
from ...model_executor.parallel import describe_ranks
from ..messages.codec import decode
from ..worker.place import Place, places
from .link import Hello, Link
from .ray_actor import RankActor, notice_lost_hosts, versions

_ANOTHER = "another installation than rank 0 runs; install the same on all nodes"
LOST = "its connection broke, or its actor or its node has ended"
_LOOK_S = 0.2
"""Time between two looks at what the start waits for, in seconds."""
_CONNECT_S = 30.0
"""Longest wait for the cluster, for which Ray itself would wait without end."""
_FREE_S = 15.0
"""Longest wait for GPUs that others have.  Those of an engine that has just ended are free then."""
_JOIN_S = 180.0
"""Longest wait for the actors, for which Ray starts processes on all nodes."""
_GREET_S = 5.0
"""Longest time in which who connects has to say who it is."""
_END_S = 5.0
"""Longest wait for the ends of actors whose connections have been broken."""


class RayRank:
    """The process of another rank on its node, where only its actor can do anything to it."""

    def __init__(self, pid: int, link: Link) -> None:
        self.pid, self._link = pid, link

    def kill(self) -> None:
        """Break the connection, at which the actor ends it."""
        self._link.shut()

    def wait(self) -> None:
        """``RayRanks.close`` waits for the actors of all."""


class RayRanks:
    """The ranks of an engine.  Ray starts them while rank 0 imports torch.

    Raises:
        MachineError: Ray is not installed.
    """

    def __init__(self, options: EngineOptions) -> None:
        if find_spec("ray") is None:
            raise MachineError(
                "distributed_executor=ray needs the package ray: pip install 'fusewright[ray]'"
            )
        self._options = options
        self._sizes = options.tensor_parallel_size, options.pipeline_parallel_size
        self._over, self._connected, self._started = Event(), Event(), Event()
        self._connect_until = time.monotonic() + _CONNECT_S
        self._error: Exception | None = None
        self._is_ours = False
        self._bundles: Any = None
        self._actors: list[Any] = []
        self._runs: list[Any] = []
        self._joined: dict[int, tuple[Hello, Link]] = {}
        self.places: list[Place] = []
        self.store = ""
        """Where ranks meet; ``listener`` listens there for rank 0's store."""
        self.listener: socket.socket | None = None
        Thread(target=self._start, name="Ray", daemon=True).start()

    def processes(self, gave_up: Callable[[], bool] = lambda: False) -> list[tuple[RayRank, Link]]:
        """Each other rank's process and rank 0's end of the connection to it.

        Args:
            gave_up: whether nobody waits any more.

        Raises:
            UserError: there is no cluster, it has too little room, or a rank cannot start there.
        """
        while not self._started.wait(_LOOK_S):
            if gave_up():
                self._over.set()
            if not self._connected.is_set() and time.monotonic() > self._connect_until:
                raise UserError(
                    "distributed_executor=ray: the Ray cluster of this node does not answer, which "
                    "`ray status` asks too; RAY_ADDRESS may name another"
                )
        if self._error is not None:
            raise self._error
        others = [self._joined[rank] for rank in range(1, len(self._joined))]
        return [(RayRank(hello.pid, link), link) for hello, link in others]

    def take_gpu(self) -> None:
        """Make the GPU that Ray gave rank 0 this thread's.

        Raises:
            UserError: as ``processes``.
        """
        if self._options.device == "cpu":
            return
        self.processes()
        if self.places[0].visible_gpus:
            import torch

            torch.cuda.set_device(self.places[0].gpu)

    def close(self) -> None:
        """End the ranks that still run, and give back what Ray gave."""
        self._over.set()
        if not self._connected.wait(max(0.0, self._connect_until - time.monotonic())):
            return  # to a thread that waits in Ray
        self._started.wait()
        for _, link in self._joined.values():
            link.shut()
            link.close()
        if self.listener is not None:
            self.listener.close()
        import ray

        if not ray.is_initialized():
            return
        with suppress(Exception):  # the cluster may have ended
            ray.wait(self._runs, num_returns=len(self._runs), timeout=_END_S)
        with suppress(Exception):
            ray.util.remove_placement_group(self._bundles)  # ends actors that have not ended
        if self._is_ours:
            ray.shutdown()

    # The thread that starts them

    def _start(self) -> None:
        try:
            self._connect()
            self._connected.set()
            self._check_going_on()
            unit, bundles, home = self._ask()
            self._reserve(unit, bundles, home)
            self._call(unit, len(bundles))
            seats = [self._joined[rank][0].seat for rank in range(self._options.num_ranks)]
            self.places = places(*self._sizes, seats)
            if self.places[0].visible_gpus:
                self.places[0] = _as_numbered_here(self.places[0])
        except UserError as error:
            self._error = error
        except Exception as error:
            line = (str(error).splitlines() or [type(error).__name__])[0]
            self._error = MachineError(f"distributed_executor=ray: {line}")
        finally:
            self._connected.set()
            self._started.set()

    def _connect(self) -> None:
        """Join the cluster of this node, if this process has not."""
        import ray

        if ray.is_initialized():
            return
        try:
            ray.init("auto", logging_level=logging.ERROR)
        except ConnectionError as error:
            raise UserError(
                "distributed_executor=ray: this node is in no Ray cluster; run `ray start --head` "
                "on one node and `ray start --address=HOST:6379` on the others"
            ) from error
        self._is_ours = True

    def _ask(self) -> tuple[str, list[dict[str, float]], str]:
        """Returns the resource of which a rank needs one, the bundles to ask for, and this node.  A
        stage is one bundle, which lies on one node, if the nodes have room for that; else each rank
        is one.
        """
        import ray

        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        home, (size, num_stages) = ray.get_runtime_context().get_node_id(), self._sizes
        device = self._options.device
        on_gpus = device == "cuda" or (device == "auto" and "GPU" in nodes[home]["Resources"])
        unit = "GPU" if on_gpus else "CPU"
        room = {name: int(node["Resources"].get(unit, 0)) for name, node in nodes.items()}
        needed = size * num_stages
        if sum(room.values()) < needed or room[home] == 0:
            shown = ", ".join(
                f"{node['NodeManagerAddress']}: {room[n]}" for n, node in nodes.items()
            )
            raise UserError(
                f"{describe_ranks(*self._sizes)}: {needed} ranks need a {unit} each, rank 0 on "
                f"this node, and the Ray cluster has {sum(room.values())} ({shown}; this node: "
                f"{room[home]}); add nodes, or give smaller sizes"
            )
        whole = sum(there // size for there in room.values()) >= num_stages and room[home] >= size
        bundle, count = ({unit: float(size)}, num_stages) if whole else ({unit: 1.0}, needed)
        return unit, [bundle] * count, home

    def _reserve(self, unit: str, bundles: list[dict[str, float]], home: str) -> None:
        """Wait for the bundles, the first of which is on this node."""
        import ray

        at_home: list[dict[str, str]] = [{"ray.io/node-id": home}]
        self._bundles = ray.util.placement_group(
            bundles, strategy="PACK", bundle_label_selector=at_home + [{}] * (len(bundles) - 1)
        )
        until = time.monotonic() + _FREE_S
        while not self._bundles.wait(_LOOK_S):
            self._check_going_on()
            if time.monotonic() > until:
                free = int(ray.available_resources().get(unit, 0))
                raise UserError(
                    f"{describe_ranks(*self._sizes)}: within {_FREE_S:.0f} s Ray has not given "
                    f"{len(bundles)} x {bundles[0][unit]:.0f} {unit}, the first on this node; "
                    f"{free} of the cluster's are free; end what has the others: `ray status`"
                )

    def _call(self, unit: str, num_bundles: int) -> None:
        """Start an actor a rank, and wait until all have come."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        home = ray.util.get_node_ip_address()
        self.listener = _listen(home)
        self.store = f"{home}:{self.listener.getsockname()[1]}"
        with _listen(home) as listener:
            listener.settimeout(_LOOK_S)
            secret = secrets.token_bytes(32)
            amount = {"num_gpus": 1, "num_cpus": 0} if unit == "GPU" else {"num_cpus": 1}
            for rank in range(self._options.num_ranks):
                bundle = rank * num_bundles // self._options.num_ranks
                where = PlacementGroupSchedulingStrategy(self._bundles, bundle)
                kind = ray.remote(RankActor).options(**amount, scheduling_strategy=where)
                address = listener.getsockname()[:2]
                self._actors.append(kind.remote(rank, address, secret, str(Path.cwd())))
                self._runs.append(self._actors[-1].run.remote())
            until = time.monotonic() + _JOIN_S
            while missing := {*range(self._options.num_ranks)} - self._joined.keys():
                self._check_going_on()
                self._check_actors(missing)
                if time.monotonic() > until:
                    raise UserError(f"rank {min(missing)} has not come within {_JOIN_S:.0f} s")
                with suppress(TimeoutError):
                    self._greet(listener.accept()[0], secret)

    def _check_going_on(self) -> None:
        if self._over.is_set():
            raise UserError("the engine has ended")

    def _check_actors(self, missing: set[int]) -> None:
        """Raise what ended the actor of a rank that has not come."""
        import ray

        for rank in missing:
            if ray.wait([self._runs[rank]], timeout=0)[0]:
                try:
                    ray.get(self._runs[rank])
                except Exception as error:
                    line = (str(error).strip().splitlines() or [type(error).__name__])[-1]
                    raise UserError(f"rank {rank}{self._where(rank)}: {line}") from error

    def _where(self, rank: int) -> str:
        """The node to which Ray has given the bundle of a rank, for messages."""
        import ray

        nodes = ray.util.placement_group_table(self._bundles)["bundles_to_node_id"]
        node = nodes.get(rank * len(nodes) // self._options.num_ranks)
        addresses = [each["NodeManagerAddress"] for each in ray.nodes() if each["NodeID"] == node]
        return f" on Ray's node {addresses[0]}" if addresses else ""

    def _greet(self, end: socket.socket, secret: bytes) -> None:
        """Take a rank in; whoever does not know the secret is not listened to.

        Raises:
            UserError: something that ranks must have in common differs.
        """
        end.settimeout(_GREET_S)
        link = Link(end)
        try:
            if link.begins_with(secret):
                hello = _checked(link.receive()[1], end.getpeername()[0])
                end.settimeout(None)
                notice_lost_hosts(end)
                self._joined[hello.rank] = hello, link
        except (OSError, EOFError):
            pass  # who has left, or says nothing
        finally:
            if all(link is not theirs for _, theirs in self._joined.values()):
                link.close()


def _checked(body: bytes, address: str) -> Hello:
    try:
        hello = decode(body, Hello)
    except MsgspecError as error:
        raise UserError(f"Ray's node {address} has {_ANOTHER}") from error
    if differing := differences(versions(), hello.versions):
        raise UserError(
            f"Ray's node {address} has {_ANOTHER} (here -> there): {', '.join(map(str, differing))}"
        )
    return hello


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def _as_numbered_here(place: Place) -> Place:
    """Rank 0's place, whose process began before Ray gave it a GPU: it numbers its host's GPUs by
    its own environment.
    """
    names = place.visible_gpus.split(",")
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        numbers = [shown.split(",").index(name) if shown else int(name) for name in names]
    except ValueError as error:
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={shown or ''}: Ray gave ranks on this node the GPUs "
            f"{place.visible_gpus}, and all must be visible to rank 0; unset it"
        ) from error
    stage = tuple(numbers[gpu] for gpu in place.stage_gpus)
    return replace(place, gpu=numbers[place.gpu], stage_gpus=stage)
