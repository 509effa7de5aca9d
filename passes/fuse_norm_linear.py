"""``fuse_norm_linear`` joins a linear layer into the residual stream and the next one out of it.

Before: ``y, r2 = add_rms_norm(linear(x, w[, b]), r, nw, eps); z = linear(y, w2[, b2, ...])``.
After: ``z, r2 = linear_add_norm_linear(x, w, b, r, nw, eps, w2, b2, activation)``.  With few rows
two kernels run where three did: the first adds the residual to its own result, and the second
normalizes that as it reads it.  With many rows it runs as before.
"""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from torch import fx

from .fuse_gated_linear import has_epilogue, linear_args
from .report import PassReport
from .rule import EXACT, Context, is_call, written_between


class FuseNormLinear:
    """Expected sites: every ``add_rms_norm`` whose normed result goes to ``linear``.  The first
    norm of a model is none, since it adds nothing, nor is the last, which goes to the gather of
    last tokens.  FP8 layers are none either: x is quantized between the norm and the layer.  A norm
    behind a sum over ranks is a site of ``fuse_all_reduce_norm``, whose kernel normalizes.

    Exact: the op rounds as the ops that it replaces do.  A kernel may round less often, since it
    applies the norm's scale to the sums.
    """

    name = "fuse_norm_linear"
    tier = EXACT

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        report = PassReport(self.name)
        for second in list(gm.graph.nodes):
            then = linear_args(second)
            normed: Any = then["x"] if then else None
            if then is None or not is_call(normed, operator.getitem) or normed.args[1] != 0:
                continue
            norm: Any = normed.args[0]
            if not is_call(norm, torch.ops.fw.add_rms_norm.default):
                continue
            if any(is_call(x, torch.ops.fw.all_reduce.default) for x in norm.args[:2]):
                continue
            name, (first, residual) = second.name, _operands(norm)
            reason = _why_not(first, norm, normed, second)
            if reason:
                report.miss(name, reason)
                continue
            made = linear_args(first) or {}
            args = (
                *(made[name] for name in ("x", "weight", "bias")),
                *(residual, *norm.args[2:4]),
                *(then[name] for name in ("weight", "bias", "activation")),
            )
            totals = [user for user in norm.users if user.args[1] == 1]

            def build(graph: fx.Graph, args: Any = args, count: int = len(totals)) -> list[fx.Node]:
                fused = graph.call_function(torch.ops.fw.linear_add_norm_linear.default, args)
                y, total = (graph.call_function(operator.getitem, (fused, i)) for i in (0, 1))
                return [y, *[total] * count]

            old = sorted([first, norm, normed, *totals, second])
            context.replace(self, second, old=old, outputs=[second, *totals], build=build)
            report.match(name)
        return report


def _operands(norm: fx.Node) -> tuple[Any, Any]:
    """The norm's two summands; if one of them is a linear layer, it comes first."""
    x, residual = norm.args[:2]
    return (residual, x) if linear_args(residual) and not linear_args(x) else (x, residual)


def _what(node: Any) -> str:
    """What a node calls, without its number: the same for every layer."""
    schema = getattr(node.target, "_schema", None)
    return schema.name.partition("::")[2] if schema else re.sub(r"_\d+$", "", node.name)


def _why_not(first: Any, norm: fx.Node, normed: fx.Node, second: fx.Node) -> str:
    made = linear_args(first)
    if made is None or has_epilogue(made):
        return f"what it adds comes from {_what(first)}, not from a linear layer"
    if made["x_scale"] is not None:
        return f"{first.name} has FP8 operands, for which there is no fused kernel"
    if any(offset is not None for offset in norm.args[4:]):
        return "the norm's weight has an offset"
    if norm.args[0] is norm.args[1]:
        return f"{first.name} is added to itself"
    for node, reader in ((first, norm), (normed, second)):
        others = [user for user in node.users if user is not reader]
        if others:
            return f"{node.name} is also read by {others[0].name}"
    if sum(user.args[1] == 0 for user in norm.users) > 1:
        return f"the result of {norm.name} is also read elsewhere"
    early = [user for total in norm.users for user in total.users if user < second]
    if early:
        return f"the sum is used before {second.name}, by {early[0].name}"
    return written_between(first, second)
