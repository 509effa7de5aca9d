"""Measures tiles of experts on all GPUs of this machine at once, for ``fusewright tune moe``.

Each GPU has a process of its own; one GPU alone is measured in the process of the command.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import astuple
from multiprocessing.connection import Connection
from typing import Any

import torch

from ...compiler.lowering.tune_experts import ExpertMeasure, Measure
from ...config import MachineError
from ...config.expert_tables import Experts, ExpertTile
from ...engine.ranks.lifetime import end_with, how_ended


def gpus_like_the_first() -> list[int]:
    """The indices of the GPUs that are of the same model as the first: a table is for one model."""
    names = [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]
    return [gpu for gpu, name in enumerate(names) if name == names[0]]


@contextmanager
def measures(experts: Experts, gpus: Sequence[int]) -> Iterator[list[Measure]]:
    """Yields a measure for each GPU.  Their processes end with the block."""
    if len(gpus) == 1:
        yield [ExpertMeasure(experts)]
        return
    with ExitStack() as stack:
        yield [stack.enter_context(closing(GpuProcess(gpu, _measure_on, experts))) for gpu in gpus]


def _measure_on(gpu: int, experts: Experts) -> Measure:
    torch.cuda.set_device(gpu)
    return ExpertMeasure(experts)


class GpuProcess:
    """Times tiles on one GPU, by the measure that ``make(gpu, *args)`` makes in a process of its
    own.  An instance is a ``Measure``."""

    def __init__(self, gpu: int, make: Callable[..., Measure], *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._gpu, (self._end, other) = gpu, context.Pipe()
        call = (other, os.getpid(), make, gpu, *args)
        self._process = context.Process(target=_answer_all, args=call, daemon=True)
        self._process.start()
        other.close()

    def __call__(self, tokens: int, tiles: Sequence[ExpertTile]) -> list[float]:
        """Microseconds of each tile.

        Raises:
            MachineError: the process has ended.
        """
        try:
            self._end.send_bytes(json.dumps([tokens, [*map(astuple, tiles)]]).encode())
            times: list[float] = json.loads(self._end.recv_bytes())
        except (EOFError, OSError) as error:
            self._process.join()
            how = how_ended(self._process.exitcode or 0)
            raise MachineError(
                f"GPU {self._gpu}: its process ended at {tokens} tokens with {how}; what was found "
                "is kept: run it again"
            ) from error
        return times

    def close(self) -> None:
        """End the process, also in the middle of a measurement."""
        self._process.kill()
        self._process.join()
        self._end.close()


def _answer_all(asked: Connection, parent: int, make: Callable[..., Measure], *args: Any) -> None:
    end_with(parent)
    measure = make(*args)
    while True:
        tokens, tiles = json.loads(asked.recv_bytes())
        times = measure(tokens, [ExpertTile(*tile) for tile in tiles])
        asked.send_bytes(json.dumps(times).encode())
