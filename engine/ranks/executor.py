"""Chooses who starts the other ranks of an engine: this process, Ray or torchrun.

They start before rank 0 imports torch, so that all import it at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ...config import EngineOptions, UserError
from .cuda_start import start_cuda
from .ray import RayRanks
from .spawn import SpawnedRanks
from .torchrun import Torchrun

StartedRanks = SpawnedRanks | RayRanks


def start_others(options: EngineOptions) -> StartedRanks:
    """Start all ranks but 0.

    Raises:
        MachineError: Ray is asked for, but not installed.
    """
    if options.distributed_executor == "ray":
        return RayRanks(options)
    return SpawnedRanks(options.num_ranks - 1)


@contextmanager
def started_ranks(options: EngineOptions) -> Iterator[StartedRanks | None]:
    """Start CUDA's driver, and the other ranks of the engine that the block makes.  The engine ends
    these; if the block fails, they are ended here.  Yields None for one rank, and under torchrun,
    which starts ranks.

    Raises:
        UserError: torchrun's environment is damaged, or Ray was to start them too.
    """
    under_torchrun = Torchrun.of_environment() is not None
    if under_torchrun and options.distributed_executor == "ray":
        raise UserError(
            "distributed_executor=ray under torchrun: both start the ranks; use one of them"
        )
    if options.device != "cpu":
        start_cuda(alone=options.num_ranks == 1)
    if options.num_ranks == 1 or under_torchrun:
        yield None
        return
    started = start_others(options)
    try:
        yield started
    except BaseException:
        started.close()
        raise
