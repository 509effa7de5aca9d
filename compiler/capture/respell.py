"""Spells a graph of ATen ops as Dynamo spells its graphs: operators, methods, functions of torch.

Passes, emitters and verification read that spelling.  Ops that are not in the tables stay; Inductor
compiles them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from ...passes.rule import refresh_view
from ...passes.subgraph import compute_fake, describe_value, fake_value
from .trace import Traced, TraceError

_ATEN = torch.ops.aten
_LAYER_NORM = _ATEN.native_layer_norm.default

_OPERATORS: dict[Any, Any] = {
    _ATEN.add.Tensor: operator.add,
    _ATEN.sub.Tensor: operator.sub,
    _ATEN.mul.Tensor: operator.mul,
    _ATEN.div.Tensor: operator.truediv,
    _ATEN.neg.default: operator.neg,
    _ATEN.rsqrt.default: torch.rsqrt,
    _ATEN.sigmoid.default: torch.sigmoid,
    _ATEN.tanh.default: torch.tanh,
    _ATEN.cos.default: torch.cos,
    _ATEN.sin.default: torch.sin,
    _ATEN.silu.default: F.silu,
    _ATEN.gelu.default: F.gelu,
    _ATEN.relu.default: F.relu,
    _ATEN.cat.default: torch.cat,
    _ATEN.stack.default: torch.stack,
}
"""Functions of the same arguments."""
_METHODS: dict[Any, str] = {
    _ATEN.view.default: "view",
    _ATEN._unsafe_view.default: "view",
    _ATEN.reshape.default: "reshape",
    _ATEN.transpose.int: "transpose",
    _ATEN.permute.default: "permute",
    _ATEN.t.default: "t",
    _ATEN.expand.default: "expand",
    _ATEN.unsqueeze.default: "unsqueeze",
    _ATEN.squeeze.dim: "squeeze",
    _ATEN.select.int: "select",
    _ATEN.split.Tensor: "split",
    _ATEN.split_with_sizes.default: "split",
    _ATEN.pow.Tensor_Scalar: "pow",
    _ATEN.mean.dim: "mean",
    _ATEN.sum.dim_IntList: "sum",
}
"""Methods of the same arguments."""
_SAME = (_ATEN.detach.default, _ATEN.alias.default, _ATEN.lift_fresh_copy.default)
_END = 2**62


def respell(traced: Traced) -> Traced:
    """The same graph in Dynamo's spelling, with the values that its nodes stand for.

    Raises:
        TraceError: it holds a tensor that is no input.
    """
    old, apart = traced.gm, _apart(traced.gm.graph)
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    flat = iter(range(len(traced.inputs)))
    for node in old.graph.nodes:
        if node.op == "placeholder":
            copy = graph.placeholder(_placeholder_name(traced, next(flat)))
            copy.meta = {"example_value": node.meta["val"]}
        elif node.op == "output":
            (result,) = node.all_input_nodes
            graph.output((mapping[result],))
            continue
        elif node.op == "get_attr":
            raise TraceError(
                "the model's code makes a tensor of numbers while it runs, which is no "
                "input of its graph; such tensors have to be buffers"
            )
        elif node.target in _SAME or _is_layer_norm(node):
            mapping[node] = mapping[node.args[0]]
            continue
        else:
            copy = _call(graph, node, mapping)
            value = node.meta.get("val")
            copy.meta |= {"example_value": value[0] if copy.target is F.layer_norm else value}
            if node in apart:
                _make_own(copy, apart[node])
            elif apart:
                refresh_view(copy)
            copy.meta |= {k: node.meta[k] for k in ("nn_module_stack",) if k in node.meta}
        mapping[node] = copy
    graph.lint()
    return replace(traced, gm=fx.GraphModule(torch.nn.Module(), graph))


def _placeholder_name(traced: Traced, index: int) -> str:
    source = traced.inputs[index]
    name = source.name if source.dim is None else f"size_{source.name}_{source.dim}"
    return "".join(c if c.isalnum() else "_" for c in name)


def _apart(graph: fx.Graph) -> dict[fx.Node, Any]:
    """The ops in place which may as well make a tensor of their own, and the ops that do: what they
    overwrite is no input, nor read behind them.  Passes know each op by one name."""
    memory_of = {node: _memory(node) for node in graph.nodes}
    inputs = {one for node in graph.find_nodes(op="placeholder") for one in memory_of[node]}
    place = {node: index for index, node in enumerate(graph.nodes)}
    own: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        name, _, overload = str(node.target).removeprefix("aten.").partition(".")
        twin = getattr(getattr(_ATEN, name.rstrip("_"), None), overload, None)
        taken = name.endswith("_") and twin in _OPERATORS and not node.kwargs
        if not taken or inputs & memory_of[node]:
            continue
        held = {one for one in memory_of if place[one] < place[node]}
        held = {one for one in held if memory_of[one] & memory_of[node]}
        if all(place[user] <= place[node] for one in held for user in one.users):
            own[node] = _OPERATORS[twin]
    return own


def _memory(node: fx.Node) -> set[int]:
    values = [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
    return {value.untyped_storage()._cdata for value in values}


def _make_own(copy: fx.Node, target: Any) -> None:
    """Let an op in place make a tensor of its own, if that is alike: it may be of another dtype."""
    in_place, value = copy.target, fake_value(copy)
    copy.target = target
    with torch.inference_mode():  # as it was captured
        copy.meta["example_value"] = compute_fake(copy)
    if describe_value(fake_value(copy)) != describe_value(value):
        copy.target, copy.meta["example_value"] = in_place, value


def _call(graph: fx.Graph, node: fx.Node, mapping: dict[fx.Node, fx.Node]) -> fx.Node:
    target = node.target
    args = fx.node.map_arg(node.args, lambda n: mapping[n])
    kwargs = fx.node.map_arg(node.kwargs, lambda n: mapping[n])
    if target in _OPERATORS:
        return graph.call_function(_OPERATORS[target], args, kwargs)
    if target in _METHODS:
        return graph.call_method(_METHODS[target], args, kwargs)
    if target in _SPECIAL:
        copy: fx.Node = _SPECIAL[target](graph, node, args, kwargs)
        return copy
    return graph.node_copy(node, lambda n: mapping[n])


def _cast(graph: fx.Graph, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
    """A cast of the dtype alone; a copy to another device or layout stays as it is."""
    if set(kwargs) == {"dtype"}:
        return graph.call_method("to", (args[0], kwargs["dtype"]))
    return graph.call_function(_ATEN._to_copy.default, args, kwargs)


def _empty_like(graph: fx.Graph, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
    options = {name: value for name, value in kwargs.items() if name != "pin_memory" or value}
    return graph.call_function(torch.empty_like, args, options)


def _clone(graph: fx.Graph, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
    if kwargs.get("memory_format") == torch.contiguous_format:
        return graph.call_method("contiguous", args)
    return graph.call_method("clone", args, kwargs)


def _slice(graph: fx.Graph, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
    source: Any = node.args[0]
    bounds: tuple[Any, ...] = (*args[1:], *(0, None, None, 1)[len(args) - 1 :])
    dim, start, stop, step = bounds
    num_dims = source.meta["val"].dim()
    stop = None if isinstance(stop, int) and stop > _END else stop
    index: list[Any] = [slice(None)] * num_dims
    index[dim] = slice(None if start == 0 else start, stop, None if step == 1 else step)
    if dim in (-1, num_dims - 1):
        index = [Ellipsis, index[-1]]
    return graph.call_function(operator.getitem, (args[0], tuple(index)))


def _is_layer_norm(node: fx.Node) -> bool:
    """Whether a node takes a layer norm's result, or its statistics for nothing."""
    source: Any = node.args[0] if node.target is operator.getitem else None
    return source is not None and source.target is _LAYER_NORM and _takes_result(source)


def _takes_result(node: fx.Node) -> bool:
    return all(user.args[1] == 0 or not user.users for user in node.users)


def _layer_norm(graph: fx.Graph, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
    if _takes_result(node):
        return graph.call_function(F.layer_norm, args)
    return graph.call_function(_LAYER_NORM, args)


def _embedding(graph: fx.Graph, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
    """The op, which clamps what ``F.embedding`` refuses, for the ids of one row."""
    weight, ids = args[:2]
    read: Tensor = node.args[1].meta["val"]  # type: ignore[union-attr]
    if read.dim() > 2 or (read.dim() == 2 and str(read.shape[0]) != "1"):
        return graph.call_function(F.embedding, (ids, weight))

    def then(name: str, *how: Any) -> Callable[[fx.Node], fx.Node]:
        return lambda source: graph.call_method(name, (source, *how))

    def rows(ids: fx.Node) -> fx.Node:
        return graph.call_function(torch.ops.fw.embedding.default, (ids, weight))

    steps = [then("squeeze", 0)] if read.dim() == 2 else []
    steps += [then("to", torch.int32)] if read.dtype != torch.int32 else []
    for step in [*steps, rows]:
        ids = step(ids)
        ids.meta["example_value"] = compute_fake(ids)
    return graph.call_method("unsqueeze", (ids, 0)) if read.dim() == 2 else ids


def _size(graph: fx.Graph, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
    return graph.call_method("size", args)


_SPECIAL: dict[Any, Callable[..., fx.Node]] = {
    _ATEN._to_copy.default: _cast,
    _ATEN.clone.default: _clone,
    _ATEN.empty_like.default: _empty_like,
    _ATEN.slice.Tensor: _slice,
    _ATEN.embedding.default: _embedding,
    _LAYER_NORM: _layer_norm,
    _ATEN.sym_size.int: _size,
}
