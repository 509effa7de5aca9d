"""``fuse_gated_linear``: the gate and up projections and their gated activation in one kernel.

Before: ``y = silu_mul(linear(x, w))`` (or ``gelu_tanh_mul``).  After:
``y = gated_linear(x, w, "silu")``.  With few rows that is one kernel, which reads the weight as the
product did and writes a half of what it wrote; with many it runs as before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .report import PassReport
from .rule import EXACT, Context, is_call

_ACTIVATIONS = {"silu_mul": "silu", "gelu_tanh_mul": "gelu_tanh"}


class FuseGatedLinear:
    """Expected sites: every gated activation that ``fuse_act`` has raised.

    Exact: the products are rounded before the activation, as without fusion.  A kernel may sum them
    in another order than the kernel it replaces.
    """

    name = "fuse_gated_linear"
    tier = EXACT

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        report = PassReport(self.name)
        for act in list(gm.graph.nodes):
            found = [n for n in _ACTIVATIONS if is_call(act, getattr(torch.ops.fw, n).default)]
            if not found:
                continue
            product: Any = act.args[0]
            name, reason = act.name, _why_not(product)
            if any(up is not None for up in act.args[1:]):
                reason = "gate and up are two products"
            if reason:
                report.miss(name, reason)
                continue
            args = (product.args[0], product.args[1], _ACTIVATIONS[found[0]])

            def build(graph: fx.Graph, args: Any = args) -> list[fx.Node]:
                return [graph.call_function(torch.ops.fw.gated_linear.default, args)]

            context.replace(self, act, old=[product, act], outputs=[act], build=build)
            report.match(name)
        return report


def _why_not(product: Any) -> str:
    if is_call(product, torch.ops.fw.linear_fp8.default):
        return "the product is of FP8 matrices, for which there is no fused kernel"
    if not is_call(product, torch.ops.fw.linear.default):
        return f"its input comes from {product.name}, not from a linear layer"
    if len(product.users) > 1:
        return f"{product.name} has {len(product.users)} users, not the activation alone"
    if len(product.args) > 2 and product.args[2] is not None:
        return "the product has a bias"
    return ""
