"""Reads FP8 quantizations, for the passes that fold one into the kernel before it."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .rule import is_call


@dataclass(frozen=True)
class Quant:
    """One quantization.  ``outputs`` are its values and, if it is dynamic, its scales; ``how`` is
    its argument after the tensor: the static scale, or the group size."""

    node: fx.Node
    kind: str
    source: Any
    how: Any
    outputs: tuple[fx.Node, ...]

    @property
    def nodes(self) -> list[fx.Node]:
        return sorted({self.node, *self.outputs})


def quantizations(gm: fx.GraphModule) -> Iterator[Quant]:
    """Every FP8 quantization of the graph, in order."""
    for node in list(gm.graph.nodes):
        if is_call(node, torch.ops.fw.quant_fp8_static.default):
            yield Quant(node, "static", node.args[0], node.args[1], (node,))
        elif is_call(node, torch.ops.fw.quant_fp8_dynamic.default):
            items = {u.args[1]: u for u in node.users if is_call(u, operator.getitem)}
            if len(items) == len(node.users) == 2:
                yield Quant(node, "dynamic", node.args[0], node.args[1], (items[0], items[1]))


def fused_op(name: str, quant: Quant) -> Any:
    """``fw::<name>_quant_static`` or ``_dynamic``."""
    return getattr(torch.ops.fw, f"{name}_quant_{quant.kind}").default


def unpacked(graph: fx.Graph, call: fx.Node, count: int) -> list[fx.Node]:
    """The ``count`` results of a call, as nodes."""
    if count == 1:
        return [call]
    return [graph.call_function(operator.getitem, (call, i)) for i in range(count)]


def why_not_alone(source: fx.Node, quant: Quant) -> str:
    """Why not to fuse ``quant`` with ``source``: somebody else reads the unquantized tensor, which
    would disappear."""
    others = [user for user in source.users if user is not quant.node]
    if others:
        return f"{source.name} is also read unquantized, by {others[0].name}"
    return ""


def why_not_before(quant: Quant, site: fx.Node) -> str:
    """Why not to fuse ``quant`` at ``site``: its static scale is not known there yet."""
    if isinstance(quant.how, fx.Node) and not quant.how < site:
        return f"the scale {quant.how.name} is not known before {site.name}"
    return ""
