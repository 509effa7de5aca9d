"""``fuse_norm_mlp`` joins the FP8 layers of a decoder between two attentions, with what quantizes
for them.

Before: ``q = quant_fp8_dynamic(x); y = linear(q, w[, b]); q2, r2 = add_rms_norm_quant_dynamic(y, r,
nw, eps); q3 = silu_mul_quant_dynamic(linear(q2, gu)); z = linear(q3, d); q4, r3 =
add_rms_norm_quant_dynamic(z, r2, nw2, eps2); p = linear(q4, w2[, b2])``, where each q comes with
its scales.  After: ``p, r3 = linear_add_norm_mlp(x, w, b, r, nw, eps, gu, d, ...)``.  With few
tokens four kernels run where eight did, on activations that are not quantized.  With more it runs
as before.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from ..ops.launches.quant import WHOLE_ROW
from ..ops.norm.gated_act import GATED_ACTS
from ..ops.norm.norm import norm_axes
from .fp8_layer import Fp8Layer
from .fuse_gated_linear import linear_args
from .fuse_norm_linear import call_with_totals, items, summands
from .rule import EXACT, is_call, written_between
from .sites import Match, Miss, SitePass, read_elsewhere
from .subgraph import fake_value

_QUANTIZE = torch.ops.fw.quant_fp8_dynamic.default
_ADD_NORM = torch.ops.fw.add_rms_norm_quant_dynamic.default
_ACTIVATIONS = {
    op.overload(): name for (name, quant), op in GATED_ACTS.items() if quant == "dynamic"
}


class _Tail(NamedTuple):
    """The layer behind the MLP, with the op's arguments for it.  Where none can be joined they are
    empty, and ``why_not`` has the reason."""

    why_not: str
    layer: Fp8Layer | None = None
    args: tuple[Any, ...] = (None, 0.0, None, None)
    scale: Any = None


def _read(act: fx.Node) -> Match | None:
    """Expected sites: every gated activation that quantizes by scales of its own result.

    Exact: the op rounds as the ops that it replaces do.  The kernels for few tokens round less
    often, since they multiply activations that are not quantized.
    """
    activation = _ACTIVATIONS.get(act.target)
    if activation is None:
        return None
    if (size := act.args[1]) != WHOLE_ROW:
        raise Miss(f"it quantizes by a scale for each {size} columns, the fused op by one a token")
    if _is_behind_sum(act.args[0]):
        raise Miss("a sum over ranks comes before its norm: fuse_all_reduce_norm joins these")
    gate_up = Fp8Layer.of(act.args[0], _ADD_NORM)
    norm = gate_up.quantizer
    before, residual = summands(norm)
    first = Fp8Layer.of(before, _QUANTIZE)
    down = Fp8Layer.of(_reader(act), act.target)
    sums = items(norm, 2)
    if reason := _why_not(first, norm, gate_up, act, down, sums):
        raise Miss(reason)
    tail = _tail(down, sums)
    last = tail.layer or down
    totals = items(last.quantizer, 2) if tail.layer else sums
    args = (
        *(first.quantizer.args[0], first.args["weight"], first.args["bias"], residual),
        *(*norm.args[2:4], gate_up.args["weight"], down.args["weight"], activation, *tail.args),
        *(layer.args["weight_scale"] for layer in (first, gate_up, down)),
        tail.scale,
    )
    old = [*first.nodes, *gate_up.nodes, *down.nodes, *last.nodes, *sums, *totals]
    fused = call_with_totals(torch.ops.fw.linear_add_norm_mlp.default, args, len(totals))
    left = f"without the norm and layer behind: {tail.why_not}" if tail.why_not else ""
    return Match(last.node, old, [last.node, *totals], fused, left=left)


def _is_behind_sum(gate_up: Any) -> bool:
    """Whether the norm before a layer reads a sum over ranks, or makes it."""
    x: Any = (linear_args(gate_up) or {"x": None})["x"]
    norm: Any = x.args[0] if is_call(x, operator.getitem) else None
    axes = norm_axes(getattr(norm, "target", None))
    if axes is None:
        return False
    return axes.reduce or any(is_call(x, torch.ops.fw.all_reduce.default) for x in norm.args[:2])


def _reader(act: fx.Node) -> Any:
    """The one node that reads the values of a quantized activation."""
    readers = {user for item in items(act, 0) for user in item.users}
    if len(readers) != 1:
        raise Miss(f"{len(readers)} nodes read {act.name}, not one linear layer")
    return readers.pop()


def _why_not(
    first: Fp8Layer,
    norm: fx.Node,
    gate_up: Fp8Layer,
    act: fx.Node,
    down: Fp8Layer,
    sums: list[fx.Node],
) -> str:
    if norm.args[0] is norm.args[1]:
        return f"{first.node.name} is added to itself"
    for layer in (gate_up, down):
        if layer.args["bias"] is not None:
            return f"{layer.node.name} has a bias, which the fused op does not add"
    x: Any = first.quantizer.args[0]
    dtype = fake_value(x).dtype
    if any(layer.args["out_dtype"] != dtype for layer in (first, gate_up, down)):
        return f"what is quantized first is {dtype}, and not all sums are rounded to that"
    for node, reader in ((first.node, norm), (gate_up.node, act)):
        if reason := read_elsewhere(node, [reader]):
            return reason
    early = [user for total in sums for user in total.users if user < down.node]
    if early:
        return f"the sum is used before the MLP, by {early[0].name}"
    return written_between(first.quantizer, down.node)


def _tail(down: Fp8Layer, sums: list[fx.Node]) -> _Tail:
    """The norm of the MLP's result and the sum before it, and the FP8 layer that reads it, if these
    are all that do."""
    norm = next(iter(down.node.users)) if len(down.node.users) == 1 else None
    if norm is None:
        return _Tail(f"{down.node.name} has {len(down.node.users)} users, not one norm")
    if not is_call(norm, _ADD_NORM) or {*norm.args[:2]} != {down.node, *sums}:
        return _Tail("no norm of its sum with the residual quantizes by scales of its own")
    if {user for total in sums for user in total.users} != {norm}:
        return _Tail("the sum before the MLP is also read elsewhere")
    try:
        layer = Fp8Layer.of(_reader(norm), _ADD_NORM)
    except Miss as miss:
        return _Tail(str(miss))
    early = [user for total in items(norm, 2) for user in total.users if user < layer.node]
    if early:
        return _Tail(f"the sum is used before {layer.node.name}, by {early[0].name}")
    if layer.args["out_dtype"] != down.args["out_dtype"]:
        return _Tail(f"{layer.node.name} makes {layer.args['out_dtype']}")
    if reason := written_between(down.node, layer.node):
        return _Tail(reason)
    args = (*norm.args[2:4], layer.args["weight"], layer.args["bias"])
    return _Tail("", layer, args, layer.args["weight_scale"])


FUSE_NORM_MLP = SitePass("fuse_norm_mlp", EXACT, _read)
