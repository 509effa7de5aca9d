"""``fuse_attn_quant`` lets attention write its output in FP8.

Before: ``out = empty_like(q); paged_attention(q, ..., out, ...); y = out.view(...);
y8 = quant_fp8_static(y, s)``.  After: ``out8 = empty_like(q, dtype=float8);
paged_attention(q, ..., out8, ..., out_scale=s); y8 = out8.view(...)``.  This saves a write, a read
and a launch.

Only a static scale can be fused: a scale a token or a group follows from the largest value over
heads that other blocks of the kernel compute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ._quant import Quant, quantizations
from .report import PassReport
from .rule import Context, Tier, is_call
from .subgraph import fake_value

_EMPTY = ("new_empty", torch.empty_like, torch.empty, torch.ops.aten.empty_like.default)
_VIEWS = ("view", "reshape", "flatten")
_OUT, _OUT_SCALE = 5, 10
"""Positions of ``out`` and ``out_scale`` among the arguments of ``paged_attention``."""


class FuseAttnQuant:
    """Expected sites: every FP8 quantization of an attention's output.

    Tolerant: unfused, the output is rounded to the model's dtype before it is quantized; fused, it
    is rounded once.  A value between two FP8 numbers may then go to the other one, a step of 2^-3
    of the value (2^-9 of the scale's unit for subnormals).
    """

    name = "fuse_attn_quant"
    tier = Tier(atol=2.0**-9, rtol=2.0**-3)

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        report = PassReport(self.name)
        for quant in quantizations(gm):
            views, out = _through_views(quant.source)
            attention = _attention_into(out)
            if attention is None:
                continue
            name = quant.node.name
            reason = _why_not(quant, attention, out, views)
            if reason:
                report.miss(name, reason)
                continue

            def build(
                graph: fx.Graph,
                out: fx.Node = out,
                args: Any = attention.args,
                views: list[fx.Node] = views,
                scale: Any = quant.how,
            ) -> list[fx.Node]:
                y = graph.node_copy(out)
                y.kwargs = {**out.kwargs, "dtype": torch.float8_e4m3fn}
                args = (*args, *[None] * (_OUT_SCALE - len(args)))
                args = (*args[:_OUT], y, *args[_OUT + 1 : _OUT_SCALE], scale)
                graph.call_function(torch.ops.fw.paged_attention.default, args)
                for view in views:
                    y = graph.call_method(str(view.target), (y, *view.args[1:]), dict(view.kwargs))
                return [y]

            old = sorted({out, attention, *views, *quant.nodes})
            context.replace(self, attention, old=old, outputs=quant.outputs, build=build)
            report.match(name)
        return report


def _through_views(source: Any) -> tuple[list[fx.Node], Any]:
    """(the reshapes from the buffer to ``source``, in order; the buffer)."""
    views: list[fx.Node] = []
    while is_call(source, *_VIEWS):
        views.insert(0, source)
        source = source.args[0]
    return views, source


def _attention_into(out: Any) -> fx.Node | None:
    """The attention that writes the uninitialized buffer ``out``, if there is exactly one."""
    if not is_call(out, *_EMPTY):
        return None
    writers = [
        user
        for user in out.users
        if is_call(user, torch.ops.fw.paged_attention.default) and user.args[_OUT] is out
    ]
    return writers[0] if len(writers) == 1 else None


def _why_not(quant: Quant, attention: fx.Node, out: fx.Node, views: list[fx.Node]) -> str:
    if quant.kind != "static":
        kind = "group of 128" if quant.how else "token"
        return f"a scale a {kind} follows from values of several blocks of the kernel"
    if len(attention.args) > _OUT_SCALE and attention.args[_OUT_SCALE] is not None:
        return f"{attention.name} quantizes already"
    path = [attention, *views, quant.node]
    for node in [out, *views]:
        others = [user for user in node.users if user not in path]
        if others:
            return f"the output is also read unquantized, by {others[0].name}"
    q: Any = attention.args[0]
    if tuple(fake_value(q).shape) != tuple(fake_value(out).shape):
        return f"the output has another shape than {q.name}"
    if isinstance(quant.how, fx.Node) and not quant.how < attention:
        return f"the scale {quant.how.name} is not known before {attention.name}"
    return ""
