"""``cleanup``: drops what computes nothing.

Before: ``x.view(x.shape)``, ``x.to(x.dtype)``, ``x.contiguous()`` of a contiguous tensor, sizes
read back from tensors, values nobody uses.  After: ``x`` itself, the size's graph input, nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from .report import PassReport
from .rule import EXACT, Context, is_call, writes
from .subgraph import fake_value

_RESHAPES = ("view", "reshape", torch.reshape, "flatten", torch.flatten)
_CASTS = ("to", "contiguous", "float", "type_as")


class Cleanup:
    """Removes no-op reshapes, casts and copies, reads of known sizes, and dead code."""

    name = "cleanup"
    tier = EXACT

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        report = PassReport(self.name)
        sizes = _size_inputs(gm)
        for node in list(gm.graph.nodes):
            replacement = _noop_input(node) or _known_size(node, sizes)
            if replacement is not None:
                node.replace_all_uses_with(replacement)
                gm.graph.erase_node(node)
                report.match(node.name)
        before = {node.name for node in gm.graph.nodes}
        gm.graph.eliminate_dead_code(writes)
        for name in sorted(before - {node.name for node in gm.graph.nodes}):
            report.match(name)
        return report


def _size_inputs(gm: fx.GraphModule) -> dict[str, fx.Node]:
    sizes: dict[str, fx.Node] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder" and isinstance(fake_value(node), torch.SymInt):
            sizes[str(fake_value(node))] = node
    return sizes


def _known_size(node: fx.Node, sizes: dict[str, fx.Node]) -> fx.Node | None:
    value: Any = node.meta.get("example_value")
    if node.op == "placeholder" or not isinstance(value, torch.SymInt):
        return None
    return sizes.get(str(value))


def _noop_input(node: fx.Node) -> fx.Node | None:
    """The input that this node returns unchanged (same data, shape, strides, dtype), if any."""
    if not is_call(node, *_RESHAPES, *_CASTS) or not isinstance(node.args[0], fx.Node):
        return None
    before, after = fake_value(node.args[0]), fake_value(node)
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return None
    same = (
        before.dtype == after.dtype
        and before.device == after.device
        and tuple(before.shape) == tuple(after.shape)
        and before.stride() == after.stride()
    )
    copies = node.kwargs.get("copy", False)
    return node.args[0] if same and not copies else None
