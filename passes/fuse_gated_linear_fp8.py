"""``fuse_gated_linear_fp8`` joins FP8 gate and up projections, their gated activation and the
quantization of its result by a static scale.

Before: ``q = quant_fp8_static(silu_mul(linear_fp8(x, s, w, ws)), qs)`` (or ``gelu_tanh_mul``).
After: ``q = gated_linear_fp8(x, s, w, ws, dtype, "silu", qs)``.  With few rows that is one kernel,
which writes a quarter of what the linear layer wrote; with many it runs as with ``fuse_act_quant``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .fuse_gated_linear import gated_activations, why_not_alone_between, why_not_packed
from .report import PassReport
from .rule import EXACT, Context, is_call, written_between
from .subgraph import fake_value


class FuseGatedLinearFp8:
    """Expected sites: every gated activation of an FP8 product.

    Exact: gate and up are rounded before the activation, and its result before it is quantized, as
    without fusion.  A kernel may sum in another order than the kernel it replaces.
    """

    name = "fuse_gated_linear_fp8"
    tier = EXACT

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        report = PassReport(self.name)
        for act, activation in gated_activations(gm):
            product: Any = act.args[0]
            if not is_call(product, torch.ops.fw.linear_fp8.default):
                continue
            name, reason = act.name, _why_not(product, act)
            if reason:
                report.miss(name, reason)
                continue
            (quant,) = act.users
            args = (*product.args[:4], product.args[5], activation, quant.args[1])

            def build(graph: fx.Graph, args: Any = args) -> list[fx.Node]:
                return [graph.call_function(torch.ops.fw.gated_linear_fp8.default, args)]

            context.replace(self, quant, old=[product, act, quant], outputs=[quant], build=build)
            report.match(name)
        return report


def _why_not(product: fx.Node, act: fx.Node) -> str:
    if reason := why_not_packed(act, "products"):
        return reason
    quant, *others = act.users
    if others or not is_call(quant, torch.ops.fw.quant_fp8_static.default):
        return "the result is not quantized by a static scale alone: no launch would be saved"
    if fake_value(product.all_input_nodes[3]).shape[1] > 1:
        return "the product has scales of blocks, for which there is no fused kernel"
    if product.args[4] is not None:
        return "the product has a bias"
    return why_not_alone_between(product, act) or written_between(act, quant)
