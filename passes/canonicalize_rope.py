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
from .rotations import Rotation, read, rotations, with_batch
from .rule import Context, Tier, written_between
from .sites import Miss

_ATEN = torch.ops.aten


class CanonicalizeRope:
    """Expected sites: every rotation of one tensor in a spelling that ``rotations`` knows.

    Two by the same angles, such as of q and k, become one op.  One that has no partner, as in a
    layer that reads another one's keys, becomes an op without keys.

    Exact if the spelling computes in float32, as the op does.  A spelling in 16 bits rounds both
    products and their sum, where the op rounds once.
    """

    name = "canonicalize_rope"
    tier = Tier(atol=0.0, rtol=0.0, of_row=2.0**-6)

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        report = PassReport(self.name)
        self._replace_pairs(gm, context, report)
        for site, spelled in rotations(gm):
            try:
                found = read(spelled)
            except Miss as miss:
                report.miss(site.name, str(miss))
                continue
            _replace(self, context, found.result, [found])
            report.match(found.result.name)
        return report

    def _replace_pairs(self, gm: fx.GraphModule, context: Context, report: PassReport) -> None:
        waiting: list[Rotation] = []
        for _, spelled in rotations(gm):
            try:
                found = read(spelled)
            except Miss:
                continue
            first = next((one for one in waiting if _belong(one, found)), None)
            site = None if first is None else _site_of_both(first, found)
            if first is None or site is None:
                # The last rotation by the same angles waits on: its results are read last.
                waiting = [*(one for one in waiting if one is not first), found]
                continue
            _replace(self, context, site, [first, found])
            report.match(first.result.name)
            report.match(found.result.name)
            replaced = (first.result, found.result)
            waiting = [one for one in waiting if one is not first and one.x not in replaced]


def _belong(q: Rotation, k: Rotation) -> bool:
    a, b, heads = with_batch(tensor(q.x)), with_batch(tensor(k.x)), q.heads_dim
    same = (q.layout, q.cos, q.sin, q.heads_dim, q.tier) == (
        k.layout, k.cos, k.sin, k.heads_dim, k.tier
    )  # fmt: skip
    return same and a.dtype == b.dtype and same_shape(a.select(heads, 0), b.select(heads, 0))


def _site_of_both(first: Rotation, second: Rotation) -> fx.Node | None:
    """The node before which both can be rotated, or None.  What reads the first result earlier is
    moved behind it, as the transposition of q where k is normed after it."""
    if second.x < first.result:
        return first.result
    site, early = second.result, list[fx.Node]()
    node = first.result
    while (node := node.next) is not site:
        if any(one is first.result or one in early for one in node.all_input_nodes):
            early.append(node)
    if any(one in early for one in (second.x, *second.nodes) if isinstance(one, fx.Node)):
        return None
    if early and written_between(first.result, site):
        return None
    for one in reversed(early):
        site.append(one)
    return site


def _replace(
    rule: CanonicalizeRope, context: Context, site: fx.Node, rotated: list[Rotation]
) -> None:
    first = rotated[0]

    def build(graph: fx.Graph) -> list[fx.Node]:
        table, positions = _table(graph, first)
        rows = [_by_token(graph, one) for one in rotated]
        if len(rows) == 1:  # the op rotates q and k: here there are no heads of k
            rows.append(graph.call_function(_ATEN.slice.Tensor, (rows[0], 1, 0, 0)))
        args: tuple[Any, ...] = (positions, *rows, table)
        if first.layout != "halves":
            args += (first.layout,)
        call = graph.call_function(torch.ops.fw.rotary_embedding.default, args)
        items = [graph.call_function(operator.getitem, (call, i)) for i in range(len(rotated))]
        return [_as_before(graph, item, one) for item, one in zip(items, rotated, strict=True)]

    context.replace(
        rule,
        site,
        old=in_order([node for one in rotated for node in one.nodes]),
        outputs=[one.result for one in rotated],
        build=build,
        tier=first.tier,
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
    if cos.shape[0] != str(with_batch(tensor(rotation.x)).shape[0]):
        batch = call(_ATEN.sym_size.int, (rotation.x, 0))
        positions = call(_ATEN.repeat.default, (positions, [batch]))
    return table, positions


def _by_token(graph: fx.Graph, rotation: Rotation) -> fx.Node:
    """The rotated tensor as [tokens, heads, head_dim]."""
    x, heads_dim = rotation.x, rotation.heads_dim
    if tensor(x).dim() == 3:
        return _swapped(graph, x, rotation)
    shape = tensor(x).shape
    if heads_dim == 1:
        x = graph.call_function(_ATEN.transpose.int, (x, 1, 2))
    return graph.call_function(_ATEN.reshape.default, (x, [-1, shape[heads_dim], shape[3]]))


def _swapped(graph: fx.Graph, rows: fx.Node, rotation: Rotation) -> fx.Node:
    """A tensor without a batch with the heads behind the tokens, or before them again."""
    if rotation.heads_dim == 2:
        return rows
    return graph.call_function(_ATEN.transpose.int, (rows, 0, 1))


def _as_before(graph: fx.Graph, rows: fx.Node, rotation: Rotation) -> fx.Node:
    """The inverse of ``_by_token``, in the strides of the spelling's result."""
    call, x, heads_dim = graph.call_function, rotation.x, rotation.heads_dim
    if tensor(x).dim() == 3:
        made = _swapped(graph, rows, rotation)
    else:
        shape = tensor(x).shape
        tokens, batch = (call(_ATEN.sym_size.int, (x, dim)) for dim in (3 - heads_dim, 0))
        made = call(_ATEN.reshape.default, (rows, [batch, tokens, shape[heads_dim], shape[3]]))
        if heads_dim == 1:
            made = call(_ATEN.transpose.int, (made, 1, 2))
    if rotation.by_head:
        made = call(_ATEN.clone.default, (made,), {"memory_format": torch.contiguous_format})
    return made
