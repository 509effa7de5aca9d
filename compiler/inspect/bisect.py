"""Finds the pass, then the site, at which a graph's outputs leave those of the model as it is.

Prefixes of the pipeline run on the same inputs, by halves; then the pass that made the difference
runs with some of its replacements alone; then kernels run in place of some references.  The result
is one place where the error crosses the tolerance: outputs are within it before, beyond it behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...passes import Context, Rule
from ...passes.module_paths import module_path
from ..capture.trace import Traced
from ..emit.piece_code import op_name
from .sites import copied

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class OutputDifference:
    """The place where an output differs most.

    ``error`` is the norm of the whole output's difference over the norm of ``want``; ``index`` is a
    position in the flattened output.
    """

    output: str
    error: float
    index: int
    want: float
    got: float


@dataclass(frozen=True)
class Culprit:
    """The first change that moved the outputs.

    ``stage`` is "trace", "pass", "kernels" or "code"; ``name`` is the pass or op and ``site`` its
    graph node, both empty where a stage has no such parts.
    """

    stage: str
    name: str
    site: str
    module: str
    difference: OutputDifference


@dataclass(frozen=True)
class RecordedRun:
    """The inputs that a graph is run on, and the outputs that are expected.

    Attributes:
        fixed: weights by name.
        caches: what the graph writes to, by name; every run begins with a copy.
        steps: the inputs of consecutive calls.
        want: the model's outputs by name, see ``outputs``.
        tolerance: the largest error allowed.
    """

    fixed: Inputs
    caches: Inputs
    steps: Sequence[Inputs]
    want: Mapping[str, Tensor]
    tolerance: float

    def outputs(self, call: Callable[[Inputs], Any]) -> dict[str, Tensor]:
        """The logits of each step, and the caches after the last."""
        caches = {name: cache.clone() for name, cache in self.caches.items()}
        results: dict[str, Tensor] = {}
        with torch.inference_mode():
            for number, step in enumerate(self.steps):
                output = call({**self.fixed, **caches, **step})
                logits = output[0] if isinstance(output, tuple) else output
                results[f"logits of step {number}"] = logits
        return results | caches

    def difference(self, call: Callable[[Inputs], Any]) -> OutputDifference | None:
        """The first output beyond tolerance; None if there is none."""
        outputs = self.outputs(call)
        for name, want in self.want.items():
            if (difference := compare(name, want, outputs[name])).error > self.tolerance:
                return difference
        return None

    def of(self, traced: Traced) -> OutputDifference | None:
        """``difference`` of a graph: semantic ops run their references, lowered ones their
        kernels."""
        traced.gm.recompile()

        def call(values: Inputs) -> Any:
            args = [
                values[source.name] if source.dim is None else values[source.name].shape[source.dim]
                for source in traced.inputs
            ]
            return tuple(traced.gm(*args))

        return self.difference(call)


def compare(name: str, want: Tensor, got: Tensor) -> OutputDifference:
    """The error of one output; infinite if a value is not finite on one side only."""
    left, right = want.double().flatten(), got.double().flatten()
    apart = torch.where(left == right, 0.0, (left - right).abs())
    apart = torch.where(left.isnan() & right.isnan(), 0.0, apart).nan_to_num(nan=torch.inf)
    index = int(apart.argmax()) if len(apart) else 0
    size = float(left.nan_to_num(posinf=0.0, neginf=0.0).norm()) or 1.0
    error = float(apart.norm()) / size
    if not len(apart):
        return OutputDifference(name, 0.0, 0, 0.0, 0.0)
    return OutputDifference(name, error, index, float(left[index]), float(right[index]))


def first_bad(
    count: int, bad: Callable[[int], OutputDifference | None]
) -> tuple[int, OutputDifference] | None:
    """The least n in 1..count with ``bad(n)``, by bisection; None if not even ``count`` is bad."""
    worst = bad(count)
    if worst is None:
        return None
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        if (difference := bad(middle)) is None:
            low = middle
        else:
            high, worst = middle, difference
    return high, worst


def bisect_passes(
    traced: Traced, rules: Sequence[Rule], run: RecordedRun, say: Callable[[str], None]
) -> Culprit | None:
    """The pass and the site after which outputs are beyond tolerance; None if there is none."""

    def after(count: int) -> Traced:
        graph = copied(traced)
        for rule in rules[:count]:
            rule(graph.gm, Context())
        return graph

    def bad(count: int) -> OutputDifference | None:
        say(f"passes {', '.join(rule.name for rule in rules[:count])}")
        return run.of(after(count))

    worst = first_bad(len(rules), bad)
    if worst is None:
        return None
    number, difference = worst
    rule = rules[number - 1]
    before = after(number - 1)
    everywhere = Context()
    places = {node.name: module_path(node) for node in before.gm.graph.nodes}
    rule(copied(before).gm, everywhere)

    def limited(limit: int) -> OutputDifference | None:
        say(f"{rule.name}, {limit} of {len(everywhere.replaced)} sites")
        graph = copied(before)
        rule(graph.gm, Context(limit=limit))
        return run.of(graph)

    if limited(0) is not None:  # what it does besides replacing
        return Culprit("pass", rule.name, "", "", difference)
    site = first_bad(len(everywhere.replaced), limited)
    assert site is not None, "a pass with all of its replacements is the pass"
    name = everywhere.replaced[site[0] - 1]
    return Culprit("pass", rule.name, name, places.get(name, ""), site[1])


def bisect_kernels(
    rewritten: Traced, lowered: Traced, run: RecordedRun, say: Callable[[str], None]
) -> Culprit | None:
    """The call whose kernel moves outputs beyond tolerance; all calls before it run theirs too.

    Args:
        rewritten: the graph after the passes.
        lowered: the same graph, node by node, with kernels in place of semantic ops.
    """
    pairs = list(zip(_calls(rewritten), _calls(lowered), strict=True))
    changed = [i for i, (ref, kernel) in enumerate(pairs) if ref.target is not kernel.target]

    def bad(count: int) -> OutputDifference | None:
        say(f"kernels of {count} of {len(changed)} calls")
        graph = copied(rewritten)
        nodes = list(_calls(graph))
        for i in changed[:count]:
            nodes[i].target = pairs[i][1].target
        return run.of(graph)

    worst = first_bad(len(changed), bad) if changed else None
    if worst is None:
        return None
    kernel = pairs[changed[worst[0] - 1]][1]
    return Culprit("kernels", op_name(kernel), kernel.name, module_path(kernel), worst[1])


def _calls(traced: Traced) -> Iterable[torch.fx.Node]:
    return (n for n in traced.gm.graph.nodes if n.op in ("call_function", "call_method"))
