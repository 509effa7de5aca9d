"""Takes out of a graph what depends on weights alone, to be computed once, when they are there.

A captured model computes its angles and the like with every step.  Each such value becomes an input
of the program, ``constants/0`` and so on, and a piece of code that makes it, which the plan names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from ...passes import Subgraph, digest, external_inputs, extract, fake_value
from ...passes.rule import memory, writes, written
from ..capture.trace import GraphInput, Traced
from ..run.plan import PieceStep
from .direct import is_spelled

CONSTANTS = "constants/"


@dataclass(frozen=True)
class Constants:
    """Holds the steps that run once, before the first step of a model, and their code by digest."""

    steps: tuple[PieceStep, ...] = ()
    pieces: Mapping[str, Subgraph] = field(default_factory=dict)


def take_constants(traced: Traced) -> tuple[Traced, Constants]:
    """Replace constants in the graph, in place, by inputs; returns it with these, and how they are
    computed."""
    graph = traced.gm.graph
    names = dict(zip(graph.find_nodes(op="placeholder"), traced.inputs, strict=True))
    constant = _constant_nodes(graph)
    inputs, steps, pieces = list(traced.inputs), list[PieceStep](), dict[str, Subgraph]()
    known: dict[tuple[str, ...], fx.Node] = {}
    last = list(names)[-1]
    for node in list(_worth_taking(graph, constant)):
        nodes = [one for one in graph.nodes if one in _computing(node, constant)]
        piece = extract(nodes, [node], external_inputs(nodes))
        key, read = digest(piece.module), tuple(names[one].name for one in piece.inputs)
        if (key, *read) not in known:
            name = f"{CONSTANTS}{len(steps)}"
            pieces[key] = piece
            steps.append(PieceStep(key, read, (name,), per_token=False))
            with graph.inserting_after(last):
                last = graph.placeholder(name.replace("/", "_"))
            last.meta = {"example_value": fake_value(node)}
            inputs.append(GraphInput(name))
            known[key, *read] = last
        node.replace_all_uses_with(known[key, *read])
    graph.eliminate_dead_code(writes)
    traced.gm.recompile()
    return replace(traced, inputs=tuple(inputs)), Constants(tuple(steps), pieces)


def _constant_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Weights, whose sizes are all fixed, and all that is computed of them alone and of nothing
    that is written to."""
    changed = {one for node in graph.nodes for one in memory(*written(node))}
    constant: set[fx.Node] = set()
    for node in graph.nodes:
        value = fake_value(node)
        if not isinstance(value, Tensor) or memory(node) & changed:
            continue
        if node.op == "placeholder":
            known = all(isinstance(size, int) for size in value.shape)
        else:
            known = _is_pure(node) and all(arg in constant for arg in node.all_input_nodes)
        if known:
            constant.add(node)
    return constant


def _is_pure(node: fx.Node) -> bool:
    """Whether a node computes the same whenever it is called, and code can say so."""
    if not node.op.startswith("call_") or writes(node) or not is_spelled(node):
        return False
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    random = torch.Tag.nondeterministic_seeded in target.tags
    return target.namespace == "aten" and not random and "empty" not in str(target)


def _worth_taking(graph: fx.Graph, constant: set[fx.Node]) -> Iterator[fx.Node]:
    """The last nodes of constants that are computed of vectors: those of matrices would take the
    memory of these again, but for the table of a rotation, which is needed in any case."""
    for node in graph.nodes:
        if node not in constant or node.op == "placeholder":
            continue
        outside = [user for user in node.users if user not in constant]
        computing = _computing(node, constant)
        sources = external_inputs([one for one in graph.nodes if one in computing])
        if not outside or not fake_value(node).is_contiguous():
            continue
        if memory(node) & memory(*sources):  # a view of a weight
            continue
        vectors = all(fake_value(source).dim() < 2 for source in sources)
        if vectors or all(_is_table(node, user) for user in outside):
            yield node


def _is_table(node: fx.Node, user: fx.Node) -> bool:
    places: dict[Any, int] = {
        torch.ops.fw.rotary_embedding.default: 3,
        torch.ops.fw.rope_kv_store.default: 4,
    }
    place = places.get(user.target)
    return place is not None and user.args[place] is node


def _computing(node: fx.Node, constant: set[fx.Node]) -> set[fx.Node]:
    """The node and all that it is computed of, but for weights."""
    seen: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one.op != "placeholder" and one in constant and one not in seen:
            seen.add(one)
            waiting += one.all_input_nodes
    return seen
