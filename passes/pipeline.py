"""Lists the passes in their order and runs them.

``run_passes`` applies each rule to the graph in place and returns its report; with ``verify`` every
rewrite is checked before the next pass runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from torch import fx

from .canonicalize_norm import CanonicalizeNorm
from .canonicalize_rope import CanonicalizeRope
from .check_effects import Snapshot
from .cleanup import Cleanup
from .fuse_act import FuseAct
from .fuse_add_norm import FUSE_ADD_NORM
from .fuse_all_reduce_norm import FuseAllReduceNorm
from .fuse_chain import FUSE_CHAIN
from .fuse_gated_linear import FUSE_GATED_LINEAR
from .fuse_moe import FUSE_MOE
from .fuse_quant import ACTIVATION, ATTENTION, NORM
from .fuse_rope_store import FUSE_ROPE_STORE
from .module_paths import module_path
from .raising.canonicalize_linear import CANONICALIZE_LINEAR
from .raising.canonicalize_route import CANONICALIZE_ROUTE, SHARE_EXPERTS
from .raising.drop_batch import DropBatch
from .raising.fold_views import FoldViews
from .raising.rope_table import RopeTable
from .raising.scale_attention import SCALE_ATTENTION
from .report import PassReport
from .rule import Context, Rule
from .sites import op_name, without_nodes
from .verify import State, check_graph, check_nothing_else, check_rewrite

PIPELINE: tuple[Rule, ...] = (
    Cleanup(),
    FUSE_ADD_NORM,
    FuseAct(),
    FUSE_GATED_LINEAR,
    FUSE_MOE,
    NORM,
    FuseAllReduceNorm(),
    ACTIVATION,
    FUSE_CHAIN,
    ATTENTION,
    FUSE_ROPE_STORE,
)


CANONICALIZE: tuple[Rule, ...] = (CanonicalizeNorm(), CanonicalizeRope())
"""Passes that unmodified models need first; our models are written in semantic ops.  ``fuse_act``
raises gated activations in both."""


RAISE: tuple[Rule, ...] = (
    DropBatch(),
    FoldViews(),
    Cleanup("drop_copies"),
    CANONICALIZE_LINEAR,
    *CANONICALIZE,
    RopeTable(),
    CANONICALIZE_ROUTE,
    SHARE_EXPERTS,
    FoldViews(),
    SCALE_ATTENTION,
)
"""Passes that run first over the graph of a captured model, whatever passes are chosen: over one
layer of each kind, if these stand for all."""
JOIN: tuple[Rule, ...] = (FoldViews(),)
"""Passes that run over such a graph when its layers have been repeated and read each other."""


def build_passes(names: Iterable[str]) -> list[Rule]:
    """The passes with these names, in pipeline order.

    Raises:
        ValueError: an unknown name.
    """
    wanted = set(names)
    unknown = wanted - {rule.name for rule in PIPELINE}
    if unknown:
        known = ", ".join(rule.name for rule in PIPELINE)
        raise ValueError(f"unknown pass {sorted(unknown)}; known: {known}")
    return [rule for rule in PIPELINE if rule.name in wanted]


def _num_ops(gm: fx.GraphModule) -> int:
    return sum(node.op in ("call_function", "call_method") for node in gm.graph.nodes)


def _unchanged(gm: fx.GraphModule, states: Mapping[fx.Node, State]) -> bool:
    nodes = list(gm.graph.nodes)
    return nodes == list(states) and all(states[node].is_of(node) for node in nodes)


def run_passes(
    gm: fx.GraphModule,
    passes: Iterable[Rule],
    *,
    verify: bool = False,
    on_pass: Callable[[str, fx.GraphModule], None] = lambda name, gm: None,
) -> list[PassReport]:
    """Run ``passes`` over ``gm`` in place, and call ``on_pass`` with the graph after each.

    With ``verify``, every pass is followed by three checks: the graph is well formed, both sides of
    each distinct rewrite agree on data, and nothing else changed.

    Raises:
        VerificationError: a check failed; names pass, site and values.
    """
    reports: list[PassReport] = []
    states = check_graph(gm, after="(none yet)") if verify else {}
    snapshot: Snapshot | None = None
    proven: set[tuple[str, str]] = set()
    for rule in passes:
        context = Context(keep_rewrites=verify)
        if verify and snapshot is None:
            snapshot = Snapshot(gm)
        start, before = time.perf_counter(), _num_ops(gm)
        places = {node.name: module_path(node) for node in gm.graph.nodes}
        calls = {node.name: op_name(node) for node in gm.graph.nodes}
        report = rule(gm, context)
        calls |= {node.name: op_name(node) for node in gm.graph.nodes}
        report.sites = [
            replace(
                site,
                module=places.get(site.name, ""),
                reason=without_nodes(site.reason, calls),
            )
            for site in report.sites
        ]
        report.ops_before, report.ops_after = before, _num_ops(gm)
        report.seconds = time.perf_counter() - start
        if snapshot and not _unchanged(gm, states):
            states = check_graph(gm, after=rule.name, known=states)
            found = [check_rewrite(rewrite, proven=proven) for rewrite in context.rewrites]
            report.checks = [check for check in found if check]
            check_nothing_else(snapshot, gm, context.rewrites, after=rule.name)
            snapshot = None
        reports.append(report)
        on_pass(rule.name, gm)
    gm.recompile()
    return reports
