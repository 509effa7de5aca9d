"""``fold_views`` takes back views that lead to where they started.

Before: ``x.transpose(0, 1).transpose(0, 1)``, or with a copy in between.  After: ``x.detach()``, or
``x.clone()``, which ``cleanup`` drops.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ..canonicalize import kind
from ..report import PassReport
from ..rule import EXACT, Context, is_call, memory, refresh_view, written
from ..sites import Match, SitePass
from ..subgraph import fake_value, layout

_VIEWS = ("transpose", "permute", "squeeze", "unsqueeze", "select", "t")
_KINDS = ("view", "expand", "unsqueeze", "select", "slice", "item")


def _read(changed: set[int], node: fx.Node) -> Match | None:
    """Expected sites: every view that has place, sizes and strides of a tensor that it is made of
    by two views or more; and every copy that has order, sizes and strides of one that it is made of
    by several transpositions and copies, none of which is written to (``changed``)."""
    if kind(node) == "clone":
        return _read_copy(changed, node)
    passed: list[fx.Node] = []
    start, first = node, 0
    source: Any = node
    while _is_view(source):
        passed.append(source)
        source = source.args[0]
        if len(passed) > 1 and _is_same(source, node):
            start, first = source, len(passed)
    if not first:
        return None

    def build(graph: fx.Graph) -> list[fx.Node]:
        return [graph.call_method("detach", (start,))]

    return Match(node, passed[:first], [node], build)


def _read_copy(changed: set[int], node: fx.Node) -> Match | None:
    order = list(range(fake_value(node).dim()))
    passed: list[fx.Node] = []
    source: Any = node
    while isinstance(source, fx.Node) and (moved := reordered(source, order)) is not None:
        passed.append(source)
        source, order = source.args[0], moved
        if len(passed) > 1 and order == sorted(order) and _is_alike(source, node):
            break
    else:
        return None
    if memory(source, *passed) & changed:
        return None

    def build(graph: fx.Graph) -> list[fx.Node]:
        return [graph.call_method("clone", (source,))]

    return Match(node, passed, [node], build)


def reordered(node: fx.Node, order: list[int]) -> list[int] | None:
    """The dimensions of a node's argument in the order of ``order``, which are the node's; None if
    it does more than to order them or to copy."""
    if kind(node) == "clone":
        return order
    dims: Any = node.args[1:]
    if is_call(node, "transpose", torch.ops.aten.transpose.int):
        a, b = (dim % len(order) for dim in dims)
        swap = {a: b, b: a}
        return [swap.get(dim, dim) for dim in order]
    if is_call(node, "permute") and isinstance(dims[0], (list, tuple)):
        return [dims[0][dim] % len(order) for dim in order]
    return None


def _is_view(node: Any) -> bool:
    """Whether a node is a view of its first argument, a tensor."""
    if not isinstance(node, fx.Node) or not (is_call(node, *_VIEWS) or _reads_as_view(node)):
        return False
    source = node.args[0]
    tensors = isinstance(source, fx.Node) and isinstance(fake_value(source), Tensor)
    return tensors and memory(node) == memory(source)  # type: ignore[arg-type]


def _reads_as_view(node: fx.Node) -> bool:
    return kind(node) in _KINDS or getattr(node.target, "is_view", False)


def _is_alike(a: Any, b: fx.Node) -> bool:
    left = fake_value(a) if isinstance(a, fx.Node) else None
    return layout(left) is not None and layout(left) == layout(fake_value(b))


def _is_same(a: Any, b: fx.Node) -> bool:
    left, right = fake_value(a), fake_value(b)
    return _is_alike(a, b) and str(left.storage_offset()) == str(right.storage_offset())


class FoldViews:
    """See ``_read``; no site is expected, so none is reported.  What earlier passes replaced lies
    in other memory than its views know."""

    name = "fold_views"
    tier = EXACT

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        for node in gm.graph.nodes:
            refresh_view(node)
        changed = {one for node in gm.graph.nodes for one in memory(*written(node))}
        SitePass(self.name, self.tier, partial(_read, changed))(gm, context)
        return PassReport(self.name)
