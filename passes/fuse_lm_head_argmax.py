"""``fuse_lm_head_argmax``: a second result of the graph, for steps that need tokens and no logits.

Before: the graph returns ``logits = linear(last, w)``, of which greedy decoding takes
``argmax(logits)``.  After: it returns ``lm_head_argmax(last, w)`` beside the logits; a step
computes one or the other (``Plan.greedy``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .report import PassReport
from .rule import EXACT, Context, is_call
from .subgraph import compute_fake


class FuseLMHeadArgmax:
    """Expected site: what the graph returns.

    Exact: the tokens are those of the rounded logits.  A kernel may sum in another order than the
    product that it replaces, and so decide a near-tie otherwise.
    """

    name = "fuse_lm_head_argmax"
    tier = EXACT

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        report = PassReport(self.name)
        (output,) = gm.graph.find_nodes(op="output")
        results: Any = output.args[0]
        if reason := _why_not(results):
            report.miss(str(results[0] if results else output), reason)
            return report
        (logits,) = results
        with gm.graph.inserting_before(output):
            argmax = gm.graph.call_function(torch.ops.fw.argmax.default, (logits,))
        argmax.meta["example_value"] = compute_fake(argmax)
        output.args = ((logits, argmax),)

        def build(graph: fx.Graph) -> list[fx.Node]:
            return [graph.call_function(torch.ops.fw.lm_head_argmax.default, logits.args[:2])]

        context.replace(self, argmax, old=[logits, argmax], outputs=[argmax], build=build)
        report.match(logits.name)
        return report


def _why_not(results: Any) -> str:
    """Between the gather of the last tokens and the end there must be the product alone: it is then
    a step of its own, the last one, that another can replace."""
    if len(results) != 1:
        return f"the graph returns {len(results)} values"
    (logits,) = results
    if not is_call(logits, torch.ops.fw.linear.default):
        return "the last step is not a linear layer"
    if len(logits.args) > 2 and logits.args[2] is not None:
        return "the head has a bias"
    last: Any = logits.args[0]
    if not is_call(last, torch.ops.fw.gather_last_token.default):
        return f"the head reads {last}, not the last token of each sequence"
    if logits.prev is not last or logits.next.op != "output":
        return "other calls run between the gather of the last tokens and the end"
    return ""
