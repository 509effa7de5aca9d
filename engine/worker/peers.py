"""The other ranks of a model, as the stages of a worker's start meet them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from ...compiler.artifacts.artifact import Artifact
from ...compiler.artifacts.key import Key
from ...compiler.artifacts.store import Store
from ...config import StoreConfig
from ...model_executor.parallel import GROUP
from ...ops._process_group import process_group
from .source import artifact_store

_TIMEOUT = timedelta(seconds=120)
"""Longest time that a rank waits for the others in a collective; they are watched besides."""


class RankGroup:
    """The process group of a model's ranks, and what workers exchange in it beside the program.

    Args:
        store: the file through which the ranks meet.
        device: of the tensors; "cuda" ones go over NCCL, others over gloo.
    """

    def __init__(self, store: Path, rank: int, world: int, device: str) -> None:
        self.rank, self._device, self._stack = rank, device, ExitStack()
        self._group = self._stack.enter_context(
            process_group(
                GROUP,
                FileStore(str(store), world),
                rank,
                world,
                timeout=_TIMEOUT,
                on_gpus=device == "cuda",
            )
        )

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite ``tensor`` by that of rank 0; enqueued on the current stream."""
        torch.ops._c10d_functional.broadcast_(tensor, 0, GROUP)
        torch.ops._c10d_functional.wait_tensor(tensor)

    def least(self, value: int) -> int:
        """The smallest of all ranks' values."""
        tensor = torch.tensor([value], dtype=torch.int64, device=self._device)
        torch.ops._c10d_functional.all_reduce_(tensor, "min", GROUP)
        return int(torch.ops._c10d_functional.wait_tensor(tensor).item())

    def abort(self) -> None:
        """Make collectives that wait for a lost rank end.  Those of gloo do so by themselves."""
        if self._device == "cuda":
            self._group.abort()

    def close(self) -> None:
        """Leave the group."""
        self._stack.close()


class Peers(Protocol):
    """The calls of a worker's start, in this order; ``store`` and ``share`` only where a program is
    compiled.  Each may raise what ended another rank."""

    @property
    def rank(self) -> int: ...

    def check(self) -> None:
        """Raises if a rank has ended."""

    def agree(self, key: Callable[[], Key]) -> None:
        """Refuses ranks that would run another program than rank 0."""

    def store(self, config: StoreConfig) -> AbstractContextManager[Store]:
        """Where the program is looked for; ranks other than 0 wait until rank 0 has it."""

    def share(self, artifact: Artifact) -> None:
        """Called within the context of ``store`` when the program is loaded."""

    def meet(self) -> RankGroup | None:
        """Waits until all ranks have program and weights; their group, None for one rank."""


class Alone:
    """One rank has no peers."""

    rank = 0

    def check(self) -> None:
        """Nobody else can have ended."""

    def agree(self, key: Callable[[], Key]) -> None:
        """Nobody else has a key."""

    @contextmanager
    def store(self, config: StoreConfig) -> Iterator[Store]:
        with artifact_store(config) as store:
            yield store

    def share(self, artifact: Artifact) -> None:
        """Nobody else waits for it."""

    def meet(self) -> RankGroup | None:
        return None
