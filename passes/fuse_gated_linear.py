"""``fuse_gated_linear`` joins the gate and up projections and their gated activation.

Before: ``y = silu_mul(linear(x, w))`` (or ``gelu_tanh_mul``).  After:
``y = gated_linear(x, w, "silu")``.  With few rows that is one kernel, which reads the weight as the
linear layer did and writes half as much; with many rows it runs as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple
from typing import Any

import torch
from torch import fx

from ..ops.gated_act import PLAIN, Gate, activation_of
from .report import PassReport
from .rule import EXACT, Context, is_call, written_between


class FuseGatedLinear:
    """Expected sites: every gated activation that ``fuse_act`` has raised, except those of FP8
    linear layers.

    Exact: gate and up are rounded before the activation, as without fusion.  A kernel may sum in
    another order than the kernel that it replaces.
    """

    name = "fuse_gated_linear"
    tier = EXACT

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        report = PassReport(self.name)
        for act, activation in gated_activations(gm):
            product: Any = act.args[0]
            if is_call(product, torch.ops.fw.linear_fp8.default):
                continue
            name, reason = act.name, _why_not(product, act)
            if reason:
                report.miss(name, reason)
                continue
            args = (product.args[0], product.args[1], activation)

            def build(graph: fx.Graph, args: Any = args) -> list[fx.Node]:
                return [graph.call_function(torch.ops.fw.gated_linear.default, args)]

            context.replace(self, act, old=[product, act], outputs=[act], build=build)
            report.match(name)
        return report


def gated_activations(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, str]]:
    """Every gated activation, with its name as the fused ops take it."""
    for node in list(gm.graph.nodes):
        if activation := activation_of(node.target):
            yield node, activation


def why_not_packed(act: fx.Node, sources: str) -> str:
    """Why not to fuse: the fused kernels take two halves of one tensor, without attributes."""
    if any(up is not None for up in act.args[1:2]):
        return f"gate and up are two {sources}"
    if act.args[2:] not in ((), astuple(PLAIN)):
        return f"it is {Gate(*act.args[2:])}, for which there is no fused kernel"  # type: ignore[arg-type]
    return ""


def _why_not(product: Any, act: fx.Node) -> str:
    if reason := why_not_packed(act, "products"):
        return reason
    if not is_call(product, torch.ops.fw.linear.default):
        return f"its input comes from {product.name}, not from a linear layer"
    if len(product.args) > 2 and product.args[2] is not None:
        return "the product has a bias"
    return why_not_alone_between(product, act)


def why_not_alone_between(product: fx.Node, act: fx.Node) -> str:
    """Why not to fuse: somebody else reads the product, which would disappear, or writes to what it
    reads before the activation."""
    if len(product.users) > 1:
        return f"{product.name} has {len(product.users)} users, not the activation alone"
    return written_between(product, act)
