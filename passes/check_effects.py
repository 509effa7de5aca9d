"""Proves that a pass changed nothing but what it declared: results and writes stay the same terms.

Each value is numbered by what computes it (value numbering: Alpern, Wegman, Zadeck, 1988): its op
and the numbers of its arguments.  Outputs of a rewrite take the numbers of what they replace, which
``verify.check_rewrite`` has proven on data.  Then the graph's results and the sequence of its
writes to memory must have the same numbers before and after, and what is read must be in the same
state (``check_memory``).  No data is needed, so the check costs little on a whole model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from .check_memory import Contents, why_other_contents
from .rule import Rewrite, writes_shared
from .subgraph import Subgraph
from .value_numbering import ValueNumbering, key_of


class Snapshot:
    """The value numbers in a graph before a pass: those of every node, of its results, and of its
    writes in order.  ``epochs`` counts the writes before each node; ``writers`` are the nodes that
    write."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.numbering = ValueNumbering()
        self.numbers: dict[fx.Node, int] = {}
        self.writes: list[int] = []
        self.epochs: dict[fx.Node, int] = {}
        self.writers: set[fx.Node] = set()
        self.contents = Contents(gm, ValueNumbering())
        for node in gm.graph.nodes:
            if node.op == "output":
                self.results = key_of(node.args[0], self.numbers)
                continue
            self.epochs[node] = len(self.writes)
            self.numbers[node] = self.numbering.of(node, self.numbers)
            if _writes(node):
                self.writes.append(self.numbers[node])
                self.writers.add(node)


def _writes(node: fx.Node) -> bool:
    return node.op not in ("placeholder", "output") and writes_shared(node)


def why_not_the_same(before: Snapshot, gm: fx.GraphModule, rewrites: Iterable[Rewrite]) -> str:
    """Say what the pass did besides its ``rewrites``; "" if nothing."""
    rewrites = list(rewrites)
    numbering = before.numbering
    given: dict[fx.Node, int] = {}  # output of a rewrite -> the number of what it replaces
    made: dict[fx.Node, int] = {}  # output of a rewrite -> its number by what must compute it
    stores: dict[int, int] = {}  # write by a rewrite -> the number of the write that it replaces
    for rewrite in rewrites:
        numbers = [_number(n, before, given) for n in rewrite.before.inputs]
        old_outputs, old_writes = _apply(numbering, rewrite.before, numbers)
        new_outputs, new_writes = _apply(numbering, rewrite.after, numbers)
        for node, number in zip(rewrite.before.outputs, old_outputs, strict=True):
            if before.numbers.get(node, number) != number:
                return f"it rewrote another {node.name} than the graph's"
        given |= zip(rewrite.after.outputs, old_outputs, strict=True)
        made |= zip(rewrite.after.outputs, new_outputs, strict=True)
        if len(old_writes) != len(new_writes):
            return (
                f"the rewrite at {rewrite.site} has {len(new_writes)} writes to memory for "
                f"{len(old_writes)}"
            )
        stores |= zip(new_writes, old_writes, strict=True)
    if reason := _difference(before, gm, given, made, stores):
        return reason
    return why_other_contents(before.contents, gm, rewrites)


def _number(node: fx.Node, before: Snapshot, given: dict[fx.Node, int]) -> int:
    """The number of an input of a rewrite, which may be a node that the pass itself made."""
    known = before.numbers.get(node, given.get(node))
    if known is not None:
        return known
    args = {arg: _number(arg, before, given) for arg in node.all_input_nodes}
    return before.numbering.of(node, args)


def _apply(
    numbering: ValueNumbering, side: Subgraph, inputs: list[int]
) -> tuple[list[int], list[int]]:
    """(numbers of the results, numbers of the writes) of one side of a rewrite."""
    graph = side.module.graph
    numbers = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    stores: list[int] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        numbers[node] = numbering.of(node, numbers)
        if _writes(node):
            stores.append(numbers[node])
    (output,) = graph.find_nodes(op="output")
    return [numbers[node] for node in output.args[0]], stores


def _difference(
    before: Snapshot,
    gm: fx.GraphModule,
    given: dict[fx.Node, int],
    made: dict[fx.Node, int],
    stores: dict[int, int],
) -> str:
    numbers: dict[fx.Node, int] = {}
    written: list[int] = []
    results: Any = ()
    for node in gm.graph.nodes:
        if node.op == "output":
            results = key_of(node.args[0], numbers)
            continue
        epoch = before.epochs.get(node, len(written))
        if epoch != len(written) and node.op != "placeholder":
            return f"{node.name} ran after {epoch} writes to memory, now after {len(written)}"
        number = before.numbering.of(node, numbers)
        if made.get(node, number) != number:
            return f"{node.format_node()} is not what the rewrite declared"
        numbers[node] = given.get(node, number)
        # Who reads the memory may have gone; what was a write stays one.
        if node in before.writers if node in before.epochs else _writes(node):
            written.append(stores.get(number, number))
    if written != before.writes:
        at = [old == new for old, new in zip(before.writes, written, strict=False)]
        first = at.index(False) if False in at else len(at)
        return (
            f"the writes to memory are no longer the same, from the {first + 1}th on "
            f"({len(before.writes)} before, {len(written)} after)"
        )
    for index, (old, new) in enumerate(zip(before.results, results, strict=False)):
        if old != new:
            return f"result {index} of the graph is computed in another way"
    if len(results) < len(before.results):
        return f"{len(before.results)} results became {len(results)}"
    return ""
