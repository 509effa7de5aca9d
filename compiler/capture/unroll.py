"""Repeats layers in a traced graph: layers that differ in weights alone are traced once and copied.

Tracing takes about 0.1 s a layer; copying a layer's nodes takes a millisecond.  In the graph of a
captured model marks say where a layer begins (``passes/raising/layer_mark.py``), since its layers
read other values of the model too, such as angles; they are raised before they are copied.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import takewhile

from torch import fx

from ...passes import PassReport
from ...passes.raising.layer_mark import MARK
from ...passes.rule import is_call, memory, writes, written
from ...passes.subgraph import fake_value, is_alike
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
    layers, shared = _layers(traced, repeat)
    first, last = layers[min(layers)], layers[max(layers)]
    inside = {node for layer in layers.values() for node in layer.nodes}
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    inputs: list[GraphInput] = []
    owned: dict[int, list[tuple[fx.Node, GraphInput]]] = {number: [] for number in layers}
    for node, source in zip(placeholders, traced.inputs, strict=True):
        owner = _owner(source, repeat)
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
            own[layer][node] = graph.placeholder(re.sub(r"\W", "_", name))
            own[layer][node].meta = dict(node.meta)
            inputs.append(replace(source, name=name))
    computed = [n for n in traced.gm.graph.nodes if n.op != "placeholder"]
    _copy(takewhile(lambda n: n not in inside, computed), graph, mapping)
    carried = mapping[first.carried_in]
    by_name = {
        it.name: n for n, it in zip(placeholders, traced.inputs, strict=True) if it.dim is None
    }
    for layer, number in enumerate(repeat.layers):
        template = layers[number]
        local = {**mapping, **own[layer], template.carried_in: carried}
        local |= {
            by_name[name]: mapping[by_name[of_group]]
            for name, of_group in repeat.other_group(layer).items()
        }
        nodes = [node for node in template.nodes if node not in mapping]
        _copy(nodes, graph, local)
        for node in nodes:
            repeat.relocate(local[node], layer)
        mapping |= {node: local[node] for node in nodes if node in shared}
        carried = local[template.carried_out]
    mapping[last.carried_out] = carried
    known = {*mapping, *inside, *(layer.carried_in for layer in layers.values())}
    _copy([n for n in computed if n not in known], graph, mapping)
    graph.lint()
    return replace(traced, gm=fx.GraphModule(traced.gm, graph), inputs=tuple(inputs))


def _copy(nodes: Iterable[fx.Node], graph: fx.Graph, mapping: dict[fx.Node, fx.Node]) -> None:
    for node in nodes:
        if is_call(node, MARK):
            mapping[node] = mapping[node.args[0]]  # type: ignore[index]
        else:
            mapping[node] = graph.node_copy(node, lambda n: mapping[n])


def _owner(source: GraphInput, repeat: Repeat) -> int | None:
    # A size that a layer's input carries is the same in every layer, so it stays one input.
    return repeat.owner(source.name) if source.dim is None else None


def _layers(traced: Traced, repeat: Repeat) -> tuple[dict[int, _Layer], set[fx.Node]]:
    """The traced layers by number; and the nodes in them that are computed of nothing that belongs
    to a layer, and are computed once therefore."""
    graph = traced.gm.graph
    sources = dict(zip(graph.find_nodes(op="placeholder"), traced.inputs, strict=True))
    marks = [node for node in graph.nodes if is_call(node, MARK)]
    carried = {*marks} or {n for n, it in sources.items() if it == GraphInput(repeat.carried)}
    numbers = {
        node: repeat.traced_layer(node)
        for node in graph.nodes
        if node.op not in ("placeholder", "output")
    }
    _end_at_marks(marks, numbers)
    of_groups = {name for layer in range(len(repeat.layers)) for name in repeat.other_group(layer)}
    outer = {n for n, it in sources.items() if _owner(it, repeat) is None} - carried
    outer -= {n for n, it in sources.items() if it.dim is None and it.name in of_groups}
    shared = _shared(graph, numbers, outer) if marks else set()
    nodes: dict[int, list[fx.Node]] = {}
    for node, number in numbers.items():
        if number is not None:
            nodes.setdefault(number, []).append(node)
    if sorted(nodes) != sorted(set(repeat.layers)):
        raise TraceError(
            f"the trace has nodes of layers {sorted(nodes)} in {repeat.module!r}, expected "
            f"{sorted(set(repeat.layers))}"
        )
    if any(not is_alike(fake_value(marks[0]), fake_value(mark)) for mark in marks):
        raise TraceError("layers pass on tensors of several shapes")
    outer = {*sources} | (shared | {n for n in numbers if numbers[n] is None} if marks else set())
    outer -= carried
    return {number: _layer(number, of, outer, shared) for number, of in nodes.items()}, shared


def _end_at_marks(marks: list[fx.Node], numbers: dict[fx.Node, int | None]) -> None:
    """Let marks belong to no layer, and what they are made of to the layer before."""
    places = {node: place for place, node in enumerate(numbers)}
    before, start = None, -1
    for mark in marks:
        number, numbers[mark] = numbers[mark], None
        waiting = list(mark.all_input_nodes)
        while waiting:
            node = waiting.pop()
            if places.get(node, -1) > start and numbers[node] == number:
                numbers[node] = before
                waiting += node.all_input_nodes
        before, start = number, places[mark]


def _shared(
    graph: fx.Graph, numbers: dict[fx.Node, int | None], outer: set[fx.Node]
) -> set[fx.Node]:
    """The nodes in layers that are computed of ``outer`` inputs alone."""
    changed = {one for node in graph.nodes for one in memory(*written(node))}
    same = set(outer)
    for node in numbers:
        fixed = not writes(node) and not is_call(node, MARK) and not memory(node) & changed
        if fixed and all(arg in same for arg in node.all_input_nodes):
            same.add(node)
    return {node for node in same if numbers.get(node) is not None}


def _layer(number: int, nodes: list[fx.Node], outer: set[fx.Node], shared: set[fx.Node]) -> _Layer:
    inside = set(nodes)
    carried_in = dict.fromkeys(_carried_in(nodes, inside | outer))
    read_outside = (n for n in nodes if any(user not in inside for user in n.users))
    carried_out = [n for n in read_outside if n not in shared]
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


def in_all_layers(report: PassReport, repeat: Repeat) -> PassReport:
    """The report of a pass over traced layers, with the sites of all that they stand for."""
    sites = []
    for site in report.sites:
        traced, inside = repeat.layer_of(site.module)
        copies = [n for n, kind in enumerate(repeat.layers) if kind == traced]
        for layer in copies:
            path = f"{repeat.module}.{layer}" + (f".{inside}" if inside else "")
            sites.append(replace(site, module=path))
        sites += [] if copies else [site]
    return replace(report, sites=sites)
