"""Digests of graphs tell apart whatever could make their code or their results another."""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, fx

from fusewright.passes import digest


def graph(
    build: Callable[[fx.Graph, fx.Node], Any], value: Any, op: str = "call_function"
) -> fx.GraphModule:
    """A graph of one input with this fake value."""
    made = fx.Graph()
    x = made.placeholder("x")
    x.meta["example_value"] = value
    made.output(build(made, x))
    return fx.GraphModule(torch.nn.Module(), made)


def on_meta(*shape: int, dtype: torch.dtype = torch.float32, device: str = "meta") -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def called(target: Any, *args: Any, **kwargs: Any) -> Callable[[fx.Graph, fx.Node], fx.Node]:
    return lambda made, x: made.call_function(target, (x, *args), kwargs)


VALUES: dict[str, Any] = {
    "a tensor": on_meta(4, 8),
    "another first size": on_meta(5, 8),
    "another last size": on_meta(4, 9),
    "sizes in turn": on_meta(8, 4),
    "more dimensions": on_meta(4, 8, 1),
    "other strides": on_meta(8, 4).t(),
    "another dtype": on_meta(4, 8, dtype=torch.bfloat16),
    "another device": on_meta(4, 8, device="cpu"),
    "an integer": 4,
    "another integer": 5,
    "a number": 4.0,
    "a pair": (on_meta(4, 8), on_meta(4, 8)),
    "another pair": (on_meta(4, 8), on_meta(4, 9)),
}
CALLS: dict[str, Callable[[fx.Graph, fx.Node], Any]] = {
    "add": called(operator.add, 1),
    "another number": called(operator.add, 2),
    "another type": called(operator.add, 1.0),
    "a flag": called(operator.add, True),
    "text": called(operator.add, "1"),
    "another function": called(operator.sub, 1),
    "an overload": called(torch.ops.aten.add.Scalar, 1),
    "another overload": called(torch.ops.aten.add.Tensor, 1),
    "a method": lambda made, x: made.call_method("add", (x, 1)),
    "another method": lambda made, x: made.call_method("sub", (x, 1)),
    "by keyword": called(torch.ops.aten.add.Scalar, other=1),
    "another keyword": called(torch.ops.aten.add.Scalar, alpha=1),
    "another value of a keyword": called(torch.ops.aten.add.Scalar, other=2),
    "operands in turn": lambda made, x: made.call_function(operator.add, (1, x)),
    "a slice": called(operator.getitem, slice(0, 1)),
    "another start": called(operator.getitem, slice(1, 1)),
    "another stop": called(operator.getitem, slice(0, 2)),
    "another step": called(operator.getitem, slice(0, 1, 2)),
    "a tuple": called(operator.getitem, (0, 1)),
    "a dtype": called(operator.getitem, torch.float32),
    "another dtype": called(operator.getitem, torch.float16),
    "twice": lambda made, x: called(operator.add, 1)(made, called(operator.add, 1)(made, x)),
    "no call": lambda made, x: x,
    "two results": lambda made, x: (x, called(operator.add, 1)(made, x)),
    "in turn": lambda made, x: (called(operator.add, 1)(made, x), x),
}


def test_a_digest_depends_on_every_part_of_a_graph() -> None:
    values = {name: digest(graph(called(operator.add, 1), v)) for name, v in VALUES.items()}
    calls = {name: digest(graph(build, on_meta(4, 8))) for name, build in CALLS.items()}
    assert values.pop("a tensor") == calls["add"]
    found = values | {f"call: {name}": made for name, made in calls.items()}
    alike = [pair for pair in combinations(found, 2) if found[pair[0]] == found[pair[1]]]
    assert not alike


def test_a_digest_does_not_depend_on_names() -> None:
    def named(name: str) -> fx.GraphModule:
        made = fx.Graph()
        x = made.placeholder(name)
        x.meta["example_value"] = on_meta(4, 8)
        made.output(made.create_node("call_function", operator.add, (x, 1), name=f"{name}_sum"))
        return fx.GraphModule(torch.nn.Module(), made)

    assert digest(named("x")) == digest(named("y"))
