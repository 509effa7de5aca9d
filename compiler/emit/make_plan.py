"""Names every value of a split graph, and gives each region its step in the plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...config import Per
from ...passes import Subgraph, digest, fake_value
from ..capture.trace import Traced
from ..lowering.partition import Region, free_symbols
from ..run.plan import Dtype, OpStep, PieceStep, Plan, TensorInput, Value
from .inductor import MAX_SIZE
from .piece_code import PieceCode

PER_SEQUENCE = Per.SEQUENCE.dims + Per.BOUNDARY.dims
"""Names of the dynamic dimensions that count sequences."""

PER_BLOCK = ("num_blocks", "max_blocks")
"""Names of the dynamic dimensions that count KV blocks, which only opaque kernels see."""

_INT32_MAX = 2**31 - 1


def make_plan(traced: Traced, regions: list[Region]) -> tuple[Plan, dict[str, Subgraph]]:
    """Name every value, give each region a step, and keep one subgraph for identical regions.

    Returns the plan and the distinct pieces by digest.
    """
    placeholders = traced.gm.graph.find_nodes(op="placeholder")
    names: dict[fx.Node, str] = {}
    sizes: dict[str, tuple[str, int]] = {}
    for node, source in zip(placeholders, traced.inputs, strict=True):
        names[node] = source.name
        if source.dim is not None:
            names[node] = f"size:{source.name}:{source.dim}"
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
            args: Any = fx.node.map_aggregate(node.args, lambda arg: _plan_arg(arg, names))
            steps.append(OpStep(_op_name(node), args, outputs, per_token))
            continue
        subgraph = region.subgraph()
        piece = digest(subgraph.module)
        pieces.setdefault(piece, subgraph)
        inputs = tuple(names[node] for node in region.inputs)
        steps.append(PieceStep(piece, inputs, outputs, per_token))
    (result,) = next(iter(traced.gm.graph.find_nodes(op="output"))).args[0]
    tensors = {
        names[node]: _tensor_input(fake_value(node), traced)
        for node, source in zip(placeholders, traced.inputs, strict=True)
        if source.dim is None
    }
    plan = Plan(tuple(steps), tensors, sizes, _ranges(traced), names[result])
    return plan, pieces


def _tensor_input(fake: torch.Tensor, traced: Traced) -> TensorInput:
    shape = tuple(
        dim if isinstance(dim, int) else traced.dims.get(str(dim), str(dim)) for dim in fake.shape
    )
    transposed = all(isinstance(size, int) for size in shape) and not fake.is_contiguous()
    dtype = str(fake.dtype).removeprefix("torch.")
    return TensorInput(dtype, shape, fake.device.type, transposed)


def _ranges(traced: Traced) -> dict[str, tuple[int, int]]:
    """The least and largest size of each dynamic dimension.  Compiled code indexes with 32 bits, so
    no tensor may have more elements, except KV caches, whose kernels have 64-bit block offsets."""
    largest = dict.fromkeys(traced.dims.values(), _INT32_MAX)
    for node in traced.gm.graph.nodes:
        fake = fake_value(node)
        if not isinstance(fake, torch.Tensor):
            continue
        counts = {traced.dims[str(s)] for s in free_symbols(fake) if str(s) in traced.dims}
        fixed = 1
        for dim in fake.shape:
            fixed *= dim if isinstance(dim, int) else 1
        if len(counts) == 1 and counts.isdisjoint(PER_BLOCK):
            (count,) = counts
            largest[count] = min(largest[count], _INT32_MAX // max(fixed, 1))
    return {count: (1, high) for count, high in largest.items()}


def limit_ranges(plan: Plan, code: Iterable[PieceCode]) -> Plan:
    """Limit the sizes to those that Inductor's code was checked for, if it made any."""
    if all(piece.emitter == "direct" for piece in code):
        return plan
    limited = {
        count: (low, high if count in PER_BLOCK else min(high, MAX_SIZE))
        for count, (low, high) in plan.ranges.items()
    }
    return replace(plan, ranges=limited)


def _plan_arg(arg: Any, names: Mapping[fx.Node, str]) -> Any:
    if isinstance(arg, fx.Node):
        return Value(names[arg])
    return Dtype(str(arg).removeprefix("torch.")) if isinstance(arg, torch.dtype) else arg


def _op_name(node: fx.Node) -> str:
    if not isinstance(node.target, torch._ops.OpOverload):
        raise TypeError(f"{node.format_node()} does not call a dispatcher op")
    return str(node.target.name())


def _counts_sequences(traced: Traced, region: Region) -> bool:
    symbols = set()
    for node in (*region.nodes, *region.inputs):
        symbols |= {str(s) for s in free_symbols(fake_value(node))}
    return any(traced.dims.get(s) in PER_SEQUENCE for s in symbols)
