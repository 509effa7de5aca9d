"""``fold_views`` takes back views that lead to where they started.

Before: ``x.transpose(0, 1).transpose(0, 1)``.  After: ``x.detach()``, which ``cleanup`` drops.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from .canonicalize import kind
from .report import PassReport
from .rule import EXACT, Context, is_call, memory, refresh_view
from .sites import Match, SitePass
from .subgraph import fake_value, layout

_VIEWS = ("transpose", "permute", "squeeze", "unsqueeze", "select", "t")
_KINDS = ("view", "expand", "clone", "unsqueeze", "select", "slice", "item")


def _read(node: fx.Node) -> Match | None:
    """Expected sites: every view that has place, sizes and strides of a tensor that it is made of
    by two views or more."""
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


def _is_view(node: Any) -> bool:
    """Whether a node is a view of its first argument, a tensor."""
    if not isinstance(node, fx.Node) or not (is_call(node, *_VIEWS) or _reads_as_view(node)):
        return False
    source = node.args[0]
    tensors = isinstance(source, fx.Node) and isinstance(fake_value(source), Tensor)
    return tensors and memory(node) == memory(source)  # type: ignore[arg-type]


def _reads_as_view(node: fx.Node) -> bool:
    return kind(node) in _KINDS or getattr(node.target, "is_view", False)


def _is_same(a: Any, b: fx.Node) -> bool:
    left, right = fake_value(a), fake_value(b)
    if layout(left) is None or layout(left) != layout(right):
        return False
    return str(left.storage_offset()) == str(right.storage_offset())


class FoldViews:
    """See ``_read``.  What earlier passes replaced lies in other memory than its views know."""

    name = "fold_views"
    tier = EXACT

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        for node in gm.graph.nodes:
            refresh_view(node)
        return SitePass(self.name, self.tier, _read)(gm, context)
