"""Splits a graph at its attention ops into an ordered list of regions.

A region between two splits becomes one compiled piece.  A split op, or a region of a single op,
is called directly: there is nothing in it for a compiler to fuse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...passes import Subgraph, external_inputs, extract, fake_value

SPLIT_OPS: tuple[Any, ...] = (
    torch.ops.fw.paged_attention.default,
    torch.ops.fw.gather_last_token.default,
)
"""Attention reads lengths on the device and stays out of piecewise graphs; from the gather on,
rows are sequences instead of tokens."""


@dataclass(frozen=True)
class Region:
    """Consecutive nodes, the values that they read, and those that later regions use."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]

    @property
    def is_single_op(self) -> bool:
        return len(self.nodes) == 1 and isinstance(self.nodes[0].target, torch._ops.OpOverload)

    def subgraph(self) -> Subgraph:
        return extract(self.nodes, self.outputs, self.inputs)


def partition(gm: fx.GraphModule) -> list[Region]:
    """Split ``gm`` into regions in execution order.  Every node that computes something is in
    exactly one."""
    groups: list[list[fx.Node]] = [[]]
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op not in ("call_function", "call_method"):
            raise RuntimeError(f"unexpected {node.op} node {node.name} in a captured graph")
        if node.target in SPLIT_OPS:
            groups += [[node], []]
        else:
            groups[-1].append(node)
    return [_region(group) for group in groups if group]


def _region(nodes: list[fx.Node]) -> Region:
    inside, inputs = set(nodes), external_inputs(nodes)
    outputs = [n for n in nodes if any(user not in inside for user in n.users)]
    symbols = _size_inputs(nodes[0].graph, [*inputs, *nodes])
    return Region(tuple(nodes), tuple(dict.fromkeys([*inputs, *symbols])), tuple(outputs))


def _size_inputs(graph: fx.Graph, nodes: list[fx.Node]) -> list[fx.Node]:
    """Graph inputs that carry the symbols in these nodes' shapes.  A compiled piece needs each
    symbol that it mentions as an argument."""
    mentioned: set[str] = set()
    for node in nodes:
        mentioned |= {str(s) for s in free_symbols(fake_value(node))}
    return [
        node
        for node in graph.find_nodes(op="placeholder")
        if isinstance(fake_value(node), torch.SymInt) and str(fake_value(node)) in mentioned
    ]


def free_symbols(value: Any) -> set[Any]:
    """Size symbols in the shapes of a fake value."""
    if isinstance(value, torch.Tensor):
        return set().union(*(free_symbols(d) for d in value.shape))
    if isinstance(value, (list, tuple)):
        return set().union(*(free_symbols(v) for v in value))
    return set(value.node.expr.free_symbols) if isinstance(value, torch.SymInt) else set()
