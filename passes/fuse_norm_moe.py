"""``fuse_norm_moe`` joins a mixture of experts with the linear layers and norms on its both sides.

Before: ``y, r2 = add_rms_norm(linear(x, w[, b]), r, nw, eps); z = fused_moe(y, ...); y2, r3 =
add_rms_norm(z, r2, nw2, eps2); q = linear(y2, w2[, b2])``.  After: ``q, r3 =
linear_add_norm_moe(x, w, b, r, nw, eps, ..., nw2, eps2, w2, b2)``.  With few tokens five kernels
run where eight did: sums are made by the kernels whose results they are of, and norms are applied
where they are read.  With many, the experts' sum, the next sum and its norm are one kernel.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..ops._moe import Call as Experts
from .fuse_gated_linear import has_epilogue, linear_args
from .fuse_norm_linear import call_with_totals, items, summands
from .rule import EXACT, is_call, written_between
from .sites import Match, Miss, SitePass, read_elsewhere

_ADD_NORM = torch.ops.fw.add_rms_norm.default


@dataclass(frozen=True)
class _Tail:
    """The norm and the layer behind the experts; empty where none can be joined."""

    nodes: list[fx.Node] = field(default_factory=list)
    args: tuple[Any, ...] = (None, 0.0, None, None)
    totals: list[fx.Node] = field(default_factory=list)


def _read(moe: fx.Node) -> Match | None:
    """Expected sites: every ``fused_moe`` that reads a norm of a sum.

    Exact: the op rounds as the ops that it replaces do.  A kernel may round less often, since it
    applies a norm's scale to sums of what it reads.
    """
    normed: Any = moe.args[0] if is_call(moe, torch.ops.fw.fused_moe.default) else None
    if not is_call(normed, operator.getitem) or not is_call(normed.args[0], _ADD_NORM):
        return None
    if normed.args[1] != 0:  # the experts read the sum itself
        return None
    norm, experts = normed.args[0], Experts(*list[Any](moe.args))
    first, residual = summands(norm)
    if reason := _why_not(first, norm, normed, moe, experts):
        raise Miss(reason)
    made = linear_args(first) or {}
    sums = items(norm, 1)
    tail = _tail(moe, sums)
    args = (
        *(made["x"], made["weight"], made["bias"], residual, *norm.args[2:4]),
        *(*experts[1:5], *experts[12:19], *tail.args),
    )
    site, totals = (tail.nodes[-1], tail.totals) if tail.nodes else (moe, sums)
    old = [first, norm, normed, *sums, moe, *tail.nodes, *totals]
    fused = call_with_totals(torch.ops.fw.linear_add_norm_moe.default, args, len(totals))
    return Match(site, old, [site, *totals], fused)


def _why_not(first: Any, norm: fx.Node, normed: fx.Node, moe: fx.Node, experts: Experts) -> str:
    made = linear_args(first)
    if experts.gate_up_scale is not None:
        return "the experts are FP8, whose input is quantized behind the norm"
    if experts.first_expert is not None:
        return "the experts are spread over ranks, whose sum is in between"
    if experts.shared is not None:
        return "a shared expert reads the norm too"
    if made is None or has_epilogue(made):
        return "what the norm adds does not come from a linear layer"
    if made["x_scale"] is not None:
        return "what the norm adds comes from an FP8 layer, for which there is no fused kernel"
    if any(offset is not None for offset in norm.args[4:]):
        return "the norm's weight has an offset"
    for node, reader in ((first, norm), (normed, moe)):
        if reason := read_elsewhere(node, [reader]):
            return reason
    if len(items(norm, 0)) > 1:
        return f"the result of {norm.name} is also read elsewhere"
    early = [user for total in items(norm, 1) for user in total.users if user < moe]
    if early:
        return f"the sum is used before the experts, by {early[0].name}"
    return written_between(first, moe)


def _tail(moe: fx.Node, totals: list[fx.Node]) -> _Tail:
    """The norm of the experts' result and the sum before them, and the layer that reads it, if
    these are all that do."""
    norm = next(iter(moe.users)) if len(moe.users) == 1 else None
    readers = {user for total in totals for user in total.users}
    if norm is None or not is_call(norm, _ADD_NORM) or readers != {norm}:
        return _Tail()
    if {*norm.args[:2]} != {moe, *totals} or any(o is not None for o in norm.args[4:]):
        return _Tail()
    normed, sums = items(norm, 0), items(norm, 1)
    layer = next(iter(normed[0].users)) if len(normed) == 1 and len(normed[0].users) == 1 else None
    then = linear_args(layer)
    if layer is None or then is None or has_epilogue(then) or then["x_scale"] is not None:
        return _Tail()
    early = [user for total in sums for user in total.users if user < layer]
    if early or then["x"] is not normed[0] or written_between(moe, layer):
        return _Tail()
    args = (*norm.args[2:4], then["weight"], then["bias"])
    return _Tail([norm, normed[0], *sums, layer], args, sums)


FUSE_NORM_MOE = SitePass("fuse_norm_moe", EXACT, _read)
