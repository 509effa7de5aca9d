"""``fuse_act_quant`` joins the gated activation and the FP8 quantization of its result.

Before: ``y = silu_mul(x); q[, s] = quant_fp8_*(y, ...)`` (or ``gelu_tanh_mul``).  After:
``q[, s] = silu_mul_quant_*(x, ...)``, one kernel.  This saves a write and a read of the activation,
and a launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ._quant import fused_op, quantizations, unpacked, why_not_alone, why_not_before
from .fuse_gated_linear import why_not_packed
from .report import PassReport
from .rule import EXACT, Context, is_call

_ACTS = ("silu_mul", "gelu_tanh_mul")


class FuseActQuant:
    """Expected sites: every FP8 quantization of a gated activation, which ``fuse_act`` has raised.

    Exact: the product is rounded to the model's dtype before it is quantized, as without fusion.
    """

    name = "fuse_act_quant"
    tier = EXACT

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        report = PassReport(self.name)
        for quant in quantizations(gm):
            act = quant.source
            raised = [a for a in _ACTS if is_call(act, getattr(torch.ops.fw, a).default)]
            if not raised:
                continue
            name = quant.node.name
            reason = why_not_packed(act, "tensors, for which there is no fused kernel")
            reason = reason or why_not_alone(act, quant) or why_not_before(quant, act)
            if reason:
                report.miss(name, reason)
                continue
            target, args = fused_op(raised[0], quant), (act.args[0], quant.how)

            def build(
                graph: fx.Graph,
                target: Any = target,
                args: Any = args,
                count: int = len(quant.outputs),
            ) -> list[fx.Node]:
                return unpacked(graph, graph.call_function(target, args), count)

            old = sorted({act, *quant.nodes})
            context.replace(self, act, old=old, outputs=quant.outputs, build=build)
            report.match(name)
        return report
