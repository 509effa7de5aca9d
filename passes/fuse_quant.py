"""Attaches the quantization of a result to the op that makes it: one pass a kind of producer.

``fuse_norm_quant``: ``y[, r] = [add_]rms_norm(...); q[, s] = quant_*(y, ...)`` becomes
``q[, s][, r] = [add_]rms_norm_quant_*(...)``.  ``fuse_act_quant`` does the same to ``silu_mul`` and
``gelu_tanh_mul``.  ``fuse_attn_quant`` gives ``paged_attention`` a buffer of FP8 and the scale.
The unquantized tensor is neither written nor read, and a launch is saved.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from ..ops.norm.gated_act import GATED_ACTS, activation_of
from ..ops.norm.norm import norm_axes, with_axes
from ..ops.norm.quantize import QUANTIZE, SCHEMES
from .fuse_gated_linear import why_not_packed
from .rule import EXACT, Tier, is_call, memory
from .sites import Match, Miss, SitePass, call
from .subgraph import fake_value

_QUANTS = {op.overload(): quant for quant, op in QUANTIZE.items()}
_EMPTY = ("new_empty", torch.empty_like, torch.empty, torch.ops.aten.empty_like.default)
_VIEWS = ("view", "reshape", "flatten")
_OUT, _OUT_SCALE = 5, 10
"""Positions of ``out`` and ``out_scale`` among the arguments of ``paged_attention``."""


@dataclass(frozen=True)
class QuantNode:
    """One quantization.  ``outputs`` are its values and, if it is dynamic, its scales; ``how`` is
    its argument after the tensor: the static scale, or the group size."""

    node: fx.Node
    kind: str
    source: Any
    how: Any
    outputs: tuple[fx.Node, ...]

    @property
    def nodes(self) -> list[fx.Node]:
        return sorted({self.node, *self.outputs})


def _read(site: Callable[[QuantNode], Match | None], node: fx.Node) -> Match | None:
    """Expected sites: every quantization of a result of one kind of producer.  ``site`` reads
    one, or returns None if another kind made its input."""
    quant = _quantization(node)
    if quant is None or (found := site(quant)) is None:
        return None
    _check_read(quant)
    return found


def _quantization(node: fx.Node) -> QuantNode | None:
    """The quantization that a node is."""
    kind = _QUANTS.get(node.target)
    if kind is None:
        return None
    outputs: tuple[fx.Node, ...] = (node,)
    if not SCHEMES[kind].static:
        items = [user for user in node.users if is_call(user, operator.getitem)]
        outputs = tuple(sorted(items, key=lambda item: item.args[1]))  # type: ignore[arg-type,return-value]
    return QuantNode(node, kind, node.args[0], node.args[1], outputs)


def _check_read(quant: QuantNode) -> None:
    """Raise ``Miss`` if values or scales are not taken from a dynamic quantization once each."""
    if SCHEMES[quant.kind].static:
        return
    whole = [user for user in quant.node.users if user not in quant.outputs]
    if whole:
        raise Miss(f"values and scales are read as one, by {whole[0].name}")
    taken = [sum(item.args[1] == i for item in quant.outputs) for i in (0, 1)]
    if taken != [1, 1]:
        raise Miss(
            f"its values are taken {taken[0]} times and its scales {taken[1]} times, not once"
        )


def _why_not(quant: QuantNode, producer: fx.Node) -> str:
    """Why not to fuse: somebody else reads the unquantized tensor, which would disappear, or the
    static scale is not known yet."""
    others = [user for user in quant.source.users if user is not quant.node]
    if others:
        return f"{quant.source.name} is also read unquantized, by {others[0].name}"
    return _why_not_known(quant, producer)


def _why_not_known(quant: QuantNode, producer: fx.Node) -> str:
    if isinstance(quant.how, fx.Node) and not quant.how < producer:
        return f"the scale {quant.how.name} is not known before {producer.name}"
    return ""


def _norm(quant: QuantNode) -> Match | None:
    """Exact: the norm is rounded to the model's dtype before it is quantized, as without fusion."""
    norm: Any = quant.source
    if is_call(norm, operator.getitem) and norm.args[1] == 0:
        norm = norm.args[0]
    axes = norm_axes(getattr(norm, "target", None))
    if axes is None or axes.reduce or axes.quant or axes.add is (norm is quant.source):
        return None
    count = 3 + axes.add
    reason = _why_not(quant, norm)
    if any(offset is not None for offset in norm.args[count:]):
        reason = "its weight has an offset, for which there is no fused kernel"
    if axes.center:
        reason = "it is a layer norm, for which there is no fused kernel"
    if reason:
        raise Miss(reason)
    _check_read(quant)
    outputs = [*quant.outputs, *([_total_of(norm)] if axes.add else [])]
    target, args = with_axes(norm.target, quant=quant.kind), (*norm.args[:count], quant.how)
    old = [norm, quant.source, *quant.nodes, *outputs]
    return Match(norm, old, outputs, call(target, args, len(outputs)))


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


def _activation(quant: QuantNode) -> Match | None:
    """Exact: the product is rounded to the model's dtype before it is quantized, as without
    fusion."""
    act: Any = quant.source
    activation = activation_of(getattr(act, "target", None))
    if activation is None:
        return None
    reason = why_not_packed(act, "tensors, for which there is no fused kernel")
    if reason := reason or _why_not(quant, act):
        raise Miss(reason)
    target = GATED_ACTS[activation, quant.kind].overload()
    fused = call(target, (act.args[0], quant.how), len(quant.outputs))
    return Match(act, [act, *quant.nodes], quant.outputs, fused)


def _attention(quant: QuantNode) -> Match | None:
    """Before: ``out = empty_like(q); paged_attention(q, ..., out, ...); y = out.view(...);
    y8 = quant_fp8_static(y, s)``.  After: ``out8 = empty_like(q, dtype=float8);
    paged_attention(q, ..., out8, ..., out_scale=s); y8 = out8.view(...)``.

    Only a static scale can be fused: a scale a token or a group follows from the largest value over
    heads that other blocks of the kernel compute.

    Tolerant: unfused, the output is rounded to the model's dtype before it is quantized; fused, it
    is rounded once.  A value between two FP8 numbers may then go to the other one, a step of 2^-3
    of the value (2^-9 of the scale's unit for subnormals).
    """
    views, out = _through_views(quant.source)
    found = _attentions_into(out)
    if not found:
        return None
    attention = found[0]

    def build(graph: fx.Graph) -> list[fx.Node]:
        # No copy: that would keep the value of the buffer in the model's dtype.
        kwargs = {**out.kwargs, "dtype": torch.float8_e4m3fn}
        y = graph.create_node(out.op, out.target, out.args, kwargs)
        args = (*attention.args, *[None] * (_OUT_SCALE - len(attention.args)))
        args = (*args[:_OUT], y, *args[_OUT + 1 : _OUT_SCALE], quant.how, *args[_OUT_SCALE + 1 :])
        graph.call_function(torch.ops.fw.paged_attention.default, args)
        for view in views:
            y = graph.call_method(str(view.target), (y, *view.args[1:]), dict(view.kwargs))
        return [y]

    if len(found) > 1:
        raise Miss(f"{out.name} is written by {found[0].name} and {found[1].name}")
    if reason := _why_not_attention(quant, attention, out, views):
        raise Miss(reason)
    return Match(attention, [out, attention, *views, *quant.nodes], quant.outputs, build)


def _through_views(source: Any) -> tuple[list[fx.Node], Any]:
    """(the views from the buffer to ``source``, in order; the buffer)."""
    views: list[fx.Node] = []
    while _is_view(source) and not _attentions_into(source):
        views.insert(0, source)
        source = source.args[0]
    return views, source


def _is_view(node: Any) -> bool:
    before = node.args[0] if isinstance(node, fx.Node) and node.args else None
    if not isinstance(before, fx.Node):
        return False
    return is_call(node, *_VIEWS) or bool(memory(node) & memory(before))


def _attentions_into(out: Any) -> list[fx.Node]:
    """The attentions that write the buffer ``out``."""
    return [
        user
        for user in (out.users if isinstance(out, fx.Node) else ())
        if is_call(user, torch.ops.fw.paged_attention.default) and user.args[_OUT] is out
    ]


def _why_not_attention(
    quant: QuantNode, attention: fx.Node, out: fx.Node, views: list[fx.Node]
) -> str:
    if quant.kind == "int8_static":
        return "the kernels write FP8 or the model's dtype, not int8"
    if not SCHEMES[quant.kind].static:
        kind = "group of 128" if quant.how else "token"
        return f"a scale a {kind} follows from values of several blocks of the kernel"
    if len(attention.args) > _OUT_SCALE and attention.args[_OUT_SCALE] is not None:
        return f"{attention.name} quantizes already"
    if not is_call(out, *_EMPTY):
        return f"the output lies in {out.name}, not in a buffer of its own"
    others = [view for view in views if not is_call(view, *_VIEWS)]
    if others:
        return f"{others[0].name} is another view of the output than a reshape"
    path = [attention, *views, quant.node]
    for node in [out, *views]:
        others = [user for user in node.users if user not in path]
        if others:
            return f"the output is also read unquantized, by {others[0].name}"
    q: Any = attention.args[0]
    if tuple(fake_value(q).shape) != tuple(fake_value(out).shape):
        return f"the output has another shape than {q.name}"
    return _why_not_known(quant, attention)


NORM = SitePass("fuse_norm_quant", EXACT, partial(_read, _norm))
ACTIVATION = SitePass("fuse_act_quant", EXACT, partial(_read, _activation))
ATTENTION = SitePass(
    "fuse_attn_quant", Tier(atol=2.0**-9, rtol=2.0**-3), partial(_read, _attention)
)
