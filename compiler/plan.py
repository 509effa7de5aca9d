"""The plan: which piece or op runs with which values, by name; data, no tensors, no code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import fx

from ..passes import Subgraph, digest, fake_value
from .partition import Region, free_symbols
from .trace import GraphInput, Traced


@dataclass(frozen=True)
class Value:
    """A reference to a named value inside an op's arguments."""

    name: str


@dataclass(frozen=True)
class PieceStep:
    """Run compiled piece ``piece`` on the named values."""

    piece: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    per_token: bool


@dataclass(frozen=True)
class OpStep:
    """Call one op; ``op`` is its dispatcher name once lowered: fw_triton::paged_attention."""

    op: str
    args: tuple[Any, ...]
    outputs: tuple[str, ...]
    per_token: bool


@dataclass(frozen=True)
class Plan:
    """Steps in order.  ``sizes`` says which dimension of which step input each size value is.

    A step is ``per_token`` when no shape in it counts sequences: it can then be captured for a
    padded number of tokens, whatever the sequences are.
    """

    steps: tuple[PieceStep | OpStep, ...]
    inputs: tuple[str, ...]
    sizes: Mapping[str, tuple[str, int]]
    output: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


PER_SEQUENCE = ("num_seqs", "num_seqs_plus_1")
"""Names of the dynamic dimensions that count sequences."""


def make_plan(traced: Traced, regions: list[Region]) -> tuple[Plan, dict[str, Subgraph]]:
    """Name every value, give each region a step, and keep one subgraph for identical regions.

    Returns the plan and the distinct pieces by digest.
    """
    placeholders = traced.gm.graph.find_nodes(op="placeholder")
    names: dict[fx.Node, str] = {}
    sizes: dict[str, tuple[str, int]] = {}
    for node, source in zip(placeholders, traced.inputs, strict=True):
        names[node] = _input_name(source)
        if source.dim is not None:
            sizes[names[node]] = (source.name, source.dim)
    pieces: dict[str, Subgraph] = {}
    steps: list[PieceStep | OpStep] = []
    for region in regions:
        for node in region.nodes:
            names[node] = f"%{node.name}"
        outputs = tuple(names[node] for node in region.outputs)
        per_token = not _counts_sequences(traced, region)
        if region.is_single_op:
            node = region.nodes[0]
            args: Any = fx.node.map_arg(node.args, lambda n: cast("Any", Value(names[n])))
            steps.append(OpStep(_op_name(node), args, outputs, per_token))
            continue
        subgraph = region.subgraph()
        piece = digest(subgraph.module)
        pieces.setdefault(piece, subgraph)
        inputs = tuple(names[node] for node in region.inputs)
        steps.append(PieceStep(piece, inputs, outputs, per_token))
    (result,) = next(iter(traced.gm.graph.find_nodes(op="output"))).args[0]
    plan = Plan(tuple(steps), tuple(names[p] for p in placeholders), sizes, names[result])
    return plan, pieces


def _op_name(node: fx.Node) -> str:
    if not isinstance(node.target, torch._ops.OpOverload):
        raise TypeError(f"{node.format_node()} does not call a dispatcher op")
    return str(node.target.name())


def _input_name(source: GraphInput) -> str:
    return source.name if source.dim is None else f"size:{source.name}:{source.dim}"


def _counts_sequences(traced: Traced, region: Region) -> bool:
    symbols = set()
    for node in (*region.nodes, *region.inputs):
        symbols |= {str(s) for s in free_symbols(fake_value(node))}
    return any(traced.dims.get(s) in PER_SEQUENCE for s in symbols)
