"""A part of a graph as data for a picture: what is computed from what, without views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..passes import fake_value
from .emit_direct import is_plain
from .piece_code import describe, op_name


@dataclass(frozen=True)
class Box:
    """One call.

    Attributes:
        name: of its node.
        op: what it calls.
        made: type and shape of its result.
        reads: numbers of the boxes whose results it reads; -1 for what comes from before.
        weights: types and shapes of the weights it reads.
    """

    name: str
    op: str
    made: str
    reads: tuple[int, ...]
    weights: tuple[str, ...]


@dataclass(frozen=True)
class Drawn:
    """Calls in order, and the same graph as lines of text, with every view."""

    boxes: list[Box]
    lines: list[str]


def draw(nodes: Sequence[fx.Node], dims: Mapping[str, str]) -> Drawn:
    """The calls of one layer."""
    lines, boxes = [], []
    sources: dict[fx.Node, tuple[int, ...]] = {}
    for node in nodes:
        made = describe(fake_value(node), dims)
        name = f"{node.name}: {made}" if made else node.name
        lines.append(f"{name} = {op_name(node)}({_arguments(node)})")
        inputs = node.all_input_nodes
        reads = tuple(dict.fromkeys(n for arg in inputs for n in _sources(arg, sources)))
        if is_plain(node) and not isinstance(node.target, torch._ops.OpOverload):
            fresh = "empty" in op_name(node)
            sources[node] = () if fresh else reads  # a view is what it views
            continue
        weights = tuple(describe(fake_value(arg), dims) for arg in inputs if _is_weight(arg))
        boxes.append(Box(node.name, op_name(node), made, reads, weights))
        sources[node] = (len(boxes) - 1,)
        if not made:  # it writes into an argument, whose readers come after it
            sources |= {arg: (len(boxes) - 1,) for arg in inputs if sources.get(arg) == ()}
    return Drawn(boxes, lines)


def _sources(arg: fx.Node, known: Mapping[fx.Node, tuple[int, ...]]) -> tuple[int, ...]:
    if arg in known:
        return known[arg]
    return () if arg.op == "placeholder" else (-1,)


def _is_weight(node: fx.Node) -> bool:
    value = fake_value(node)
    static = isinstance(value, torch.Tensor) and all(isinstance(d, int) for d in value.shape)
    return node.op == "placeholder" and static


def _arguments(node: fx.Node) -> str:
    args: list[Any] = [str(arg) for arg in node.args]
    return ", ".join([*args, *(f"{name}={value}" for name, value in node.kwargs.items())])
