"""Repeats layers in a traced graph: layers that differ in weights alone are traced once and copied.

Dynamo takes about 0.1 s a layer; copying a layer's nodes takes a millisecond.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from torch import fx

from .source import Repeat
from .trace import GraphInput, Traced, TraceError


@dataclass(frozen=True)
class _Layer:
    """The nodes of one traced layer, which reads one value of the layer before and makes one."""

    nodes: tuple[fx.Node, ...]
    carried_in: fx.Node
    carried_out: fx.Node


def unroll(traced: Traced, repeat: Repeat) -> Traced:
    """Make the graph of the deeper model, the same as tracing it whole would give.

    Raises:
        TraceError: a layer passes on something else than one value.
    """
    placeholders = traced.gm.graph.find_nodes(op="placeholder")
    outer = {
        node
        for node, source in zip(placeholders, traced.inputs, strict=True)
        if source != GraphInput(repeat.carried)
    }
    layers = _layers(traced.gm.graph, repeat, outer)
    first, last = layers[min(layers)], layers[max(layers)]
    inside = {node for layer in layers.values() for node in layer.nodes}
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    inputs: list[GraphInput] = []
    owned: dict[int, list[tuple[fx.Node, GraphInput]]] = {number: [] for number in layers}
    for node, source in zip(placeholders, traced.inputs, strict=True):
        owner = _owner(source, repeat, layers)
        if owner is not None:
            owned[owner].append((node, source))
            continue
        mapping[node] = graph.node_copy(node)
        inputs.append(source)
    own: list[dict[fx.Node, fx.Node]] = []
    for layer, number in enumerate(repeat.layers):
        own.append({})
        for node, source in owned[number]:
            name = repeat.rename(source.name, number, layer)
            assert name is not None
            own[layer][node] = graph.placeholder(re.sub(r"\W", "_", name))
            own[layer][node].meta = dict(node.meta)
            inputs.append(replace(source, name=name))
    computed = [n for n in traced.gm.graph.nodes if n.op != "placeholder"]
    before = list(takewhile(lambda n: n not in inside, computed))
    _copy(before, graph, mapping)
    carried = mapping[first.carried_in]
    for layer, number in enumerate(repeat.layers):
        template = layers[number]
        local = {**mapping, **own[layer], template.carried_in: carried}
        _copy(template.nodes, graph, local)
        for node in template.nodes:
            repeat.relocate(local[node], layer)
        carried = local[template.carried_out]
    mapping[last.carried_out] = carried
    _copy([n for n in computed[len(before) :] if n not in inside], graph, mapping)
    graph.lint()
    return replace(traced, gm=fx.GraphModule(traced.gm, graph), inputs=tuple(inputs))


def _copy(nodes: Sequence[fx.Node], graph: fx.Graph, mapping: dict[fx.Node, fx.Node]) -> None:
    for node in nodes:
        mapping[node] = graph.node_copy(node, lambda n: mapping[n])


def _owner(source: GraphInput, repeat: Repeat, layers: dict[int, _Layer]) -> int | None:
    # A size that a layer's input carries is the same in every layer, so it stays one input.
    if source.dim is not None:
        return None
    for number in layers:
        if repeat.rename(source.name, number, number) is not None:
            return number
    return None


def _layers(graph: fx.Graph, repeat: Repeat, outer: set[fx.Node]) -> dict[int, _Layer]:
    nodes: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        number = repeat.traced_layer(node) if node.op not in ("placeholder", "output") else None
        if number is not None:
            nodes.setdefault(number, []).append(node)
    if sorted(nodes) != sorted(set(repeat.layers)):
        raise TraceError(
            f"the trace has nodes of layers {sorted(nodes)} in {repeat.module!r}, expected "
            f"{sorted(set(repeat.layers))}"
        )
    return {number: _layer(number, members, outer) for number, members in nodes.items()}


def _layer(number: int, nodes: list[fx.Node], outer: set[fx.Node]) -> _Layer:
    inside = set(nodes)
    carried_in = dict.fromkeys(_carried_in(nodes, inside | outer))
    carried_out = [n for n in nodes if any(user not in inside for user in n.users)]
    if len(carried_in) != 1 or len(carried_out) != 1:
        raise TraceError(
            f"layer {number} reads {len(carried_in)} computed values and passes on "
            f"{len(carried_out)}; layers that are traced once pass on exactly one"
        )
    return _Layer(tuple(nodes), next(iter(carried_in)), carried_out[0])


def _carried_in(nodes: list[fx.Node], others: set[fx.Node]) -> Iterator[fx.Node]:
    """The inputs of ``nodes`` that are not among ``others``, which are these nodes and what every
    layer may read."""
    for node in nodes:
        yield from (arg for arg in node.all_input_nodes if arg not in others)
