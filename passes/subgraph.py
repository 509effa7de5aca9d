"""Cuts a set of nodes out of a graph as a module of its own, and names a graph by its structure.

Both sides of a rewrite are cut out to run them against each other, and the pieces between attention
ops to compile identical ones once.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .without_driver import contiguous, item


def fake_value(node: fx.Node) -> Any:
    """The fake tensor (or symbolic int, or tuple) that stands for a node's result; None for a node
    that returns nothing."""
    return node.meta.get("example_value")


def layout(value: Any) -> tuple[Any, ...] | None:
    """A tensor's dtype, device, shape and strides, to be compared; None for anything else.

    Sizes are compared as text: to ask whether two symbols are equal would make them so.
    """
    if not isinstance(value, Tensor):
        return None
    return value.dtype, value.device, str(tuple(value.shape)), str(value.stride())


def equal_sizes(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for all inputs, as far as is known; makes no guards."""
    return str(a) == str(b) or bool(statically_known_true(a == b))


def is_alike(expected: Any, actual: Any) -> bool:
    """Whether two values have one dtype, and sizes and strides that are equal for all inputs."""
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        if expected.dtype != actual.dtype or expected.dim() != actual.dim():
            return False
        dims = zip(expected.shape, actual.shape, expected.stride(), actual.stride(), strict=True)
        return all(
            equal_sizes(size, other) and (str(size) == "1" or equal_sizes(stride, its))
            for size, other, stride, its in dims
        )
    if isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)):
        pairs = zip(expected, actual, strict=False)
        return len(expected) == len(actual) and all(starmap(is_alike, pairs))
    if isinstance(expected, torch.SymInt) or isinstance(actual, torch.SymInt):
        return equal_sizes(expected, actual)
    return str(expected) == str(actual)


def compute_fake(node: fx.Node) -> Any:
    """Run ``node`` on its arguments' fake values and return its result.

    Raises whatever the op raises for shapes or dtypes that it does not take.
    """
    args: Any
    kwargs: Any
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), fake_value)
    tensors = _tensors([args, kwargs, fake_value(node)])
    if not tensors:  # it creates a tensor, perhaps of a symbolic size
        tensors = _tensors([fake_value(n) for n in node.graph.find_nodes(op="placeholder")])
    modes = [value.fake_mode for value in tensors if isinstance(value, FakeTensor)]
    # In the mode of tensors that were made in inference mode, fakes of views are found in a cache.
    inferred = torch.inference_mode(any(value.is_inference() for value in tensors))
    with modes[0] if modes else nullcontext(), inferred:
        if node.op == "call_method" and node.target == "contiguous" and not (args[1:] or kwargs):
            return contiguous(args[0])
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if not callable(node.target):
            raise TypeError(f"{node.format_node()} calls nothing")
        if node.target is operator.getitem and isinstance(args[0], Tensor):
            return item(*args)
        return node.target(*args, **kwargs)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


@dataclass(frozen=True)
class Subgraph:
    """A copy of ``nodes`` as a module: ``module(*values of inputs)`` returns the values of
    ``outputs`` as a list."""

    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...] = ()


def external_inputs(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Values that ``nodes`` read but do not compute, in order of first use."""
    inside = set(nodes)
    seen: dict[fx.Node, None] = {}
    for node in nodes:
        for arg in node.all_input_nodes:
            if arg not in inside:
                seen.setdefault(arg)
    return list(seen)


def extract(
    nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], inputs: Sequence[fx.Node]
) -> Subgraph:
    """Copy ``nodes`` (in graph order) into a new module that maps ``inputs`` to ``outputs``."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for index, node in enumerate(inputs):
        placeholder = graph.placeholder(f"arg{index}")
        placeholder.meta = {"example_value": fake_value(node)}
        mapping[node] = placeholder
    for node in nodes:
        mapping[node] = graph.node_copy(node, lambda n: mapping[n])
    graph.output([mapping[node] for node in outputs])
    graph.lint()
    module = fx.GraphModule(torch.nn.Module(), graph)
    return Subgraph(module, tuple(inputs), tuple(outputs), tuple(nodes))


def describe_value(value: Any) -> str:
    """The dtype, shape, strides and device of a fake value, as text."""
    if isinstance(value, Tensor):
        shape, stride = list(value.shape), list(value.stride())
        return f"{value.dtype}{shape}{stride}@{value.device}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(describe_value(v) for v in value)})"
    return f"{type(value).__name__}:{value}"


def _describe_arg(arg: Any, index: dict[fx.Node, int]) -> str:
    if isinstance(arg, fx.Node):
        return f"%{index[arg]}"
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(_describe_arg(a, index) for a in arg)}]"
    if isinstance(arg, dict):
        return f"{{{', '.join(f'{k}={_describe_arg(v, index)}' for k, v in arg.items())}}}"
    if isinstance(arg, slice):
        parts = (arg.start, arg.stop, arg.step)
        return f"slice({', '.join(_describe_arg(p, index) for p in parts)})"
    return f"{type(arg).__name__}:{arg}"


def _describe_target(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, str):
        return "" if node.op == "placeholder" else target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def lines(graph: fx.Graph) -> Iterable[str]:
    """The graph as text that does not depend on node names."""
    index: dict[fx.Node, int] = {}
    for node in graph.nodes:
        index[node] = len(index)
        args = _describe_arg(node.args, index) + _describe_arg(node.kwargs, index)
        value = describe_value(node.meta["example_value"]) if node.op == "placeholder" else ""
        yield f"{node.op} {_describe_target(node)} {args} {value}"


def digest(gm: fx.GraphModule) -> str:
    """A digest of the graph's text.  It is equal for graphs that make the same calls on inputs with
    the same descriptions, whatever their nodes are called."""
    return hashlib.sha256("\n".join(lines(gm.graph)).encode()).hexdigest()[:16]
