"""Measures tiles of experts on all GPUs of this machine at once, for ``fusewright tune moe``.

Each GPU has a process of its own, which runs this module.  It reads requests from its standard
input, each a line of JSON with a number of tokens and tiles, and answers each with a line of times.
One GPU alone is measured in the process of the command.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import astuple
from typing import TextIO

import torch

from ...compiler.lowering.tune_experts import ExpertMeasure, Measure
from ...config import MachineError
from ...config.expert_tables import Experts, ExpertTile
from ...engine.ranks.lifetime import end_with, how_ended


def gpus_like_the_first() -> list[int]:
    """The indices of the GPUs that are of the same model as the first: a file of tiles is for one
    model."""
    names = [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]
    return [gpu for gpu, name in enumerate(names) if name == names[0]]


@contextmanager
def measures(experts: Experts, gpus: Sequence[int]) -> Iterator[list[Measure]]:
    """Yields a measure for each GPU.  Their processes end with the block."""
    if len(gpus) == 1:
        yield [ExpertMeasure(experts)]
        return
    command = [sys.executable, "-P", "-m", __name__, json.dumps(astuple(experts))]
    with ExitStack() as stack:
        commands = [[*command, str(gpu), str(os.getpid())] for gpu in gpus]
        yield [
            stack.enter_context(closing(GpuProcess(gpu, words)))
            for gpu, words in zip(gpus, commands, strict=True)
        ]


class GpuProcess:
    """Times tiles on one GPU, in a process of its own.  An instance is a ``Measure``."""

    def __init__(self, gpu: int, command: Sequence[str]) -> None:
        self._gpu = gpu
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def __call__(self, tokens: int, tiles: Sequence[ExpertTile]) -> list[float]:
        """Microseconds of each tile.

        Raises:
            MachineError: the process has ended.
        """
        to, answers = self._process.stdin, self._process.stdout
        assert to is not None and answers is not None
        try:
            print(json.dumps([tokens, [*map(astuple, tiles)]]), file=to, flush=True)
            answer = answers.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            how = how_ended(self._process.wait())
            raise MachineError(
                f"GPU {self._gpu}: its process ended at {tokens} tokens with {how}; what was found "
                "is kept: run it again"
            )
        times: list[float] = json.loads(answer)
        return times

    def close(self) -> None:
        """End the process, also in the middle of a measurement."""
        self._process.kill()
        with suppress(BrokenPipeError), self._process:  # waits, and closes the pipes
            pass


def answer_all(measure: Measure, asked: TextIO, answers: TextIO) -> None:
    for line in asked:
        tokens, tiles = json.loads(line)
        times = measure(tokens, [ExpertTile(*tile) for tile in tiles])
        print(json.dumps(times), file=answers, flush=True)


def main() -> None:
    experts, gpu, parent = sys.argv[1:]
    end_with(int(parent))
    # Libraries print to standard output, which would be read as an answer, so that goes to stderr.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        torch.cuda.set_device(int(gpu))
        answer_all(ExpertMeasure(Experts(*json.loads(experts))), sys.stdin, answers)


if __name__ == "__main__":
    main()
