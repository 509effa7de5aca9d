"""Lists every expected site of the passes: where it is, and whether it matched, was missed or is
off."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import fx

from ...ops.collective.all_reduce import OP as ALL_REDUCE
from ...ops.norm.gated_act import GATED_ACTS
from ...ops.norm.norm import NORMS
from ...ops.norm.quantize import QUANTIZE
from ...passes import PassReport, Site, build_passes, op_name, run_passes
from ...passes.module_paths import module_path
from ..capture.source import Repeat
from ..capture.trace import Traced


@dataclass(frozen=True)
class SiteFacts:
    """Sites of a pass that are alike, in layers of one kind.

    Attributes:
        name: the pass's name.
        layers: title of their kind of layer.
        module: where in a layer, or in the model.
        outcome: "matched", "missed", "off", or "alone": no pass has a site there.
        reason: why they did not match, or matched in part.
        count: how many.
        example: the first one's graph node.
    """

    name: str
    layers: str
    module: str
    outcome: str
    reason: str
    count: int
    example: str


class Where:
    """The layers of a model, by kind.

    Args:
        repeat: which traced layer each layer is a copy of; None for a model without layers.
        first_layer: the number under which people know layer 0, where the model is a stage.
    """

    def __init__(self, repeat: Repeat | None, first_layer: int = 0) -> None:
        self._repeat, self.first_layer = repeat, first_layer
        kinds: dict[int, list[int]] = {}
        for layer, kind in enumerate(repeat.layers if repeat else ()):
            kinds.setdefault(kind, []).append(layer)
        self.kinds = [
            (title_of([first_layer + layer for layer in layers]), tuple(layers))
            for layers in kinds.values()
        ]
        self._titles = {layer: title for title, layers in self.kinds for layer in layers}

    def place(self, module: str) -> tuple[str, str]:
        """(title of the kind of layer, path within the layer) of a module."""
        layer, inside = self._repeat.layer_of(module) if self._repeat else (None, module)
        return (self._titles[layer] if layer is not None else "outside of layers", inside)

    def by_layer(self, graph: fx.Graph) -> Mapping[int | None, list[fx.Node]]:
        """The calls of each layer, in order; None for what is in no layer."""
        nodes: dict[int | None, list[fx.Node]] = {}
        for node in graph.nodes:
            if node.op in ("call_function", "call_method"):
                layer = self._repeat.layer_of(module_path(node))[0] if self._repeat else None
                nodes.setdefault(layer, []).append(node)
        return nodes


def title_of(layers: Sequence[int]) -> str:
    """``layers 0 to 31``, ``layers 0, 2 to 24 by 2`` or ``layers 1, 4, 5``."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    steps = {b - a for a, b in pairwise(layers)}
    if len(steps) > 1:
        return f"layers {', '.join(map(str, layers))}"
    by = f" by {step}" if (step := steps.pop()) > 1 else ""
    return f"layers {layers[0]} to {layers[-1]}{by}"


def expected_sites(
    reports: Iterable[PassReport],
    before: Traced,
    on: Sequence[str],
    off: Mapping[str, str],
    where: Where,
) -> list[SiteFacts]:
    """Sites of the passes that ran, and of those that are off, which are run on a copy.

    Args:
        reports: those of the passes that ran.
        before: the graph as they found it.
        on: their names.
        off: names of other passes -> why they did not run.
        where: the model's layers.
    """
    sites = [site for report in reports for site in _grouped(report, where)]
    for name, reason in off.items():
        rules = build_passes([*on, name])
        report = next(r for r in run_passes(copied(before).gm, rules) if r.name == name)
        sites += _grouped(report, where, reason)
    return sites


_JOINTS = {
    op.name for op in (*NORMS.values(), *GATED_ACTS.values(), *QUANTIZE.values(), ALL_REDUCE)
}


def left_alone(
    nodes: Iterable[fx.Node], reports: Iterable[PassReport], where: Where
) -> list[SiteFacts]:
    """The norms, activations, quantizations and sums over ranks of a lowered graph which no pass
    reports, with what is on both sides of them.  With the sites of the passes these are all."""
    missed = {site.name for report in reports for site in report.missed}
    alone = PassReport("no pass")
    for node in nodes:
        is_call = node.op == "call_function" and node.target is not operator.getitem
        if is_call and op_name(node) in _JOINTS and node.name not in missed:
            sides = f"between {op_name(node.args[0])} and {_reader(node)}"
            alone.sites.append(Site(node.name, False, sides, module_path(node)))
    return [replace(site, outcome="alone") for site in _grouped(alone, where)]


def _reader(node: fx.Node) -> str:
    """The name of the op that reads the result of a call, or its first item."""
    for user in node.users:
        if user.target is not operator.getitem:
            return op_name(user)
        if user.args[1] == 0:
            return _reader(user)
    return "nothing"


def copied(traced: Traced) -> Traced:
    """A copy of the graph, which can be rewritten by itself."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(traced.gm.graph, {}))
    return Traced(fx.GraphModule(traced.gm, graph), traced.inputs, traced.dims)


def _grouped(report: PassReport, where: Where, off: str = "") -> list[SiteFacts]:
    groups: Counter[tuple[str, str, str, str]] = Counter()
    first: dict[tuple[str, str, str, str], str] = {}
    for site in report.sites:
        outcome = "off" if off else "matched" if site.matched else "missed"
        reason = site.reason
        if off:
            reason = off if site.matched else f"{off}; on, it would miss: {site.reason}"
        key = (*where.place(site.module), outcome, reason)
        groups[key] += 1
        first.setdefault(key, site.name)
    return [SiteFacts(report.name, *key, n, first[key]) for key, n in groups.items()]
