"""``rope_table`` lets rotations read a table of all positions in place of this step's angles.

Before: ``rotary_embedding(arange(num_tokens), q, k, angles(positions.clamp(0, n - 1)))``.  After:
``rotary_embedding(positions, q, k, angles(arange(n)))``.  The table depends on weights alone, so it
is computed once, at the start (``compiler/emit/constants``).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..canonicalize import argument, is_pointwise, kind, tensor
from ..report import PassReport
from ..rule import Context, Tier, is_call
from ..sites import Miss
from ..subgraph import fake_value

_ATEN = torch.ops.aten
_ROTARY = torch.ops.fw.rotary_embedding.default
_LAID_OUT = ("unsqueeze", "squeeze", "transpose", "permute", "select", "expand", "detach", "t")
_KINDS = frozenset(
    ["as_complex", "as_real", "cat", "expand", "item", "ones", "polar", "select", "slice", "stack",
     "unsqueeze"]
)  # fmt: skip
_PRODUCTS = (torch.matmul, _ATEN.mm.default, _ATEN.bmm.default, _ATEN.matmul.default)
_OTHERS = (_ATEN.repeat_interleave.self_int, _ATEN.repeat_interleave.self_Tensor)
_GATHERS = (torch.ops.fw.embedding.default,)
_STEPS = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


class RopeTable:
    """Expected sites: every rotation by angles that are computed for this step's tokens.

    Tolerant: cosines of large angles differ in the last bit between the lanes of a vector and its
    tail, after which a value may be rounded to another one of 16 bits.
    """

    name = "rope_table"
    tier = Tier(1e-6, 0.0, 2.0**-6)

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        report = PassReport(self.name)
        for node in list(gm.graph.nodes):
            if not is_call(node, _ROTARY) or not is_call(node.args[0], _ATEN.arange.default):
                continue
            name = node.name
            try:
                angles = _read(node)
            except Miss as miss:
                report.miss(name, str(miss))
                continue
            _replace(self, context, node, angles)
            report.match(name)
        return report


@dataclass(frozen=True)
class _Angles:
    """How a table depends on positions.

    Attributes:
        positions: [num_tokens] int32.
        clamped: they, limited to [0, count).
        count: of the table's rows.
        nodes: what computes the table of them, in the order of the graph.
    """

    positions: fx.Node
    clamped: fx.Node
    count: int
    nodes: list[fx.Node]


def _read(rotary: fx.Node) -> _Angles:
    table: Any = rotary.args[3]
    rows = tensor(rotary.args[0]).shape[0]
    if isinstance(rows, int) or str(rows) != str(tensor(table).shape[0]):
        raise Miss("its table has no row for each token")
    symbol = str(rows)
    clamped: dict[fx.Node, None] = {}
    nodes = _ancestors(table, clamped)
    if len(clamped) != 1:
        raise Miss(f"its angles depend on {len(clamped)} vectors of positions with known bounds")
    (limited,) = clamped
    positions: Any = limited.args[0]
    if tensor(positions).dtype != torch.int32 or str(tensor(positions).shape[0]) != symbol:
        raise Miss(f"positions are {tensor(positions).dtype}, the op takes int32 of each token")
    of_tokens = {limited}
    for node in nodes:
        if any(arg in of_tokens for arg in node.all_input_nodes):
            _check_rows(node, symbol, of_tokens)
            of_tokens.add(node)
        elif node.op == "placeholder" and not _is_constant(node, symbol):
            raise Miss(f"its angles depend on {node.name}, which differs between steps")
    return _Angles(positions, limited, int(argument(limited, 2, "max")) + 1, nodes)


def _ancestors(table: fx.Node, clamped: dict[fx.Node, None]) -> list[fx.Node]:
    """All that the table is computed of, but for positions behind a clamp, which are added to
    ``clamped``."""
    seen: set[fx.Node] = set()
    waiting = [table]
    while waiting:
        node = waiting.pop()
        if _is_clamp(node):
            clamped.setdefault(node)
        elif node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    return sorted(seen)


def _is_clamp(node: fx.Node) -> bool:
    bounds = [argument(node, i, name) for i, name in ((1, "min"), (2, "max"))]
    value = fake_value(node)
    if kind(node) != "clamp" or not isinstance(value, Tensor) or value.dtype.is_floating_point:
        return False
    return value.dim() == 1 and bounds[0] == 0 and isinstance(bounds[1], int)


def _is_constant(node: fx.Node, symbol: str) -> bool:
    """Whether an input is a weight, whose sizes are all fixed, or the number of tokens."""
    value = fake_value(node)
    if isinstance(value, Tensor):
        return all(isinstance(size, int) for size in value.shape)
    return str(value) == symbol


def _check_rows(node: fx.Node, symbol: str, of_tokens: set[fx.Node]) -> None:
    """Check that a node computes each token's values of that token's alone.

    Raises:
        Miss: it may not.
    """
    axis = _axis(node, symbol)
    sources = [arg for arg in node.all_input_nodes if arg in of_tokens]
    axes = [_axis(arg, symbol) for arg in sources]
    fits = False
    if is_pointwise(node):
        fits = all(one == axis for one in axes)
    elif kind(node) == "view":
        fits = _leading(node, axis) == _leading(sources[0], axes[0])
    elif is_call(node, *_PRODUCTS):
        left, right = node.args[:2]
        fits = (left not in of_tokens or _axis(left, symbol) != -1) and (
            right not in of_tokens or _axis(right, symbol) != -2
        )
    elif is_call(node, *_GATHERS):
        fits = sources == [node.args[0]]
    else:
        # There is one dimension of the tokens before and after, and none of these mixes them.
        fits = kind(node) in _KINDS or is_call(node, *_LAID_OUT, *_OTHERS)
    if not fits:
        raise Miss(f"{node.name} is not known to compute each token's angles alone")


def _axis(node: Any, symbol: str) -> int:
    """The dimension of the tokens, counted from the last, which is -1."""
    shape = [str(size) for size in tensor(node).shape]
    if shape.count(symbol) != 1:
        raise Miss(f"{node.name} has {shape.count(symbol)} dimensions of tokens")
    return shape.index(symbol) - len(shape)


def _leading(node: fx.Node, axis: int) -> int:
    """Elements of all dimensions before ``axis``."""
    count = 1
    for size in tensor(node).shape[:axis]:
        count *= int(size)
    return count


def _replace(rule: RopeTable, context: Context, rotary: fx.Node, angles: _Angles) -> None:
    symbol = str(tensor(rotary.args[0]).shape[0])

    def build(graph: fx.Graph) -> list[fx.Node]:
        value = tensor(angles.clamped)
        given: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
        every = graph.call_function(_ATEN.arange.default, (angles.count,), given)
        made: dict[fx.Node, Any] = {angles.clamped: every}

        def taken(node: fx.Node) -> Any:
            if isinstance(fake_value(node), torch.SymInt):
                return angles.count if str(fake_value(node)) == symbol else node
            return made.get(node, node)

        for node in angles.nodes:
            if node.op != "placeholder" and isinstance(fake_value(node), Tensor):
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), taken)
                made[node] = graph.create_node(node.op, node.target, args, kwargs)
        table: Any
        _, q, k, table, *layout = rotary.args
        args = (angles.positions, q, k, made[table], *layout)
        rotated = graph.call_function(_ROTARY, args)
        return [graph.call_function(operator.getitem, (rotated, one.args[1])) for one in items]

    items = list(rotary.users)
    old: list[Any] = [*angles.nodes, angles.clamped, rotary.args[0], rotary, *items]
    context.replace(
        rule,
        rotary,
        old=sorted({node for node in old if node.op != "placeholder"}),
        outputs=items,
        build=build,
        tier=Tier(1e-6, 0.0, _STEPS.get(tensor(rotary.args[1]).dtype, 2.0**-19)),
    )
