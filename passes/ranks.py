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
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import fx
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from ..ops.collective.process_group import process_group

T = TypeVar("T")
_TIMEOUT = timedelta(seconds=120)
"""Longest time that a rank waits for another, whose thread may be held up on a busy machine."""
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
    made: dict[str, str] = {}
    with ExitStack() as stack:
        for bit, name in enumerate(names):
            made[name] = f"{name} of rank {rank} in run {this_run}"
            pair = PrefixStore(f"{bit}/{rank & ~(1 << bit)}", store)
            stack.enter_context(
                process_group(made[name], pair, rank >> bit & 1, 2, timeout=_TIMEOUT, on_gpus=False)
            )
        yield made
