"""Proof that a pass changed nothing but what it declared: results and writes stay the same terms.

Each value is named by what computes it (value numbering: Alpern, Wegman, Zadeck, 1988): its op and
the names of its arguments.  Outputs of a rewrite take the names of what they replace, which
``verify.check_rewrite`` has proven on data.  Then the graph's results and the sequence of its
writes to memory must bear the same names before and after.  No data, so that it costs little on a
whole model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from .rule import Rewrite, is_call, writes_shared
from .subgraph import Subgraph, fake_value

_NOOPS = ("view", "reshape", "flatten", "to", "contiguous", "float", "type_as")
_NOOP_FUNCTIONS = (torch.reshape, torch.flatten)
_SIZE = "size"


@dataclass
class Names:
    """Numbers terms: equal numbers for equal terms."""

    numbers: dict[Any, int] = field(default_factory=dict)

    def number(self, term: Any) -> int:
        return self.numbers.setdefault(term, len(self.numbers))

    def of(self, node: fx.Node, args: dict[fx.Node, int]) -> int:
        """The number of ``node``, whose arguments have the numbers ``args``."""
        value = fake_value(node)
        if isinstance(value, torch.SymInt):
            return self.number((_SIZE, str(value)))
        if node.op == "placeholder":
            return self.number((node.op, node.name))
        if _changes_nothing(node):
            return args[node.args[0]]  # type: ignore[index]
        return self.number((node.op, node.target, _key(node.args, args), _key(node.kwargs, args)))


def _key(arg: Any, numbers: dict[fx.Node, int]) -> Any:
    if isinstance(arg, fx.Node):
        return ("node", numbers[arg])
    if isinstance(arg, (list, tuple)):
        return tuple(_key(item, numbers) for item in arg)
    if isinstance(arg, dict):
        return tuple((name, _key(item, numbers)) for name, item in sorted(arg.items()))
    if isinstance(arg, slice):
        return ("slice", *(_key(part, numbers) for part in (arg.start, arg.stop, arg.step)))
    return (type(arg).__name__, str(arg))


def _changes_nothing(node: fx.Node) -> bool:
    """Whether the node returns its first argument: same memory, shape, strides and dtype."""
    if not is_call(node, *_NOOPS, *_NOOP_FUNCTIONS) or node.kwargs.get("copy"):
        return False
    if len(node.args) > 3 or not isinstance(node.args[0], fx.Node):
        return False  # to(device, dtype, non_blocking, copy)
    old, new = fake_value(node.args[0]), fake_value(node)
    if not isinstance(old, Tensor) or not isinstance(new, Tensor):
        return False
    same_type = old.dtype == new.dtype and old.device == new.device
    return same_type and tuple(old.shape) == tuple(new.shape) and old.stride() == new.stride()


class Snapshot:
    """The names in a graph before a pass: of every node, of its results, of its writes in order;
    ``epochs`` counts the writes before each node."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.names = Names()
        self.numbers: dict[fx.Node, int] = {}
        self.writes: list[int] = []
        self.epochs: dict[fx.Node, int] = {}
        for node in gm.graph.nodes:
            if node.op == "output":
                self.results = _key(node.args[0], self.numbers)
                continue
            self.epochs[node] = len(self.writes)
            self.numbers[node] = self.names.of(node, self.numbers)
            if _writes(node):
                self.writes.append(self.numbers[node])


def _writes(node: fx.Node) -> bool:
    return node.op not in ("placeholder", "output") and writes_shared(node)


def why_not_the_same(before: Snapshot, gm: fx.GraphModule, rewrites: Iterable[Rewrite]) -> str:
    """What the pass did besides its ``rewrites``, or nothing."""
    names = before.names
    given: dict[fx.Node, int] = {}  # outputs of rewrites: the names of what they replace
    made: dict[fx.Node, int] = {}  # and the names that they must have by what computes them
    stores: dict[int, int] = {}  # writes by rewrites: the names of those that they replace
    for rewrite in rewrites:
        numbers = [_number(n, before, given) for n in rewrite.before.inputs]
        old_outputs, old_writes = _apply(names, rewrite.before, numbers)
        new_outputs, new_writes = _apply(names, rewrite.after, numbers)
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
    return _difference(before, gm, given, made, stores)


def _number(node: fx.Node, before: Snapshot, given: dict[fx.Node, int]) -> int:
    """The name of an input of a rewrite, which may be a node that the pass itself made."""
    known = before.numbers.get(node, given.get(node))
    if known is not None:
        return known
    args = {arg: _number(arg, before, given) for arg in node.all_input_nodes}
    return before.names.of(node, args)


def _apply(names: Names, side: Subgraph, inputs: list[int]) -> tuple[list[int], list[int]]:
    """(names of the results, names of the writes) of one side of a rewrite."""
    graph = side.module.graph
    numbers = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    stores: list[int] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        numbers[node] = names.of(node, numbers)
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
            results = _key(node.args[0], numbers)
            continue
        epoch = before.epochs.get(node, len(written))
        if epoch != len(written) and node.op != "placeholder":
            return f"{node.name} ran after {epoch} writes to memory, now after {len(written)}"
        number = before.names.of(node, numbers)
        if made.get(node, number) != number:
            return f"{node.format_node()} is not what the rewrite declared"
        numbers[node] = given.get(node, number)
        if _writes(node):
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
