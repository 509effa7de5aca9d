"""Explains what a lowered model will do, and why, without compiling it.

A graph and its plan go in; sites, pieces, launches and bytes of a decode step come out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from ... import ops
from ...config import UserError
from ...ops.core.choice import KernelName
from ...passes import fake_value
from ..build import Lowered
from ..capture.trace import Traced
from ..emit.direct import is_library_call, is_plain
from ..emit.kernels import launches_of, on_meta, step_sizes
from ..emit.piece_code import op_name
from ..emit.pieces import choose_emitter
from ..run.plan import PieceStep
from .fusions import Fusion, chain_fusions, fusions, has_pattern, linear_parts
from .graph import draw
from .sites import SiteFacts, Where, left_alone

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_MOST_SEQS = 512


@dataclass(frozen=True)
class OpFacts:
    """One call.  ``launches`` is None if they are not known before it runs: Inductor decides, or a
    reference runs op by op.  ``bytes`` and ``flops`` are the op's own cost; an ATen op has none."""

    op: str
    launches: int | None
    bytes: int
    flops: int


@dataclass(frozen=True)
class TokenRange:
    """Steps of ``first`` to ``last`` tokens run the same kernels; ``last`` is None at the open end.

    With ``decode``, the steps have one token a sequence, else one prompt.  ``choices`` has those
    that the range of fewer tokens has not.
    """

    decode: bool
    first: int
    last: int | None
    kernels: tuple[str, ...]
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerFacts:
    """Layers that are alike, described by their most common form; ``layers`` is empty for what lies
    outside of all layers."""

    title: str
    layers: tuple[int, ...]
    calls: list[OpFacts]
    ranges: list[TokenRange]
    before: list[str]
    after: list[str]

    @property
    def launches(self) -> int | None:
        return total_launches(self.calls)

    @property
    def bytes(self) -> int:
        return sum(call.bytes for call in self.calls)


@dataclass(frozen=True)
class PieceFacts:
    """A distinct piece: how many steps run it, which emitter makes its code, and why."""

    piece: str
    uses: int
    emitter: str
    reason: str


@dataclass(frozen=True)
class StageFacts:
    """One pipeline stage.

    Attributes:
        layers, ranks: the first and the last of each.
        sends: what one of its ranks sends in the step, and to which rank.
        bytes: size of what is sent.
    """

    layers: tuple[int, int]
    ranks: tuple[int, int]
    sends: str
    bytes: int


@dataclass(frozen=True)
class Explanation:
    """Describes what a decode step of ``num_seqs`` sequences does.

    Attributes:
        passes: reports of the passes, as plain data.
        sites: every expected site, also those of passes that are off, and the norms, activations,
            quantizations and sums that are none.
        fusions: which neighbouring ops one kernel can do, and how many calls here are such.
        choices: the printed choice of a kernel -> the number of calls for which it was made.
        pieces: the distinct pieces.
        layers: each kind of layer, then what lies outside of them.
        launches, bytes, flops: totals of the step on one rank; ``launches`` is None if it is not
            known for one of the calls.
        notes: what these figures do not include.
        stages: the stages of a pipeline, empty without one.  All else is about one stage.
    """

    num_seqs: int
    context: int
    passes: list[dict[str, Any]]
    sites: list[SiteFacts]
    fusions: list[tuple[Fusion, int]]
    choices: Mapping[str, int]
    pieces: list[PieceFacts]
    layers: list[LayerFacts]
    launches: int | None
    bytes: int
    flops: int
    notes: list[str]
    stages: list[StageFacts]

    @property
    def missed(self) -> list[SiteFacts]:
        return [site for site in self.sites if site.outcome == "missed"]

    def to_json(self) -> dict[str, Any]:
        sums = [{"launches": layer.launches, "bytes": layer.bytes} for layer in self.layers]
        facts = asdict(self)
        facts["layers"] = [f | s for f, s in zip(facts["layers"], sums, strict=True)]
        facts["fusions"] = [{**asdict(p), "calls": calls} for p, calls in self.fusions]
        return facts


@dataclass(frozen=True)
class DecodeStep:
    """A step of ``num_seqs`` sequences, one token each, with ``context`` KV positions each, of a
    model that reduces over groups of ``world_size`` ranks."""

    num_seqs: int
    context: int
    world_size: int = 1


def explain(
    lowered: Lowered,
    before: Traced,
    where: Where,
    sites: list[SiteFacts],
    step: DecodeStep,
    *,
    notes: Iterable[str] = (),
    stages: Iterable[StageFacts] = (),
) -> Explanation:
    """Explain a decode step.

    Args:
        before: the graph before the passes.
        where: the model's layers.
        sites: see ``expected_sites``.
        notes, stages: become those of the explanation.

    Raises:
        UserError: the model reduces over ranks, and ``world_size`` is 1.
    """
    nodes = [node for region in lowered.regions for node in region.nodes]
    sums = [semantic_name(node) for node in nodes if _is_collective(node)]
    if sums and step.world_size < 2:
        raise UserError(
            f"explain: {sums[0]} reduces over ranks, and world_size={step.world_size}; give the "
            "number of ranks, 2 or more"
        )
    pairs = step.num_seqs * step.context
    figures = {"query_context_pairs": pairs, "context_tokens": pairs}
    figures["world_size"] = step.world_size
    costs = {node: _facts(node, lowered.traced, step.num_seqs, figures) for node in nodes}
    calls = [call for call in costs.values() if call]
    uses = Counter(s.piece for s in lowered.plan.steps if isinstance(s, PieceStep))
    pieces = []
    for piece, subgraph in lowered.pieces.items():
        choice = choose_emitter(subgraph)
        pieces.append(PieceFacts(piece, uses[piece], choice.emitter, choice.reason))
    return Explanation(
        num_seqs=step.num_seqs,
        context=step.context,
        passes=[report.to_json() for report in lowered.reports],
        sites=[*sites, *left_alone(nodes, lowered.reports, where)],
        fusions=_fusions(nodes),
        choices=dict(lowered.choices),
        pieces=pieces,
        layers=_layers(lowered.traced, before, where, costs),
        launches=total_launches(calls),
        bytes=sum(call.bytes for call in calls),
        flops=sum(call.flops for call in calls),
        notes=list(notes),
        stages=list(stages),
    )


def total_launches(calls: Iterable[OpFacts]) -> int | None:
    counts = [call.launches for call in calls]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _fusions(nodes: Iterable[fx.Node]) -> list[tuple[Fusion, int]]:
    """Every fusion that a model of these dtypes may have, and how many of its calls are one.

    Fusions with the same op are told apart by its arguments: norm weights, a group, a scale.
    """
    calls = [(name, node) for node in nodes if (name := semantic_name(node))]
    has_fp8 = any(_has_fp8(node) for _, node in calls)
    return [
        (f, sum(n == f.op and _is_fusion(f, node) for n, node in calls))
        for f in fusions()
        if has_fp8 or not any("FP8" in part for part in f.parts)
    ]


def _has_fp8(node: fx.Node) -> bool:
    """Whether a call reads or gives FP8 values."""
    values = [fake_value(each) for each in (node, *node.all_input_nodes)]
    flat = tree_leaves(values)
    return any(isinstance(v, Tensor) and v.dtype == torch.float8_e4m3fn for v in flat)


def _is_fusion(fusion: Fusion, node: fx.Node) -> bool:
    args: dict[str, Any] = {
        argument.name: value
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False)  # type: ignore[union-attr]
    }
    if "FP8 token" in fusion.parts or "FP8 group" in fusion.parts:
        return bool(args["group_size"]) == ("FP8 group" in fusion.parts)
    if fusion.op == "rope_kv_store":
        return (args.get("q_weight") is not None) == ("QK-norm" in fusion.parts)
    if fusion.op == "linear":
        has = (args.get(name) is not None for name in ("x_scale", "activation", "out_scale"))
        return linear_parts(*has) == fusion.parts
    if fusion.op in ("chain", "chain_over_ranks"):
        patterns = {parts: pattern for parts, op, pattern in chain_fusions() if op == fusion.op}
        return has_pattern(args["stages"], patterns[fusion.parts])
    if fusion.op == "expert_linear":
        return args.get("activation") is not None
    return fusion.op != "paged_attention" or args.get("out_scale") is not None


def semantic_name(node: fx.Node) -> str:
    """The name of the semantic op that a lowered node calls, "" if it calls none."""
    namespace, _, name = getattr(node.target, "_name", "").partition("::")
    return name if namespace.startswith(f"{ops.NAMESPACE}_") and name in ops.BY_NAME else ""


def _layers(
    after: Traced, before: Traced, where: Where, costs: Mapping[fx.Node, OpFacts | None]
) -> list[LayerFacts]:
    """Each kind of layer, by the most common of its layers, then what lies outside."""
    new, old = where.by_layer(after.gm.graph), where.by_layer(before.gm.graph)
    facts = []
    for title, layers in where.kinds:
        calls = {n: [c for node in new.get(n, ()) if (c := costs[node])] for n in layers}
        like = Counter(tuple(call.op for call in calls[n]) for n in layers).most_common(1)[0][0]
        one = next(n for n in layers if tuple(call.op for call in calls[n]) == like)
        facts.append(
            LayerFacts(
                title,
                tuple(where.first_layer + layer for layer in layers),
                calls[one],
                _ranges(new.get(one, []), after),
                draw(old.get(one, []), before.dims),
                draw(new.get(one, []), after.dims),
            )
        )
    outside = new.get(None, [])
    calls_outside = [call for node in outside if (call := costs[node])]
    drawn = draw(old.get(None, []), before.dims), draw(outside, after.dims)
    facts.append(LayerFacts("outside of layers", (), calls_outside, [], *drawn))
    return facts


def _is_collective(node: fx.Node) -> bool:
    name = semantic_name(node)
    return bool(name) and ops.BY_NAME[name].collective


def _facts(
    node: fx.Node, traced: Traced, num_seqs: int, figures: Mapping[str, int]
) -> OpFacts | None:
    """The facts of one call of a decode step; None if it launches nothing.  ``figures`` has the
    values of the symbols in costs."""
    name = semantic_name(node)
    if not name:
        return None if is_plain(node) else OpFacts(op_name(node), None, 0, 0)
    args = arguments(node, traced, num_seqs, num_seqs)
    op = ops.BY_NAME[name]
    cost = op.cost(op.describe(args))
    kernels = kernels_of(node, args)
    return OpFacts(
        op_name(node),
        None if kernels is None else len(kernels),
        _value(cost.bytes, figures),
        _value(cost.flops, figures),
    )


def _value(cost: Any, figures: Mapping[str, int]) -> int:
    expression = sympy.sympify(cost)
    return int(expression if expression.is_Integer else expression.subs(figures))


def arguments(node: fx.Node, traced: Traced, num_tokens: int, num_seqs: int) -> list[Any]:
    """A node's arguments in a step of these sizes; its tensors have no data."""
    fakes: Any = fx.node.map_arg(node.args, fake_value)
    sizes = step_sizes(num_tokens, num_seqs)
    return [on_meta(arg, traced.dims, sizes) for arg in fakes]


def kernels_of(node: fx.Node, args: list[Any]) -> tuple[str, ...] | None:
    """Names of the kernels that a lowered call launches: those that its implementation names, else
    the Triton launches that it describes, else one with the implementation's name.  None if they
    are not known: Inductor inlines the call, or it sums over ranks and does the rest op by op."""
    namespace, _, name = op_name(node).partition("::")
    made_by = namespace.removeprefix(f"{ops.NAMESPACE}_")
    implementation = ops.BY_NAME[name].implementation(made_by)
    if implementation.runs is not None:
        return implementation.runs(*args)
    launches = launches_of(node)
    if launches is not None:
        described = launches(*args)[0]
        names = tuple(launch.kernel.partition(":")[2] for launch in described)
        return names or (f"csrc {name}",)
    parts = _is_collective(node) or (implementation.inline and not is_library_call(node))
    return None if parts else (f"{made_by} {name}",)


def _ranges(nodes: list[fx.Node], traced: Traced) -> list[TokenRange]:
    """The ranges of numbers of tokens in which a layer runs the same kernels."""
    calls = [node for node in nodes if semantic_name(node)]

    def at(rows: int, decode: bool) -> tuple[str, ...]:
        names: list[str] = []
        for node in calls:
            args = arguments(node, traced, rows, rows if decode else 1)
            names += kernels_of(node, args) or (f"those of {op_name(node)}",)
        return tuple(names)

    ranges = []
    for decode in (True, False):
        rows = [n for n in _ROWS if (n <= _MOST_SEQS if decode else n > 1)]
        known = {n: at(n, decode) for n in rows}
        first = rows[0]
        for low, high in pairwise(rows):
            if known[low] == known[high]:
                continue
            while high - low > 1:
                middle = (low + high) // 2
                if at(middle, decode) == known[first]:
                    low = middle
                else:
                    high = middle
            ranges.append(TokenRange(decode, first, low, known[first]))
            first = high
            known[first] = at(first, decode)
        ranges.append(TokenRange(decode, first, None, known[first]))
    return list(_with_choices(ranges))


def _with_choices(ranges: Iterable[TokenRange]) -> Iterator[TokenRange]:
    """The ranges with what was chosen, for a reason or with parameters, at the first of each."""
    before: dict[tuple[str, str, str], str] = {}
    for each in ranges:
        choices = [name.choice for name in each.kernels if isinstance(name, KernelName)]
        here = {
            (choice.of, choice.name, choice.parameters): str(choice)
            for choice in choices
            if choice.refused or choice.parameters
        }
        new = tuple(text for key, text in here.items() if key not in before)
        yield replace(each, kernels=tuple(map(str, each.kernels)), choices=new)
        before = here
