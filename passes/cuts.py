"""Reads tensors whose last dimension is cut in two, and pairs of tensors that are joined.

The parts are halves, or every second column: of two neighbours one part has the first, the other
the second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from .canonicalize import argument, columns, kind
from .subgraph import fake_value


@dataclass(frozen=True)
class Cut:
    """``first`` and ``second`` are the two parts of ``source``: columns [0, half) and [half, width)
    ("halves"), or every second one ("pairs")."""

    source: fx.Node
    layout: str
    first: fx.Node
    second: fx.Node

    @property
    def nodes(self) -> list[Any]:
        return [*part_nodes(self.first), *part_nodes(self.second)]

    def index(self, node: Any) -> int | None:
        """0 or 1 if ``node`` is the first or the second part, or makes the same cut once more."""
        found = _PARTS[self.layout](node)
        return found[1] if found is not None and found[0] is self.source else None


@dataclass(frozen=True)
class Join:
    """``first`` and ``second`` put together as ``Cut`` parts them."""

    layout: str
    first: fx.Node
    second: fx.Node
    nodes: list[fx.Node] = field(compare=False)


def cut(first: Any, second: Any) -> Cut | None:
    """The tensor of which these are the first and the second part, or None."""
    for layout, part in _PARTS.items():
        one, other = part(first), part(second)
        if one and other and one[0] is other[0] and (one[1], other[1]) == (0, 1):
            return Cut(one[0], layout, first, second)
    return None


def part_nodes(part: Any) -> list[Any]:
    """The nodes that cut it."""
    cuts = kind(part) == "select" or kind(part.args[0]) == "split"
    return [part, part.args[0]] if cuts else [part]


def is_part(a: Any, b: Any) -> bool:
    """Whether both nodes are parts of the last dimension of one tensor, whichever parts."""
    found = [columns(node) or _every_second(node) for node in (a, b)]
    return all(found) and found[0][0] is found[1][0]  # type: ignore[index]


def _half(node: Any) -> tuple[Any, int] | None:
    """(tensor, 0 or 1): which half of its columns ``node`` is; None for anything else."""
    found = columns(node)
    if found is None:
        return None
    source, start, stop = found
    width = fake_value(source).shape[-1]
    for index, range_ in enumerate(((0, width // 2), (width // 2, width))):
        if (start, stop) == range_ and width % 2 == 0:
            return source, index
    return None


def _every_second(node: Any) -> tuple[Any, int] | None:
    """(tensor, 0 or 1): which of each two neighbours among its columns ``node`` has."""
    source: Any = node.args[0] if isinstance(node, fx.Node) and node.args else None
    value = fake_value(source) if isinstance(source, fx.Node) else None
    if not isinstance(value, Tensor) or not value.dim():
        return None
    if kind(node) == "slice" and argument(node, 1, "dim", 0) in (-1, value.dim() - 1):
        given = [argument(node, i, n) for i, n in ((2, "start"), (3, "end"), (4, "step"))]
    elif kind(node) == "item" and isinstance(node.args[1], tuple):
        *rest, last = node.args[1]
        whole = all(i is Ellipsis or i == slice(None) for i in rest)
        reaches = Ellipsis in rest or len(rest) + 1 == value.dim()
        if not (whole and reaches and isinstance(last, slice)):
            return None
        given = [last.start, last.stop, last.step]
    else:
        return None
    start, stop, step = given
    width = value.shape[-1]
    fits = isinstance(width, int) and width % 2 == 0 and step == 2 and start in (None, 0, 1)
    if not fits or not (stop is None or (isinstance(stop, int) and stop >= width)):
        return None
    return source, start or 0


_PARTS: dict[str, Callable[[Any], tuple[Any, int] | None]] = {
    "halves": _half,
    "pairs": _every_second,
}


def joined(node: Any) -> Join | None:
    """The two parts that ``node`` joins over the last dimension, or None."""
    value = fake_value(node) if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor):
        return None
    made, layout = node, "halves"
    if kind(node) == "view" and kind(node.args[0]) == "stack" and len(node.args[0].users) == 1:
        made, layout = node.args[0], "pairs"
    elif kind(node) != "cat":
        return None
    parts: Any = argument(made, 0, "tensors")
    if not isinstance(parts, (list, tuple)) or len(parts) != 2:
        return None
    one, other = (fake_value(p) if isinstance(p, fx.Node) else None for p in parts)
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return None
    num_dims = one.dim() + (layout == "pairs")
    shape = [*one.shape[:-1], 2 * one.shape[-1]] if one.dim() else []
    if argument(made, 1, "dim", 0) not in (-1, num_dims - 1) or one.shape[-1:] != other.shape[-1:]:
        return None
    if [*map(str, value.shape)] != [*map(str, shape)]:
        return None
    return Join(layout, parts[0], parts[1], [made, node])
