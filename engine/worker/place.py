"""Where the ranks of a model run: who shares a host, and which GPU each has there."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

LOOPBACK = "127.0.0.1"


class Seat(Struct, frozen=True):
    """A host and a GPU that one rank has been given.

    Attributes:
        host: tells hosts apart.
        address: at which ranks of other hosts reach it.
        gpu: its GPU as ``CUDA_VISIBLE_DEVICES`` names it there; empty without.
    """

    host: str = ""
    address: str = LOOPBACK
    gpu: str = ""


class Place(Struct, frozen=True):
    """One rank among the others; ranks of the first stage come first.

    Attributes:
        size: ranks of a stage.
        address: at which ranks of other hosts reach it.
        visible_gpus: the value of ``CUDA_VISIBLE_DEVICES`` under which its process has the GPUs of
            all ranks of its host, in their order; empty to leave it.
        gpu: its GPU, as its process numbers them.
        stage_gpus: those of its stage's ranks; empty if they are on several hosts.
        first: the first rank of its stage on its host, whose artifact it loads.
    """

    rank: int
    size: int
    num_stages: int
    address: str
    visible_gpus: str
    gpu: int
    stage_gpus: tuple[int, ...]
    first: int


def places(size: int, num_stages: int, seats: Sequence[Seat] = ()) -> list[Place]:
    """The place of every rank; without ``seats`` all run on this host, each on the GPU of its own
    number."""
    seats = seats or [Seat()] * (size * num_stages)
    gpus = []
    for rank, seat in enumerate(seats):
        beside = [other for other, theirs in enumerate(seats) if theirs.host == seat.host]
        stage = range(rank // size * size, rank // size * size + size)
        gpus.append(
            Place(
                rank,
                size,
                num_stages,
                seat.address,
                ",".join(seats[other].gpu for other in beside) if seat.gpu else "",
                beside.index(rank),
                tuple(map(beside.index, stage)) if {*stage} <= {*beside} else (),
                next(other for other in stage if other in beside),
            )
        )
    return gpus
