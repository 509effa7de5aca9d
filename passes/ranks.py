"""Runs graphs that reduce over ranks in one process: a thread a rank, over gloo groups of its own.

A group of one rank would make every all-reduce the identity, and hide one that a rewrite drops,
doubles or moves.  So each group of the graph becomes pairs of ranks with inputs of their own.  With
several groups the ranks are the corners of a cube, and a group pairs those that differ in its
dimension: a rewrite that reduces over another group gives other sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import fx
from torch._C._distributed_c10d import (
    HashStore,
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    Store,
    _register_process_group,
    _unregister_process_group,
)

T = TypeVar("T")
_TIMEOUT = timedelta(seconds=30)
_RUNS = itertools.count()


def group_names(graphs: Iterable[fx.Graph]) -> list[str]:
    """The process groups that these graphs reduce over."""
    nodes = (node for graph in graphs for node in graph.nodes)
    found = {node.args[i] for node in nodes if (i := _group_argument(node.target)) is not None}
    return sorted(str(name) for name in found)


def num_ranks(names: Sequence[str]) -> int:
    """The number of ranks that ``run_ranks`` runs."""
    return 1 << len(names)


def run_ranks(names: Sequence[str], run: Callable[[int, Mapping[str, str]], T]) -> list[T]:
    """Run ``run(rank, groups)`` for every rank at once, where ``groups`` gives the rank's own name
    of each group.  Without names, one rank runs in this thread."""
    if not names:
        return [run(0, {})]
    store, this_run = HashStore(), next(_RUNS)

    def run_one(rank: int) -> T:
        with _groups(names, rank, store, this_run) as groups:
            return run(rank, groups)

    with ThreadPoolExecutor(num_ranks(names)) as pool:
        return list(pool.map(run_one, range(num_ranks(names))))


class RankInterpreter(fx.Interpreter):
    """Runs a graph as one rank; ``groups`` gives the rank's own name of each group."""

    def __init__(self, graph: fx.Graph, groups: Mapping[str, str]) -> None:
        super().__init__(torch.nn.Module(), graph=graph)
        self.groups = groups

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if (index := _group_argument(target)) is not None:
            args = (*args[:index], self.groups[args[index]], *args[index + 1 :])
        return super().call_function(target, args, kwargs)


def _group_argument(target: Any) -> int | None:
    """The position of the process group among the arguments of ``target``; None if it has none."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    names = [argument.name for argument in target._schema.arguments]
    return names.index("group_name") if "group_name" in names else None


@contextmanager
def _groups(
    names: Sequence[str], rank: int, store: Store, this_run: int
) -> Iterator[dict[str, str]]:
    made: dict[str, ProcessGroup] = {}
    try:
        for bit, name in enumerate(names):
            own = f"{name} of rank {rank} in run {this_run}"
            lowest = rank & ~(1 << bit)
            made[own] = _pair(PrefixStore(f"{bit}/{lowest}", store), rank >> bit & 1)
            made[own]._set_group_name(own)  # type: ignore[arg-type]
            _register_process_group(own, made[own])  # type: ignore[arg-type]
        yield dict(zip(names, made, strict=True))
    finally:
        for own in made:
            _unregister_process_group(own)  # type: ignore[arg-type]


def _pair(store: Store, rank: int) -> ProcessGroup:
    """Make a group of two ranks of this process; waits for the other one."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = _TIMEOUT
    gloo = ProcessGroupGloo(store, rank, 2, options)
    group = ProcessGroup(store, rank, 2)
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), ProcessGroup.BackendType.GLOO, gloo)
    return group
