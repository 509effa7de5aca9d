"""``fuse_chain`` joins linear layers and what stands between them, from one attention to the next.

Before: ``y, r2 = add_rms_norm(linear(x, w), r, nw, eps); z = linear(silu_mul(linear(y, gu)), d);
y2, r3 = add_rms_norm(z, r2, nw2, eps2); q = linear(y2, w2)``, or a part of that, or with sums over
ranks, quantizations, post-norms and experts in it.  After: ``q, r3 = chain(x, r, [w, nw, gu, ...],
"linear(weight) > add_norm(weight, eps=1e-05) > ...")``.  For few rows, streaming kernels run where
the stages had several kernels each; for many, the op runs the stages in turn.

A chain grows from a linear layer, stage by stage, as long as ``chain_readers`` finds a stage.  Kept
is the longest beginning that ends with a stage for which the table has a kernel.  Chains of what is
left between two layers, such as a post-norm, the add and the next norm, are one launch for any
number of rows; others may read their results.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ..ops.chain.chain import KERNELS
from ..ops.chain.kernels import covered
from ..ops.chain.rows import ROWS, row_span
from ..ops.chain.stages import Chain
from ..ops.norm.gated_act import GATED_ACTS
from ..ops.norm.norm import norm_axes
from .chain_readers import (
    MOE,
    QUANTIZE,
    READERS,
    ROW_READERS,
    Read,
    Reader,
    Reading,
    items,
    read_linear,
    why_not_stored,
)
from .fuse_gated_linear import LINEAR, linear_args
from .report import PassReport
from .rule import EXACT, Context, Rule, is_call, written_between
from .sites import Build, Miss, call, op_name

_CHAIN = torch.ops.fw.chain.default
_CHAIN_OVER_RANKS = torch.ops.fw.chain_over_ranks.default
_ALL_REDUCE = torch.ops.fw.all_reduce.default
_QUANTIZING_ACTS = {op.overload() for (_, quant), op in GATED_ACTS.items() if quant == "dynamic"}


@dataclass
class _Grown:
    """A chain after each of its stages, and why it does not go on: at the node ``cut``, if that is
    of the kind of a stage.  ``is_cut``: what follows is such a stage, or should be."""

    after: list[Reading] = field(default_factory=list)
    reason: str = ""
    cut: fx.Node | None = None
    is_cut: bool = False

    def kept(self) -> tuple[Reading | None, dict[fx.Node, str], str]:
        """The longest beginning that the table's kernels cover, or None; of its joints those that
        none of them computes, with the reason; and why it is not all."""
        why = ""
        for chain in reversed(self.after):
            spans, reason = covered(chain.stages, KERNELS)
            why = why or reason
            if not spans or (spans[0][0], spans[-1][1]) != (0, len(chain.stages)):
                continue
            if early := _why_no_end(chain):
                why = early
                continue
            in_turn = {
                node: f"runs by its own op: {reason or 'no kernel has the pattern'}"
                for node, at in chain.joints
                if not any(first <= at < end for first, end in spans)
            }
            return chain, in_turn, self._why(why)
        return None, {}, self._why(why)

    def _why(self, of_kept: str) -> str:
        return self.reason if self.is_cut else of_kept or self.reason


class FuseChain:
    """Expected sites: every norm of a sum whose result goes to a linear layer or to experts, with
    these; every norm or sum over ranks of what a layer makes; and every activation that quantizes
    by scales of its own result.

    Exact: the op rounds as the ops that it replaces do.  A kernel may round less often, since it
    applies a norm's scale to the sums of what it reads, and does not quantize few tokens.
    """

    name = "fuse_chain"
    tier = EXACT

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        report = PassReport(self.name)
        before = list(gm.graph.nodes)
        taken: set[fx.Node] = set()
        joined: dict[fx.Node, str] = {}
        missed: dict[fx.Node, tuple[str, str]] = {}
        for node in before:
            if node in taken or not is_call(node, LINEAR):
                continue
            grown = _grow(node)
            chain, in_turn, reason = grown.kept()
            if chain is not None:
                taken |= {*chain.nodes}
                joined |= {joint: in_turn.get(joint, "") for joint, _ in chain.joints}
                _replace(self, context, chain)
            last = grown.after[-1] if grown.after else None
            text = str(Chain(last.stages)) if last else ""
            if grown.cut:
                missed.setdefault(grown.cut, (grown.reason, text))
            for joint, _ in last.joints if last else ():
                missed.setdefault(joint, (reason, text))
        for node in before:
            if node not in taken and (rows := _grow_rows(node)) is not None:
                taken |= {*rows.nodes}
                joined |= dict.fromkeys((joint for joint, _ in rows.joints), "")
                _replace(self, context, rows)
        for node in before:
            if node in joined:
                report.match(node.name, joined[node])
            elif node not in taken and is_expected(node):
                report.miss(node.name, *(missed.get(node) or (_why_unread(node),)))
        return report


def _replace(rule: Rule, context: Context, chain: Reading) -> None:
    totals = [node for node in chain.totals if node is not chain.value]
    build = _build(chain, len(totals))
    context.replace(rule, chain.value, sorted({*chain.nodes}), [chain.value, *totals], build)


def _build(chain: Reading, count: int) -> Build:
    """Make the call of the op; ``count`` nodes were the sum of the residual stream."""
    text = str(Chain(chain.stages))
    args = (chain.x, chain.residual, list(chain.operands), text)
    target = _CHAIN if chain.group is None else _CHAIN_OVER_RANKS
    group = () if chain.group is None else (chain.group,)

    def build(graph: fx.Graph) -> list[fx.Node]:
        y, total = call(target, (*args, *group), 2)(graph)
        return [y, *[total] * count]

    return build


def _grow_rows(start: fx.Node) -> Reading | None:
    """The longest chain that begins with a node and that the kernel of rows computes."""
    kept, following = None, [start]
    chain = Reading(x, x) if isinstance(x := next(iter(start.args), None), fx.Node) else None
    while chain and following:
        try:
            read = _read(chain, following, ROW_READERS)
        except Miss:
            break
        if read is None:
            break
        chain = chain.grown(read)
        if row_span(chain.stages) != len(chain.stages):
            break
        first, last = chain.nodes[0], chain.nodes[-1]
        if first is not last and written_between(first, last):
            break
        if len(chain.stages) > 1 and not ROWS.why_never(chain.stages) and not _why_no_end(chain):
            kept = chain
        following = sorted(user for user in chain.value.users if user.op != "output")
    return kept


def _grow(start: fx.Node) -> _Grown:
    """Read a chain from its first linear layer on, until what follows is no stage of one."""
    grown = _Grown()
    layer = linear_args(start)
    assert layer is not None
    x, following = layer["x"], start
    if is_call(x, operator.getitem) and is_call(x.args[0], QUANTIZE):
        following, x = x.args[0], x.args[0].args[0]
    elif layer["x_scale"] is not None:
        return grown
    chain, readers = Reading(x, x), [following]
    while readers:
        try:
            if chain.stages:
                read = _read(chain, readers, READERS)
            else:
                read = read_linear(chain, following)
        except Miss as miss:
            expected = [node for node in readers if is_expected(node)]
            return replace(grown, reason=str(miss), cut=next(iter(expected), None), is_cut=True)
        if read is None:
            return replace(grown, reason=f"its result goes to {op_name(readers[0])}")
        chain = chain.grown(read)
        first, last = chain.nodes[0], read.nodes[-1]
        if first is not last and (reason := written_between(first, last)):
            cut = next(iter(read.joints), None)
            return replace(grown, reason=reason, cut=cut, is_cut=True)
        grown.after.append(chain)
        readers = sorted(user for user in chain.value.users if user.op != "output")
    return replace(grown, reason="its result leaves the graph")


def _read(chain: Reading, nodes: list[fx.Node], readers: Sequence[Reader]) -> Read | None:
    """The stage that one of the readers of a chain's value begins.

    Raises:
        Miss: one begins a stage that cannot be joined, and none begins another.
    """
    why: Miss | None = None
    for node in nodes:
        for reader in readers:
            try:
                read = reader(chain, node)
            except Miss as miss:
                why = why or miss
                continue
            if read is not None:
                return read
    if why is not None:
        raise why
    return None


def _why_no_end(chain: Reading) -> str:
    """Why a chain cannot end here, or nothing."""
    if chain.scale is not None:
        return "what is quantized goes to no linear layer"
    if not Chain(chain.stages).adds:
        return "it would end before anything is added to the residual"
    early = [u for t in chain.totals for u in t.users if u < chain.value and u not in chain.nodes]
    return f"the sum is used before the next layer, by {op_name(early[0])}" if early else ""


def is_expected(node: fx.Node) -> bool:
    """Whether a chain should take a node: see ``FuseChain``."""
    if node.target in _QUANTIZING_ACTS:
        return True
    if is_call(node, MOE):
        source = node.args[0]
        if not is_call(source, operator.getitem) or source.args[1] != 0:
            return False
        return is_add_norm(source.args[0])
    axes = norm_axes(node.target)
    if is_call(node, _ALL_REDUCE) or (axes is not None and axes.is_alone):
        return is_call(node.args[0], LINEAR, MOE, _ALL_REDUCE)
    return is_add_norm(node) and any(is_call(r, LINEAR, MOE) for r in _readers(node))


def is_add_norm(node: Any) -> bool:
    axes = norm_axes(getattr(node, "target", None))
    return axes is not None and axes.add


def _readers(norm: fx.Node) -> list[fx.Node]:
    """The nodes that read the result of a norm, or its values in FP8 that another node makes."""
    direct = [user for item in items(norm, 0) for user in item.users]
    quantized = [item for user in direct if is_call(user, QUANTIZE) for item in user.users]
    return [*direct, *(user for item in quantized for user in item.users)]


def _why_unread(node: fx.Node) -> str:
    """Why no chain came to a node: what it reads is no linear layer's."""
    sources = node.args[:2] if is_add_norm(node) else node.args[:1]
    layer = next((x for x in sources if is_call(x, LINEAR)), None)
    if layer is None:
        return f"what it reads comes from {op_name(sources[0])}, not from a linear layer"
    given = linear_args(layer) or {}
    if reason := why_not_stored(given):
        return reason
    x = given["x"]
    if is_call(x, operator.getitem):
        return f"the layer before it reads what {op_name(x.args[0])} quantizes"
    return "the layer before it is FP8 and its x has a static scale, for which there is no kernel"


FUSE_CHAIN = FuseChain()
