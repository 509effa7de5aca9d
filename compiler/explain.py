"""What a lowered model will do, and why, without compiling it: sites, pieces, launches, bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import sympy
from torch import fx

from .. import ops
from ..passes import fake_value
from .build import Lowered
from .emit import choose_emitter
from .emit_direct import is_plain
from .kernels import launches_of, on_meta, step_sizes
from .partition import Region
from .piece_code import op_name
from .plan import PieceStep


@dataclass(frozen=True)
class OpFacts:
    """One call; ``launches`` is None where Inductor decides, ``bytes`` and ``flops`` by the op's
    own cost: none for an ATen op, which has no cost of its own."""

    op: str
    launches: int | None
    bytes: int
    flops: int


@dataclass(frozen=True)
class PieceFacts:
    """A distinct piece: how many steps run it, and who makes its code for what reason."""

    piece: str
    uses: int
    emitter: str
    reason: str


@dataclass(frozen=True)
class Explanation:
    """What a decode step of ``num_seqs`` sequences does.

    Attributes:
        passes: reports of the passes, as plain data.
        choices: kernel choice, printed -> how many calls got it.
        pieces: the distinct pieces.
        layer: the calls of one layer: those of the piece that most steps run, and attention.
        launches, bytes, flops: of the whole step; launches are None where Inductor decides.
        greedy: what steps without logits call in place of the last op, if the plan can.
    """

    num_seqs: int
    context: int
    passes: list[dict[str, Any]]
    choices: Mapping[str, int]
    pieces: list[PieceFacts]
    layer: list[OpFacts]
    launches: int | None
    bytes: int
    flops: int
    greedy: str | None

    @property
    def layer_launches(self) -> int | None:
        return total_launches(self.layer)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def explain(lowered: Lowered, *, num_seqs: int, context: int) -> Explanation:
    """Explain a decode step.

    Args:
        num_seqs: sequences, one token each.
        context: KV positions of each sequence.
    """
    facts = [_region(lowered, region, num_seqs, context) for region in lowered.regions]
    greedy = facts.pop()[0].op if lowered.plan.greedy else None
    step = [call for calls in facts for call in calls]
    uses = Counter(s.piece for s in lowered.plan.steps if isinstance(s, PieceStep))
    pieces = []
    for piece, subgraph in lowered.pieces.items():
        choice = choose_emitter(subgraph)
        pieces.append(PieceFacts(piece, uses[piece], choice.emitter, choice.reason))
    return Explanation(
        num_seqs=num_seqs,
        context=context,
        passes=[report.to_json() for report in lowered.reports],
        choices=dict(lowered.choices),
        pieces=pieces,
        layer=_layer(lowered, facts, uses),
        launches=total_launches(step),
        bytes=sum(call.bytes for call in step),
        flops=sum(call.flops for call in step),
        greedy=greedy,
    )


def total_launches(calls: Iterable[OpFacts]) -> int | None:
    """The sum, or None when one of them is for Inductor to decide."""
    counts = [call.launches for call in calls]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _layer(lowered: Lowered, facts: list[list[OpFacts]], uses: Mapping[str, int]) -> list[OpFacts]:
    """From attention to attention: the first step of the most used piece, and what precedes it."""
    steps = lowered.plan.steps
    most = max(uses.values(), default=0)
    for index, step in enumerate(steps):
        if index and isinstance(step, PieceStep) and uses[step.piece] == most:
            return [*facts[index - 1], *facts[index]]
    return [call for calls in facts for call in calls]


def _region(lowered: Lowered, region: Region, num_seqs: int, context: int) -> list[OpFacts]:
    sizes = step_sizes(num_seqs, num_seqs)
    calls = []
    for node in region.nodes:
        namespace, _, name = getattr(node.target, "_name", "").partition("::")
        if not namespace.startswith(f"{ops.NAMESPACE}_") or name not in ops.BY_NAME:
            if not is_plain(node):
                calls.append(OpFacts(op_name(node), None, 0, 0))
            continue
        fakes: Any = fx.node.map_arg(node.args, fake_value)
        args = [on_meta(arg, lowered.traced.dims, sizes) for arg in fakes]
        op = ops.BY_NAME[name]
        cost = op.cost(op.describe(args))
        pairs = num_seqs * context
        values = {"context_tokens": pairs, "query_context_pairs": pairs}
        calls.append(
            OpFacts(
                op_name(node),
                _num_launches(node, args),
                int(sympy.sympify(cost.bytes).subs(values)),
                int(sympy.sympify(cost.flops).subs(values)),
            )
        )
    return calls


def _num_launches(node: fx.Node, args: list[Any]) -> int | None:
    """Of a Triton op those it describes; of an opaque op or a library call, one; of what Inductor
    inlines, nobody knows before it has."""
    launches = launches_of(node)
    if launches is not None:
        return max(1, len(launches(*args)[0]))  # none of Triton's: one of csrc's
    namespace, _, name = op_name(node).partition("::")
    implementation = ops.BY_NAME[name].implementation(namespace.removeprefix(f"{ops.NAMESPACE}_"))
    return None if implementation.inline and name != "linear" else 1
