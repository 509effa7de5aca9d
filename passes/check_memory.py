"""Proves that a pass left every value in the memory, and in the state, in which it was read before.

``check_effects`` numbers values by what computes them, and cannot see that a buffer was written to
since.  Here the content of a value is named: by what computed it from which contents, and by how
often its memory was written to since.  So numbers change when two writers come to share a buffer,
when a view takes the place of a copy, and when a read moves past a write.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from .rule import Rewrite, written
from .subgraph import fake_value
from .value_numbering import ValueNumbering, changes_nothing, key_of

Buffer: TypeAlias = tuple[fx.Node, int]
"""A piece of memory, identified by the node that first held it and by which of its tensors did."""


class Contents:
    """The contents of a graph's nodes, of what they read, and of its results.

    Attributes:
        numbers: the content of each node when it was made.
        reads: the contents of each node's arguments when it read them.
        results: the contents of the graph's results at its end.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        numbering: ValueNumbering,
        given: Mapping[fx.Node, int] | None = None,
    ) -> None:
        self.numbering, self.given = numbering, given or {}
        self.numbers: dict[fx.Node, int] = {}
        self.reads: dict[fx.Node, dict[fx.Node, int]] = {}
        self._buffers: dict[fx.Node, dict[int, Buffer]] = {}  # by storage
        self._writes: dict[Buffer, int] = {}
        self._made: dict[fx.Node, tuple[int, ...]] = {}  # writes to its buffers before it was made
        self.results: Any = ()
        for node in gm.graph.nodes:
            reads = {arg: self._now(arg) for arg in node.all_input_nodes}
            if node.op == "output":
                self.results = key_of(node.args[0], reads)
            else:
                self.reads[node] = reads
                self._visit(node)

    def _visit(self, node: fx.Node) -> None:
        self._place(node)
        for target in written(node):
            for buffer in self._buffers[target].values():
                self._writes[buffer] = self._writes.get(buffer, 0) + 1
        named = node in self.given  # an output of a rewrite, be it a view of all of something
        same: Any = node.args[0] if changes_nothing(node) and not named else None
        if same is not None and set(self._buffers[node]) == set(self._buffers[same]):
            self.numbers[node], self._made[node] = self.numbers[same], self._made[same]
            return
        number = self.given.get(node)
        self.numbers[node] = self.numbering.of(node, self.reads[node]) if number is None else number
        self._made[node] = self._state(node)

    def _place(self, node: fx.Node) -> None:
        """Set the buffers that hold the node's value: those of an argument whose storage it shares,
        else new ones."""
        known = {s: b for arg in node.all_input_nodes for s, b in self._buffers[arg].items()}
        storages = dict.fromkeys(
            value.untyped_storage()._cdata
            for value in tree_leaves(fake_value(node))
            if isinstance(value, Tensor)
        )
        self._buffers[node] = {s: known.get(s, (node, i)) for i, s in enumerate(storages)}

    def _state(self, node: fx.Node) -> tuple[int, ...]:
        return tuple(self._writes.get(buffer, 0) for buffer in self._buffers[node].values())

    def _now(self, node: fx.Node) -> int:
        since = tuple(
            now - then for now, then in zip(self._state(node), self._made[node], strict=True)
        )
        number = self.numbers[node]
        return self.numbering.number(("written", number, since)) if any(since) else number


def why_other_contents(before: Contents, gm: fx.GraphModule, rewrites: Iterable[Rewrite]) -> str:
    """Say which node holds or reads something else than before the pass; "" if none does."""
    rewrites = list(rewrites)
    given: dict[fx.Node, int] = {}
    for rewrite in rewrites:
        for old, new in zip(rewrite.before.outputs, rewrite.after.outputs, strict=True):
            known = before.numbers.get(old, given.get(old))
            given[new] = before.numbering.number(("made", old.name)) if known is None else known
    after = Contents(gm, before.numbering, given)
    for node, number in after.numbers.items():
        if before.numbers.get(node, number) != number and node not in given:
            return f"{node.format_node()} reads memory in another state, or other memory"
    for rewrite in rewrites:
        read = {number for _, number in _read_outside(before, rewrite.before.nodes)}
        for node, number in _read_outside(after, rewrite.after.nodes):
            if number not in read:
                return f"the rewrite at {rewrite.site} reads {node.name} in another state"
    for index, (was, now) in enumerate(zip(before.results, after.results, strict=False)):
        if was != now:
            return f"result {index} is returned in another state"
    return ""


def _read_outside(contents: Contents, nodes: Sequence[fx.Node]) -> list[tuple[fx.Node, int]]:
    """(tensor, its content) for everything that these nodes read and do not make."""
    return [
        (arg, number)
        for node in nodes
        for arg, number in contents.reads.get(node, {}).items()
        if arg not in nodes and not isinstance(fake_value(arg), torch.SymInt)
    ]
