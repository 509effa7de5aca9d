"""Prints a part of a graph as lines of text, one a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from ...passes import fake_value
from ..emit.piece_code import describe, op_name


def draw(nodes: Sequence[fx.Node], dims: Mapping[str, str]) -> list[str]:
    """The calls of one layer: name, type and shape of the result, what is called with what."""
    lines = []
    for node in nodes:
        result = describe(fake_value(node), dims)
        name = f"{node.name}: {result}" if result else node.name
        lines.append(f"{name} = {op_name(node)}({_arguments(node)})")
    return lines


def _arguments(node: fx.Node) -> str:
    args: list[Any] = [str(arg) for arg in node.args]
    return ", ".join([*args, *(f"{name}={value}" for name, value in node.kwargs.items())])
