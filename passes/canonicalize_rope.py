"""``canonicalize_rope``: raises the rotation of queries and keys by halves, as transformers has it.

Before: ``emb = cat((f, f), -1); cos, sin = emb.cos(), emb.sin()``, scaled, cast and unsqueezed;
``q * cos + cat((-q[..., h:], q[..., :h]), -1) * sin``, and k likewise.
After: ``rotary_embedding`` of both, over a table of one row a token.  One launch, and each half is
read once.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .canonicalize import (
    Miss,
    argument,
    cast_source,
    columns,
    computed_dtype,
    in_order,
    is_dense,
    kind,
    only_user,
    other_operand,
    same_shape,
    tensor,
    with_number,
)
from .report import PassReport
from .rule import EXACT, Context, Tier

_ATEN = torch.ops.aten


@dataclass(frozen=True)
class _Angles:
    """What cosines and sines are of: ``scale * cos(f)`` in ``dtype``, [batch, tokens, half]."""

    frequencies: fx.Node
    scale: float
    dtype: torch.dtype
    heads_dim: int


@dataclass(frozen=True)
class _Rotation:
    """One rotated tensor, [batch, heads, tokens, head_dim] or with heads_dim 2."""

    x: fx.Node
    result: fx.Node
    angles: _Angles
    nodes: list[Any] = field(compare=False)


class CanonicalizeRope:
    """Expected sites: every ``cat((-second half, first half))``, which rotates by halves.

    Exact in float32; 16-bit spellings round both products and their sum, the op rounds once.
    """

    name = "canonicalize_rope"
    tier = Tier(atol=0.0, rtol=0.0, of_row=2.0**-6)

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        report = PassReport(self.name)
        waiting: _Rotation | None = None
        for site, x in _sites(gm):
            try:
                found = _read(site, x)
            except Miss as miss:
                report.miss(site.name, str(miss))
                continue
            if waiting is None or not _belong(waiting, found):
                if waiting is not None:
                    report.miss(waiting.result.name, "no other rotation by the same angles follows")
                waiting = found
                continue
            # In place of the first rotation, unless what the second rotates is not known there.
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


def _sites(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(the concatenation, the tensor whose halves it has), read when its turn comes."""
    for node in list(gm.graph.nodes):
        parts: Any = argument(node, 0, "tensors") if kind(node) == "cat" else None
        if not isinstance(parts, (list, tuple)) or len(parts) != 2 or kind(parts[0]) != "neg":
            continue
        second, first = columns(parts[0].args[0]), columns(parts[1])
        if first is not None and second is not None and first[0] is second[0]:
            yield node, first[0]


def _read(site: fx.Node, x: fx.Node) -> _Rotation:
    value = tensor(x)
    negated, first = argument(site, 0, "tensors")
    width, half = value.shape[-1], columns(first)[2]  # type: ignore[index]
    halves = (columns(first)[1], *columns(negated.args[0])[1:])  # type: ignore[index]
    if (
        halves != (0, half, width)
        or width != 2 * half
        or argument(site, 1, "dim", 0) not in (-1, 3)
    ):
        raise Miss("the parts are not the two halves of the last dimension")
    if value.dim() != 4:
        raise Miss(f"the rotated tensor has {value.dim()} dimensions, expected 4")
    turned = only_user(site)
    if kind(turned) != "mul":
        raise Miss(f"{site.name} feeds {turned.name}, not a product with the sines")
    result = only_user(turned)
    if kind(result) != "add":
        raise Miss(f"{turned.name} feeds {result.name}, not a sum")
    straight = other_operand(result, turned)
    if kind(straight) != "mul" or x not in straight.args or len(straight.users) != 1:
        raise Miss(f"{result.name} adds {straight}, not the tensor times the cosines")
    nodes = [negated, negated.args[0], first, site, turned, straight, result]
    for half_node in (negated.args[0], first):
        if kind(half_node.args[0]) == "split":
            nodes.append(half_node.args[0])
    sines = _angles(other_operand(turned, site), "sin", nodes)
    cosines = _angles(other_operand(straight, x), "cos", nodes)
    if sines != cosines:
        raise Miss("cosines and sines are not of the same angles")
    _check(x, result, cosines)
    return _Rotation(x, result, cosines, nodes)


def _angles(node: Any, function: str, nodes: list[Any]) -> _Angles:
    """Walk back from what multiplies the tensor to the frequencies; ``nodes`` gets those passed."""
    spread, scale = node, 1.0
    if kind(spread) != "unsqueeze":
        raise Miss(f"{spread} is not unsqueezed over the heads")
    nodes.append(spread)
    heads_dim = argument(spread, 1, "dim") % tensor(spread).dim()
    dtype = tensor(spread).dtype
    node = spread.args[0]
    if cast_source(node) is not node:
        nodes.append(node)
        node = cast_source(node)
    if kind(node) == "mul":
        number = with_number(node)[1]
        if number is None:
            raise Miss(f"{node.name} scales the {function} by a tensor")
        nodes.append(node)
        node, scale = with_number(node)[0], number
    if kind(node) != function:
        raise Miss(f"{node} is not a {function}")
    nodes.append(node)
    doubled = node.args[0]
    parts: Any = argument(doubled, 0, "tensors") if kind(doubled) == "cat" else ()
    if len(parts) != 2 or parts[0] is not parts[1]:
        raise Miss(f"{doubled} is not the frequencies twice, side by side")
    if argument(doubled, 1, "dim", 0) not in (-1, tensor(doubled).dim() - 1):
        raise Miss(f"{doubled.name} joins the frequencies over another dimension than the last")
    nodes.append(doubled)
    return _Angles(parts[0], scale, dtype, heads_dim)


def _check(x: fx.Node, result: fx.Node, angles: _Angles) -> None:
    value, frequencies = tensor(x), tensor(angles.frequencies)
    if angles.heads_dim not in (1, 2):
        raise Miss(f"cos is unsqueezed at dimension {angles.heads_dim}, expected the heads: 1 or 2")
    if frequencies.dim() != 3 or frequencies.dtype != torch.float32:
        raise Miss(
            f"the frequencies are {frequencies.dtype}{list(frequencies.shape)}, expected float32 "
            "[batch, tokens, half]"
        )
    if computed_dtype(x) != angles.dtype or tensor(result).dtype != value.dtype:
        raise Miss(f"cos is {angles.dtype}, the rotated tensor {value.dtype}")
    tokens = value.shape[3 - angles.heads_dim]
    same_tokens = str(frequencies.shape[1]) == str(tokens)
    same_batch = str(frequencies.shape[0]) in ("1", str(value.shape[0]))
    if not same_tokens or not same_batch or frequencies.shape[2] * 2 != value.shape[3]:
        raise Miss(
            f"angles of {list(frequencies.shape)} do not match a tensor of {list(value.shape)}"
        )
    if not isinstance(value.shape[angles.heads_dim], int):
        raise Miss("the number of heads is dynamic")
    expected = tensor(result)
    rows = expected.transpose(1, 2) if angles.heads_dim == 1 else expected
    if not is_dense(rows):
        raise Miss(f"the result has strides {list(expected.stride())}, the op's are by token")


def _belong(q: _Rotation, k: _Rotation) -> bool:
    a, b = tensor(q.x), tensor(k.x)
    heads = q.angles.heads_dim
    return q.angles == k.angles and same_shape(a.select(heads, 0), b.select(heads, 0))


def _replace(
    rule: CanonicalizeRope, context: Context, site: fx.Node, q: _Rotation, k: _Rotation
) -> None:
    angles = q.angles

    def build(graph: fx.Graph) -> list[fx.Node]:
        table, positions = _table(graph, angles, q.x)
        rows = [_by_token(graph, x, angles.heads_dim) for x in (q.x, k.x)]
        args = (positions, *rows, table)
        call = graph.call_function(torch.ops.fw.rotary_embedding.default, args)
        items = [graph.call_function(operator.getitem, (call, i)) for i in (0, 1)]
        return [
            _as_before(graph, item, one.x, angles.heads_dim)
            for item, one in zip(items, (q, k), strict=True)
        ]

    tolerance = {torch.float32: EXACT, torch.float16: Tier(0.0, 0.0, 2.0**-9)}
    context.replace(
        rule,
        site,
        old=in_order([*q.nodes, *k.nodes]),
        outputs=[q.result, k.result],
        build=build,
        tier=tolerance.get(angles.dtype),
    )


def _table(graph: fx.Graph, angles: _Angles, x: fx.Node) -> tuple[fx.Node, fx.Node]:
    """(cosines and sines of each token, rounded as the spelling rounds them; the row of each)."""
    call, frequencies = graph.call_function, tensor(angles.frequencies)
    parts = []
    for function in (_ATEN.cos.default, _ATEN.sin.default):
        part = call(function, (angles.frequencies,))
        if angles.scale != 1:
            part = call(_ATEN.mul.Tensor, (part, angles.scale))
        if angles.dtype != torch.float32:
            part = call(_ATEN._to_copy.default, (part,), {"dtype": angles.dtype})
        parts.append(part)
    table = call(_ATEN.cat.default, (parts, -1))
    if angles.dtype != torch.float32:
        table = call(_ATEN._to_copy.default, (table,), {"dtype": torch.float32})
    table = call(_ATEN.reshape.default, (table, [-1, 2 * frequencies.shape[2]]))
    rows = call(_ATEN.sym_size.int, (table, 0))
    given: dict[str, Any] = {"dtype": torch.int32, "device": frequencies.device}
    positions = call(_ATEN.arange.default, (rows,), given)
    if str(frequencies.shape[0]) != str(tensor(x).shape[0]):
        batch = call(_ATEN.sym_size.int, (x, 0))
        positions = call(_ATEN.repeat.default, (positions, [batch]))
    return table, positions


def _by_token(graph: fx.Graph, x: fx.Node, heads_dim: int) -> fx.Node:
    heads, width = tensor(x).shape[heads_dim], tensor(x).shape[3]
    if heads_dim == 1:
        x = graph.call_function(_ATEN.transpose.int, (x, 1, 2))
    return graph.call_function(_ATEN.reshape.default, (x, [-1, heads, width]))


def _as_before(graph: fx.Graph, rows: fx.Node, x: fx.Node, heads_dim: int) -> fx.Node:
    """The inverse of ``_by_token``."""
    heads, width = tensor(x).shape[heads_dim], tensor(x).shape[3]
    tokens = graph.call_function(_ATEN.sym_size.int, (x, 3 - heads_dim))
    made = graph.call_function(_ATEN.reshape.default, (rows, [-1, tokens, heads, width]))
    return graph.call_function(_ATEN.transpose.int, (made, 1, 2)) if heads_dim == 1 else made
