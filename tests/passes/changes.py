"""Ways to spoil a rewrite: a change of the call that it puts in place, or of the graph after it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

FW = torch.ops.fw
Index = int | tuple[int, int]
"""A position among arguments, or in one that is a list."""
Change = Callable[[fx.Node], None]
GraphChange = Callable[[fx.Graph], None]


def fused(graph: fx.Graph, *names: str) -> list[fx.Node]:
    """The calls of these ops, in order."""
    found = [getattr(FW, name).default for name in names]
    return [n for n in graph.nodes if n.op == "call_function" and n.target in found]


def argument(node: fx.Node, index: Index) -> Any:
    if isinstance(index, int):
        return node.args[index]
    outer, inner = index
    return node.args[outer][inner]  # type: ignore[index]


def set_argument(node: fx.Node, index: Index, value: Any) -> None:
    if isinstance(index, int):
        node.update_arg(index, value)
        return
    outer, inner = index
    items = list(node.args[outer])  # type: ignore[arg-type]
    items[inner] = value
    node.update_arg(outer, items)


def put(index: Index, value: Any) -> Change:
    return lambda node: set_argument(node, index, value)


def reword(old: str, new: str) -> Change:
    """The text of a chain has ``new`` for the first ``old``, if there is one."""

    def change(node: fx.Node) -> None:
        node.update_arg(3, str(node.args[3]).replace(old, new, 1))

    return change


def without_bias(at: int) -> Change:
    """The last layer of a chain that has a bias, operand ``at``, has none."""

    def change(node: fx.Node) -> None:
        operands = list(node.args[2])  # type: ignore[arg-type]
        del operands[at]
        node.update_arg(2, operands)
        before, _, after = str(node.args[3]).rpartition(", bias")
        node.update_arg(3, before + after)

    return change


def swap(i: Index, j: Index) -> Change:
    def change(node: fx.Node) -> None:
        old = argument(node, i), argument(node, j)
        set_argument(node, i, old[1])
        set_argument(node, j, old[0])

    return change


def same(i: Index, j: Index) -> Change:
    return lambda node: set_argument(node, i, argument(node, j))


def apply(index: Index, function: Any, *rest: Any) -> Change:
    """Argument ``index`` becomes ``function(argument, *rest)``, a method when given by name."""

    def change(node: fx.Node) -> None:
        with node.graph.inserting_before(node):
            args = (argument(node, index), *rest)
            method = isinstance(function, str)
            make = node.graph.call_method if method else node.graph.call_function
            set_argument(node, index, make(function, args))

    return change


def become(name: str) -> Change:
    def change(node: fx.Node) -> None:
        node.target = getattr(FW, name).default

    return change


def without_group(name: str) -> Change:
    """The op ``name``, which reduces over no ranks."""

    def change(node: fx.Node) -> None:
        node.target, node.args = getattr(FW, name).default, node.args[:-1]

    return change


def residual_of_every_rank(node: fx.Node) -> None:
    """Every rank adds the residual to its part of the sum."""
    apply(0, operator.add, node.args[1])(node)
    name = node.target._schema.name.removeprefix("fw::").replace("_add_", "_")  # type: ignore[union-attr]
    node.target, node.args = getattr(FW, name).default, (node.args[0], *node.args[2:])


def several(*changes: Change) -> Change:
    def change(node: fx.Node) -> None:
        for one in changes:
            one(node)

    return change


def out_in_place_of(dtype: torch.dtype) -> Change:
    def change(node: fx.Node) -> None:
        node.args[5].kwargs = {"dtype": dtype}  # type: ignore[union-attr]

    return change


def swap_between(op: str, index: Index) -> GraphChange:
    """Two calls of ``op`` exchange an argument."""

    def change(graph: fx.Graph) -> None:
        first, second, *_ = fused(graph, op)
        old = argument(first, index), argument(second, index)
        set_argument(first, index, old[1])
        set_argument(second, index, old[0])

    return change


def at(op: str, change: Change) -> GraphChange:
    return lambda graph: change(fused(graph, op)[0])


def like_the_first(op: str, index: Index) -> GraphChange:
    def change(graph: fx.Graph) -> None:
        first, second, *_ = fused(graph, op)
        set_argument(second, index, argument(first, index))

    return change


def drop(op: str) -> GraphChange:
    return lambda graph: graph.erase_node(fused(graph, op)[-1])


def skip(target: Any) -> GraphChange:
    """A call is dropped and its users read its argument."""

    def change(graph: fx.Graph) -> None:
        node = next(n for n in graph.nodes if n.target == target)
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)

    return change


def exchange_stores(graph: fx.Graph) -> None:
    first, second = fused(graph, "kv_store")
    second.append(first)


def to_the_end(op: str) -> GraphChange:
    def change(graph: fx.Graph) -> None:
        (output,) = graph.find_nodes(op="output")
        output.prepend(fused(graph, op)[0])

    return change


def stale_residual(graph: fx.Graph) -> None:
    """The second sum is of the model's residual input."""
    first, second = fused(graph, "add_rms_norm")
    second.update_arg(1, first.args[1])


def dropped_next_bias(graph: fx.Graph) -> None:
    without_bias(3)(fused(graph, "chain")[-1])


def other_item(graph: fx.Graph) -> None:
    """Who read the residual of the first norm reads its normed output."""
    call = fused(graph, "add_rms_norm")[0]
    by_index = {user.args[1]: user for user in call.users}
    by_index[1].args = (call, 0)


def part_as_sum(graph: fx.Graph) -> None:
    """Who read the sum over ranks reads what this rank gave to it."""
    (call,) = fused(graph, "all_reduce_rms_norm")
    total = {user.args[1]: user for user in call.users}[1]
    total.replace_all_uses_with(call.args[0])


def swapped_results(graph: fx.Graph) -> None:
    (output,) = graph.find_nodes(op="output")
    output.args = (tuple(reversed(output.args[0])),)


def wrong_constant(graph: fx.Graph) -> None:
    node = next(n for n in graph.nodes if n.target is operator.truediv)
    node.args = (node.args[0], 3.01)
