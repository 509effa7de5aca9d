"""``canonicalize_rope`` raises the rotation of queries and keys, as ``rotations`` reads it.

Before: ``q * cos + cat((-q[..., h:], q[..., :h]), -1) * sin``, and k likewise; or the same of pairs
of neighbours, or of complex numbers.
After: ``rotary_embedding`` of both, over a table of one row a token.  It is one launch, and reads
each value once.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from .canonicalize import in_order, same_shape, tensor
from .report import PassReport
from .rotations import Rotation, read, rotations
from .rule import Context, Tier
from .sites import Miss

_ATEN = torch.ops.aten


class CanonicalizeRope:
    """Expected sites: every rotation of one tensor in a spelling that ``rotations`` knows.

    Exact if the spelling computes in float32, as the op does.  A spelling in 16 bits rounds both
    products and their sum, where the op rounds once.
    """

    name = "canonicalize_rope"
    tier = Tier(atol=0.0, rtol=0.0, of_row=2.0**-6)

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        report = PassReport(self.name)
        waiting: Rotation | None = None
        for site, spelled in rotations(gm):
            try:
                found = read(spelled)
            except Miss as miss:
                report.miss(site.name, str(miss))
                continue
            if waiting is None or not _belong(waiting, found):
                if waiting is not None:
                    report.miss(waiting.result.name, "no other rotation by the same angles follows")
                waiting = found
                continue
            # Replace the first rotation, unless the tensor of the second is not known there yet.
            site = waiting.result if found.x < waiting.result else found.result
            early = [user for user in waiting.result.users if user < site]
            if early:
                report.miss(waiting.result.name, f"{early[0].name} reads it before k is rotated")
                waiting = found
                continue
            names = (waiting.result.name, found.result.name)
            _replace(self, context, site, waiting, found)
            waiting = None
            for name in names:
                report.match(name)
        if waiting is not None:
            report.miss(waiting.result.name, "no other rotation by the same angles follows")
        return report


def _belong(q: Rotation, k: Rotation) -> bool:
    a, b, heads = tensor(q.x), tensor(k.x), q.heads_dim
    same = (q.layout, q.cos, q.sin, q.heads_dim, q.tier) == (
        k.layout, k.cos, k.sin, k.heads_dim, k.tier
    )  # fmt: skip
    return same and a.dtype == b.dtype and same_shape(a.select(heads, 0), b.select(heads, 0))


def _replace(
    rule: CanonicalizeRope, context: Context, site: fx.Node, q: Rotation, k: Rotation
) -> None:
    def build(graph: fx.Graph) -> list[fx.Node]:
        table, positions = _table(graph, q)
        rows = [_by_token(graph, x, q.heads_dim) for x in (q.x, k.x)]
        args: tuple[Any, ...] = (positions, *rows, table)
        if q.layout != "halves":
            args += (q.layout,)
        call = graph.call_function(torch.ops.fw.rotary_embedding.default, args)
        items = [graph.call_function(operator.getitem, (call, i)) for i in (0, 1)]
        return [_as_before(graph, item, one) for item, one in zip(items, (q, k), strict=True)]

    context.replace(
        rule,
        site,
        old=in_order([*q.nodes, *k.nodes]),
        outputs=[q.result, k.result],
        build=build,
        tier=q.tier,
    )


def _table(graph: fx.Graph, rotation: Rotation) -> tuple[fx.Node, fx.Node]:
    """Make the table: (cosines and sines of each token, rounded as in the spelling; each one's
    row)."""
    call, cos, sin = graph.call_function, rotation.cos, rotation.sin
    # By rows, as one of them may be spread over dimensions of one element that the other lacks.
    flat = [-1, int(cos.shape[-1])]
    halves = [call(_ATEN.reshape.default, (half.build(graph), flat)) for half in (cos, sin)]
    table = call(_ATEN.cat.default, (halves, -1))
    if cos.dtype != torch.float32:
        table = call(_ATEN._to_copy.default, (table,), {"dtype": torch.float32})
    rows = call(_ATEN.sym_size.int, (table, 0))
    given: dict[str, Any] = {"dtype": torch.int32, "device": tensor(cos.root).device}
    positions = call(_ATEN.arange.default, (rows,), given)
    if cos.shape[0] != str(tensor(rotation.x).shape[0]):
        batch = call(_ATEN.sym_size.int, (rotation.x, 0))
        positions = call(_ATEN.repeat.default, (positions, [batch]))
    return table, positions


def _by_token(graph: fx.Graph, x: fx.Node, heads_dim: int) -> fx.Node:
    heads, width = tensor(x).shape[heads_dim], tensor(x).shape[3]
    if heads_dim == 1:
        x = graph.call_function(_ATEN.transpose.int, (x, 1, 2))
    return graph.call_function(_ATEN.reshape.default, (x, [-1, heads, width]))


def _as_before(graph: fx.Graph, rows: fx.Node, rotation: Rotation) -> fx.Node:
    """The inverse of ``_by_token``, in the strides of the spelling's result."""
    call, x, heads_dim = graph.call_function, rotation.x, rotation.heads_dim
    heads, width = tensor(x).shape[heads_dim], tensor(x).shape[3]
    batch, tokens = (call(_ATEN.sym_size.int, (x, dim)) for dim in (0, 3 - heads_dim))
    made = call(_ATEN.reshape.default, (rows, [batch, tokens, heads, width]))
    if heads_dim == 1:
        made = call(_ATEN.transpose.int, (made, 1, 2))
    if rotation.by_head:
        made = call(_ATEN.clone.default, (made,), {"memory_format": torch.contiguous_format})
    return made
