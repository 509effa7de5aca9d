"""Reads the cosines and sines of a rotation back to one of each for every two columns that rotate.

Models spread them over the columns of a head before the product, by halves or by pairs, and over
the heads.  What lies between (casts, a scale) acts on each element, so it may as well act on the
tensor before it is spread: ``Half.build`` does that, and the rest of the spelling becomes dead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .canonicalize import argument, cast_source, columns, kind, tensor, with_number
from .cuts import joined, part_nodes
from .sites import Miss

_ATEN = torch.ops.aten
_TRIGONOMETRY = ("cos", "sin")


@dataclass(frozen=True)
class Half:
    """The cosines or the sines of a rotation.

    Attributes:
        root: the tensor that they are computed from, or they themselves.
        steps: what is done to each element of ``root``, in order: ("cos",), ("neg",),
            ("mul", number), ("cast", dtype), ("part", 0 or 1) of a complex number, ("half",) of the
            columns.
        shape: sizes as text, as the product broadcasts them, but half as wide: [batch, heads,
            tokens, half] with 1 for the heads, or tokens before heads.
        dtype: the dtype that the steps give.
        function: "cos" or "sin" if one of them is seen, else "".
    """

    root: fx.Node
    steps: tuple[tuple[Any, ...], ...]
    shape: tuple[str, ...]
    dtype: torch.dtype
    function: str

    @property
    def angles(self) -> tuple[Any, ...]:
        """The steps without the function: cosines and sines of the same angles share them."""
        return tuple(("angle",) if step[0] in _TRIGONOMETRY else step for step in self.steps)

    def describe(self) -> str:
        return f"{[*tensor(self.root).shape]}"

    def build(self, graph: fx.Graph) -> fx.Node:
        """The elements of ``root``, with the steps done to them, in ``dtype``."""
        node, call = self.root, graph.call_function
        for name, *given in self.steps:
            if name == "part":
                node = call(_ATEN.view_as_real.default, (node,))
                node = call(_ATEN.select.int, (node, -1, *given))
            elif name == "mul":
                node = call(_ATEN.mul.Tensor, (node, *given))
            elif name == "half":
                half = tensor(self.root).shape[-1] // 2
                node = call(_ATEN.slice.Tensor, (node, -1, 0, half))
            elif name == "cast":
                node = call(_ATEN._to_copy.default, (node,), {"dtype": given[0]})
            else:
                node = call(getattr(_ATEN, name).default, (node,))
        return node


def read_spread(node: Any, function: str, layout: str, nodes: list[Any]) -> Half:
    """Read the factor of a whole tensor, which has every element twice, joined as in ``layout``.

    Nodes that are passed on the way are added to ``nodes``.
    """
    shape, steps = _shape(node, halved=True), list[Any]()
    dtype = tensor(node).dtype
    while (part := _spread(node, layout, nodes)) is None:
        step = _step(node)
        if step is None and layout == "halves" and _has_equal_halves(node, nodes):
            steps.insert(0, ("half",))
            part = node
            break
        if step is None:
            each = "twice, side by side" if layout == "halves" else "twice in turn"
            raise Miss(f"{node} is not known to have each frequency {each}")
        if step[0] in _TRIGONOMETRY:
            _check_function(node, function)
        if step[0] != "unsqueeze":
            steps.insert(0, step)
        nodes.append(node)
        node = with_number(node)[0] if step[0] == "mul" else node.args[0]
    root = _without_heads(part, nodes)
    return Half(root, tuple(steps), shape, dtype, _function(root, steps, function))


def read_half(node: Any, function: str, nodes: list[Any]) -> Half:
    """Read the factor of one of two parts."""
    shape, dtype = _shape(node), tensor(node).dtype
    root = _without_heads(node, nodes)
    return Half(root, (), shape, dtype, _function(root, [], function))


def read_complex(node: Any, nodes: list[Any]) -> tuple[Half, Half]:
    """Read the real and the imaginary parts of the factor of complex numbers."""
    shape, root = _shape(node), _without_heads(node, nodes)
    if tensor(root).is_conj():
        raise Miss(f"{root.name} is conjugated: it rotates the other way")
    polar: Any = root
    scales, passed = list[Any](), list[Any]()
    while kind(polar) == "mul" and with_number(polar)[1] is not None:
        passed.append(polar)
        scales.insert(0, ("mul", with_number(polar)[1]))
        polar = with_number(polar)[0]
    if kind(polar) == "polar" and kind(polar.args[0]) == "ones":
        nodes += [*passed, polar, polar.args[0]]
        made = [(("cos",), *scales), (("sin",), *scales)]
        root = _without_heads(polar.args[1], nodes)
    else:
        made = [(("part", 0),), (("part", 1),)]
    if tensor(root).dtype not in (torch.float32, torch.complex64):
        raise Miss(f"{root.name} is {tensor(root).dtype}, the op computes in float32")
    functions = _TRIGONOMETRY if len(made[0][0]) == 1 else ("", "")
    cos, sin = (
        Half(root, steps, shape, torch.float32, function)
        for steps, function in zip(made, functions, strict=True)
    )
    return cos, sin


def _shape(node: Any, *, halved: bool = False) -> tuple[str, ...]:
    value = tensor(node)
    if not 1 < value.dim() <= 4:
        raise Miss(f"{node} has {value.dim()} dimensions, expected 2 to 4")
    *rest, width = value.shape
    if not isinstance(width, int):
        raise Miss(f"{node} has a dynamic last dimension")
    return (*"1" * (4 - value.dim()), *map(str, rest), str(width // 2 if halved else width))


def _step(node: Any) -> tuple[Any, ...] | None:
    """Return the function that ``node`` applies to each element; None if it may do more."""
    if kind(node) in _TRIGONOMETRY:
        return (kind(node),)
    if kind(node) == "cast" and cast_source(node) is not node:
        return ("cast", tensor(node).dtype)
    if kind(node) == "mul" and with_number(node)[1] is not None:
        return ("mul", with_number(node)[1])
    return ("unsqueeze",) if _widens_nothing(node) else None


def _widens_nothing(node: Any) -> bool:
    """Whether the node is an ``unsqueeze`` after which the last dimension is still the last."""
    if kind(node) != "unsqueeze":
        return False
    num_dims = tensor(node).dim()
    return bool(argument(node, 1, "dim") % num_dims != num_dims - 1)


def _without_heads(node: Any, nodes: list[Any]) -> fx.Node:
    while _widens_nothing(node):
        nodes.append(node)
        node = node.args[0]
    if not isinstance(node, fx.Node):
        raise Miss(f"{node} is not a tensor of the graph")
    return node


def _spread(node: Any, layout: str, nodes: list[Any]) -> Any:
    """Return the node of which ``node`` has every row twice: as a whole ("halves"), or each element
    ("pairs"); None if there is none.

    Raises:
        Miss: ``node`` joins two different ones.
    """
    join = joined(node)
    if join is not None and join.layout == layout:
        if join.first is not join.second:
            each = "the frequencies twice, side by side"
            raise Miss(f"{node} is not {each if layout == 'halves' else 'each frequency twice'}")
        nodes += join.nodes
        return join.first
    if layout != "pairs" or kind(node) != "view":
        return None
    passed, source = [node], node.args[0]
    while kind(source) in ("clone", "expand"):
        passed.append(source)
        source = source.args[0]
    if kind(source) != "unsqueeze" or kind(passed[-1]) != "expand":
        return None
    part = source.args[0]
    alone, whole = tensor(part).shape, tensor(node).shape
    spread = tensor(passed[-1]).shape
    if argument(source, 1, "dim") % len(spread) != len(alone):
        return None
    if [*map(str, spread)] != [*map(str, alone), "2"] or len(whole) != len(alone):
        return None
    nodes += [*passed, source]
    return part


def _has_equal_halves(node: Any, nodes: list[Any]) -> bool:
    """Whether each column of the first half is computed as that of the second, from the same one,
    as where each axis of a picture has angles for some columns of both halves.

    Nodes that are passed on the way are added to ``nodes``.
    """
    width = tensor(node).shape[-1]
    if not isinstance(width, int) or width % 2 or kind(node) not in ("cat", "slice", "item"):
        return False
    passed, half = set[Any](), width // 2
    if any(_origin(node, i, passed) != _origin(node, i + half, passed) for i in range(half)):
        return False
    nodes += passed
    return True


def _origin(node: Any, column: int, passed: set[Any]) -> tuple[Any, ...]:
    """(node, its column, steps): what a column of ``node`` is computed from, and how."""
    steps = list[tuple[Any, ...]]()
    while True:
        before = node
        if (part := columns(node)) is not None:
            passed |= {*part_nodes(node)}
            node, column = part[0], part[1] + column
        elif kind(node) == "cat" and _joins_columns(node):
            for part in argument(node, 0, "tensors"):
                node = part
                if column < tensor(part).shape[-1]:
                    break
                column -= tensor(part).shape[-1]
        elif kind(node) == "select" and _leaves_columns(node):
            steps.append(("select", *node.args[1:]))
            node = node.args[0]
        elif (step := _step(node)) is not None:
            steps.append((*step, *(node.args[1:] if step[0] == "unsqueeze" else ())))
            node = with_number(node)[0] if step[0] == "mul" else node.args[0]
        else:
            return node, column, steps
        passed.add(before)


def _leaves_columns(select: fx.Node) -> bool:
    num_dims = tensor(select.args[0]).dim()
    return bool(argument(select, 1, "dim") % num_dims != num_dims - 1)


def _joins_columns(node: fx.Node) -> bool:
    widths = [tensor(part).shape[-1] for part in argument(node, 0, "tensors")]
    last = argument(node, 1, "dim", 0) in (-1, tensor(node).dim() - 1)
    return last and all(isinstance(width, int) for width in widths)


def _check_function(node: fx.Node, function: str) -> None:
    if function and kind(node) != function:
        raise Miss(f"{node.name} is not a {function}")


def _function(root: fx.Node, steps: list[tuple[Any, ...]], function: str) -> str:
    """``function`` if ``root`` or a step is that, seen through ops that only move elements."""
    if any(step[0] in _TRIGONOMETRY for step in steps):
        return function
    node: Any = root
    while kind(node) in ("slice", "unsqueeze", "cast", "mul") and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    if kind(node) not in _TRIGONOMETRY:
        return ""
    _check_function(node, function)
    return function
