"""``fuse_norm_moe`` joins a mixture of experts with the linear layers and norms on its both sides.

Before: ``y, r2 = add_rms_norm(linear(x, w[, b]), r, nw, eps); z = fused_moe(y, ...); y2, r3 =
add_rms_norm(z, r2, nw2, eps2); q = linear(y2, w2[, b2])``.  After: ``q, r3 =
linear_add_norm_moe(x, w, b, r, nw, eps, ..., nw2, eps2, w2, b2)``.  With few tokens five kernels
run where eight did: sums are made by the kernels whose results they are of, and norms are applied
where they are read.  With many, the experts' sum, the next sum and its norm are one kernel.  If all
layers but the router are FP8, what quantizes for the linear layers is joined too: few tokens are
not quantized then.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..ops.experts.moe import Call as Experts
from .fp8_layer import Fp8Layer
from .fuse_gated_linear import has_epilogue, linear_args
from .fuse_norm_linear import call_with_totals, items, summands
from .rule import EXACT, is_call, written_between
from .sites import Match, Miss, SitePass, read_elsewhere
from .subgraph import fake_value

_ADD_NORM = torch.ops.fw.add_rms_norm.default
_QUANTIZE = torch.ops.fw.quant_fp8_dynamic.default


@dataclass(frozen=True)
class _Layer:
    """A dense layer: its input (before quantization, if it is quantized), its arguments, and its
    nodes."""

    x: fx.Node
    args: dict[str, Any]
    nodes: list[fx.Node]

    @classmethod
    def of(cls, node: Any, experts: Experts) -> _Layer | None:
        """The layer that a node is; None if it is no linear layer, or has an epilogue.

        Raises:
            Miss: it is one, and is not quantized as the experts are.
        """
        made = linear_args(node)
        if made is None or has_epilogue(made):
            return None
        if (made["x_scale"] is None) is not (experts.gate_up_scale is None):
            kinds = ("FP8", "not") if made["x_scale"] is None else ("not FP8", "is")
            raise Miss(f"the experts are {kinds[0]}, a linear layer beside them {kinds[1]}")
        if experts.gate_up_scale is None:
            return cls(made["x"], made, [node])
        found = Fp8Layer.of(node, _QUANTIZE, experts.group_size)
        source: Any = found.quantizer.args[0]
        if made["out_dtype"] != fake_value(source).dtype:
            raise Miss(f"a linear layer beside the experts makes {made['out_dtype']}")
        return cls(source, made, [*found.nodes])


@dataclass(frozen=True)
class _Tail:
    """The norm and the layer behind the experts.  Where none can be joined they are empty, and
    ``why_not`` has the reason."""

    why_not: str
    nodes: list[fx.Node] = field(default_factory=list)
    args: tuple[Any, ...] = (None, 0.0, None, None)
    scale: Any = None
    totals: list[fx.Node] = field(default_factory=list)


def _read(moe: fx.Node) -> Match | None:
    """Expected sites: every ``fused_moe`` that reads a norm of a sum.

    Exact: the op rounds as the ops that it replaces do.  A kernel may round less often, since it
    applies a norm's scale to sums of what it reads, and does not quantize few tokens.
    """
    normed: Any = moe.args[0] if is_call(moe, torch.ops.fw.fused_moe.default) else None
    if not is_call(normed, operator.getitem) or not is_call(normed.args[0], _ADD_NORM):
        return None
    if normed.args[1] != 0:  # the experts read the sum itself
        return None
    norm, experts = normed.args[0], Experts(*list[Any](moe.args))
    before, residual = summands(norm)
    if reason := _why_not_experts(experts):
        raise Miss(reason)
    first = _Layer.of(before, experts)
    if first is None:
        raise Miss("what the norm adds does not come from a linear layer")
    if reason := _why_not(first, before, norm, normed, moe):
        raise Miss(reason)
    sums = items(norm, 1)
    tail = _tail(moe, sums, experts)
    args = (
        *(first.x, first.args["weight"], first.args["bias"], residual, *norm.args[2:4]),
        *(*experts[1:5], *experts[12:19], *tail.args),
        *(first.args["weight_scale"], experts.gate_up_scale, experts.down_scale, tail.scale),
        experts.group_size,
    )
    site, totals = (tail.nodes[-1], tail.totals) if tail.nodes else (moe, sums)
    old = [*first.nodes, norm, normed, *sums, moe, *tail.nodes, *totals]
    fused = call_with_totals(torch.ops.fw.linear_add_norm_moe.default, args, len(totals))
    left = f"without the norm and layer behind: {tail.why_not}" if tail.why_not else ""
    return Match(site, old, [site, *totals], fused, left=left)


def _why_not_experts(experts: Experts) -> str:
    if experts.gate_up_input_scale is not None or experts.down_input_scale is not None:
        return "the experts' inputs have static scales: they are quantized for any tokens"
    if experts.first_expert is not None:
        return "the experts are spread over ranks, whose sum is in between"
    return "" if experts.shared is None else "a shared expert reads the norm too"


def _why_not(first: _Layer, before: Any, norm: fx.Node, normed: fx.Node, moe: fx.Node) -> str:
    if any(offset is not None for offset in norm.args[4:]):
        return "the norm's weight has an offset"
    if norm.args[0] is norm.args[1]:
        return f"{before.name} is added to itself"
    for node, reader in ((before, norm), (normed, moe)):
        if reason := read_elsewhere(node, [reader]):
            return reason
    if len(items(norm, 0)) > 1:
        return f"the result of {norm.name} is also read elsewhere"
    early = [user for total in items(norm, 1) for user in total.users if user < moe]
    if early:
        return f"the sum is used before the experts, by {early[0].name}"
    return written_between(first.nodes[0], moe)


def _tail(moe: fx.Node, totals: list[fx.Node], experts: Experts) -> _Tail:
    """The norm of the experts' result and the sum before them, and the layer that reads it, if
    these are all that do."""
    norm = next(iter(moe.users)) if len(moe.users) == 1 else None
    readers = {user for total in totals for user in total.users}
    if norm is None or not is_call(norm, _ADD_NORM) or {*norm.args[:2]} != {moe, *totals}:
        return _Tail("no norm alone reads the sum with the residual")
    if readers != {norm}:
        return _Tail("the sum before the experts is also read elsewhere")
    if any(offset is not None for offset in norm.args[4:]):
        return _Tail("the norm's weight has an offset")
    normed, sums = items(norm, 0), items(norm, 1)
    node = _only_user(normed[0]) if len(normed) == 1 else None
    if is_call(node, _QUANTIZE):
        values = items(node, 0)
        node = _only_user(values[0]) if len(values) == 1 else None
    try:
        layer = _Layer.of(node, experts)
    except Miss as miss:
        return _Tail(str(miss))
    if layer is None or layer.x is not normed[0]:
        return _Tail("the norm does not go to one linear layer alone")
    if reason := written_between(moe, layer.nodes[-1]):
        return _Tail(reason)
    if any(user < layer.nodes[-1] for total in sums for user in total.users):
        return _Tail(f"the sum is used before {layer.nodes[-1].name}")
    args = (*norm.args[2:4], layer.args["weight"], layer.args["bias"])
    nodes = [norm, normed[0], *sums, *layer.nodes]
    return _Tail("", nodes, args, layer.args["weight_scale"], sums)


def _only_user(node: fx.Node) -> Any:
    return next(iter(node.users)) if len(node.users) == 1 else None


FUSE_NORM_MOE = SitePass("fuse_norm_moe", EXACT, _read)
