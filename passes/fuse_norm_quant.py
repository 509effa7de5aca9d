"""``fuse_norm_quant`` joins [add +] RMSNorm and the FP8 quantization of its result in one kernel.

Before: ``y[, r] = [add_]rms_norm(...); q[, s] = quant_fp8_*(y, ...)``.  After:
``q[, s][, r] = [add_]rms_norm_quant_*(...)``.  The normed tensor is neither written nor read, and a
launch is saved.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ._quant import fused_op, quantizations, unpacked, why_not_alone, why_not_before
from .report import PassReport
from .rule import EXACT, Context, is_call


class FuseNormQuant:
    """Expected sites: every FP8 quantization of the result of a norm.

    Exact: the norm is rounded to the model's dtype before it is quantized, as without fusion.
    """

    name = "fuse_norm_quant"
    tier = EXACT

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        report = PassReport(self.name)
        for quant in quantizations(gm):
            norm = _norm_of(quant.source)
            if norm is None:
                continue
            name, adds = quant.node.name, norm is not quant.source
            op, count = ("add_rms_norm", 4) if adds else ("rms_norm", 3)
            reason = why_not_alone(quant.source, quant) or why_not_before(quant, norm)
            if any(offset is not None for offset in norm.args[count:]):
                reason = "its weight has an offset, for which there is no fused kernel"
            if reason:
                report.miss(name, reason)
                continue
            target, args = fused_op(op, quant), (*norm.args[:count], quant.how)
            outputs = [*quant.outputs, *([_total_of(norm)] if adds else [])]

            def build(
                graph: fx.Graph, target: Any = target, args: Any = args, count: int = len(outputs)
            ) -> list[fx.Node]:
                return unpacked(graph, graph.call_function(target, args), count)

            old = sorted({norm, quant.source, *quant.nodes, *outputs})
            context.replace(self, norm, old=old, outputs=outputs, build=build)
            report.match(name)
        return report


def _norm_of(source: Any) -> Any:
    """The norm whose normed output ``source`` is: ``source`` itself, or one that also adds."""
    if is_call(source, torch.ops.fw.rms_norm.default):
        return source
    if not is_call(source, operator.getitem) or source.args[1] != 0:
        return None
    norm: Any = source.args[0]
    return norm if is_call(norm, torch.ops.fw.add_rms_norm.default) else None


def _total_of(norm: fx.Node) -> fx.Node:
    """The sum of an ``add_rms_norm``, as one node.  It is made if nobody reads it, since the fused
    op returns it too."""
    totals = [user for user in norm.users if user.args[1] == 1]
    if not totals:
        with norm.graph.inserting_after(norm):
            total = norm.graph.call_function(operator.getitem, (norm, 1))
        total.meta["example_value"] = norm.meta["example_value"][1]
        return total
    for again in totals[1:]:
        again.replace_all_uses_with(totals[0])
    return totals[0]
