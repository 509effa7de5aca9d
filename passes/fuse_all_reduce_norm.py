"""``fuse_all_reduce_norm`` joins the sum over ranks and the norm that reads it in one op.

Before: ``s = all_reduce(x, group); y = rms_norm(s, ...)``, or ``add_rms_norm(s, r, ...)``, either
also with ``_quant_static`` or ``_quant_dynamic``.  After: ``y, s = all_reduce_rms_norm(x, ...,
group)``; with an add ``y, r = all_reduce_add_rms_norm(x, r, ..., group)``.  A kernel that reduces
over peer memory normalizes what it holds, which saves a write and a read of the sum, and a launch.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..ops.norm.norm import Norm, has_axes, norm_axes, with_axes
from .report import PassReport
from .rule import EXACT, Context, is_call, written_between


class FuseAllReduceNorm:
    """Expected sites: every ``all_reduce``.  The pass runs after ``fuse_add_norm`` and
    ``fuse_norm_quant``, which make one op of what follows, so one rule serves every combination.

    Exact: the sum is rounded to the tensors' dtype before anything reads it, as without fusion, and
    an addition's operands may change places.
    """

    name = "fuse_all_reduce_norm"
    tier = EXACT

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        report = PassReport(self.name)
        all_reduce = torch.ops.fw.all_reduce.default
        for reduce in gm.graph.find_nodes(op="call_function", target=all_reduce):
            name = reduce.name
            norm = min((user for user in reduce.users if _is_norm(user)), default=None)
            reason = _why_not(reduce, norm)
            if reason or norm is None:
                report.miss(name, reason)
                continue
            args, results = _arguments(reduce, norm), _results(reduce, norm)

            def build(
                graph: fx.Graph, norm: Any = norm, args: Any = args, results: Any = results
            ) -> list[fx.Node]:
                call = graph.call_function(with_axes(norm.target, reduce=True), args)
                items = results.values()
                return [graph.call_function(operator.getitem, (call, i)) for i in items]

            old = sorted({reduce, norm, *results})
            context.replace(self, norm, old=old, outputs=list(results), build=build)
            report.match(name)
        return report


def _is_norm(node: fx.Node) -> bool:
    axes = norm_axes(node.target)
    return axes is not None and not axes.reduce


def _axes(norm: fx.Node) -> Norm:
    axes = norm_axes(norm.target)
    assert axes is not None
    return axes


def _schema(norm: fx.Node) -> Any:
    return norm.target._schema  # type: ignore[union-attr]


def _why_not(reduce: fx.Node, norm: fx.Node | None) -> str:
    readers = list(reduce.users)
    if norm is None:
        names = ", ".join(reader.name for reader in readers)
        return f"its sum is read by {names}, not by a norm" if names else "nobody reads its sum"
    if reduce not in norm.args[: 1 + _axes(norm).add] or norm.args[0] is norm.args[1]:
        return f"{norm.name} does not normalize the sum, or adds it to itself"
    if _axes(norm).center:
        return f"{norm.name} reads its sum, for which there is no kernel over ranks"
    if not has_axes(norm.target, reduce=True):
        return f"{norm.name} quantizes to int8, for which there is no kernel over ranks"
    others = [reader for reader in readers if reader is not norm]
    if _axes(norm).add and others:
        return f"the sum is also read without the residual, by {others[0].name}"
    early = [reader for reader in others if reader < norm]
    if early:
        return f"the sum is used before the norm, by {early[0].name}"
    if len(_schema(norm).returns) > 1:
        whole = [user for user in norm.users if not is_call(user, operator.getitem)]
        if whole:
            return f"the results of {norm.name} are read whole, by {whole[0].name}"
    return written_between(reduce, norm)


def _arguments(reduce: fx.Node, norm: fx.Node) -> tuple[Any, ...]:
    """The norm's arguments with the summand in place of the sum, which comes first."""
    x, group_name = reduce.args
    left_out = _schema(norm).arguments[len(norm.args) :]
    args = [*norm.args, *(norm.kwargs.get(a.name, a.default_value) for a in left_out)]
    if args[0] is not reduce:
        args[:2] = args[1::-1]
    return (x, *args[1:], group_name)


def _results(reduce: fx.Node, norm: fx.Node) -> dict[fx.Node, Any]:
    """The nodes that hold results -> which result of the fused op each of them is."""
    count = len(_schema(norm).returns)
    found = {norm: 0} if count == 1 else {user: user.args[1] for user in norm.users}
    return found if _axes(norm).add else {**found, reduce: count}
