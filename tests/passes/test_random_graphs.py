"""Random graphs of semantic ops: no level changes what they compute.

Every pass of a level is run on a graph, and then its lowering; each is compared with the graph
before.  Steps also write to what others read, and graphs that reduce over ranks run as several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, fx

from fusewright import ops
from fusewright.compiler.lowering.lower import lower
from fusewright.config import LEVELS, PASSES
from fusewright.passes import build_passes, run_passes
from fusewright.passes.ranks import RankInterpreter, group_names, run_ranks
from fusewright.passes.rule import Context
from tests.passes.random_graphs import (
    NUMBERS,
    RANK_STEPS,
    STEPS,
    WRITTEN,
    Builder,
    inputs,
    step_lists,
)

KINDS = ("static", "dynamic")
DRIFT = 0.25
"""Largest relative error (L2) of a result once a tolerant rewrite has moved what it is made of: an
FP8 step is 2^-3 of a value, and later ops may double it."""


def built(steps: Any, head: bool) -> fx.GraphModule:
    builder = Builder()
    for step, i, j in steps:
        step(builder, i, j)
    return fx.GraphModule(torch.nn.Module(), builder.finish(head))


def copied(gm: fx.GraphModule) -> fx.Graph:
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return graph


def run(graph: fx.Graph, rank: int, groups: Mapping[str, str]) -> list[Tensor]:
    """The results, then the inputs that may have been written to."""
    values = {n: v.clone() if n in WRITTEN else v for n, v in inputs().items()}
    if rank:
        values["x0"] *= 1 + rank
        values["x1"] -= rank
    with torch.no_grad():
        results = RankInterpreter(graph, groups).run(*values.values())
        return [*results, *(values[name] for name in WRITTEN)]


def run_all(stages: list[Stage]) -> list[list[Tensor]]:
    """What each graph gives, all ranks one after the other."""
    names = group_names(stage.graph for stage in stages)
    ranks = run_ranks(names, lambda rank, groups: [run(s.graph, rank, groups) for s in stages])
    of_stages = zip(*ranks, strict=True)
    return [[value for results in of_stage for value in results] for of_stage in of_stages]


@dataclass(frozen=True)
class Stage:
    """A graph, and what made it of the one before; ``exact`` if no bit may have changed."""

    what: str
    graph: fx.Graph
    exact: bool


def check(want: list[Tensor], got: list[Tensor], stage: Stage) -> None:
    for index, (a, b) in enumerate(zip(want, got, strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{stage.what}: result {index}"
        left, right = a.float(), b.float()
        if not stage.exact and not a.dtype.is_floating_point:
            continue  # the likeliest of other numbers
        if stage.exact:
            assert torch.equal(left, right), f"{stage.what} is exact, but result {index} differs"
        else:
            error = float((left - right).norm() / left.norm().clamp(min=1e-3))
            assert error < DRIFT, f"{stage.what}: result {index} is off by {error}"


def called(graph: fx.Graph) -> set[str]:
    return {str(n.target) for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload)}


def prove(
    gm: fx.GraphModule, names: tuple[str, ...], *, verify: bool = False
) -> tuple[set[str], set[str]]:
    """Run the passes one by one and lower; returns which matched, and the ops that there were."""
    stages = [Stage("the graph", copied(gm), exact=True)]
    matched: set[str] = set()
    for rule in build_passes(names):
        report = run_passes(gm, [rule], verify=True)[0] if verify else rule(gm, Context())
        if report.matched:
            matched.add(rule.name)
            stages.append(Stage(rule.name, copied(gm), rule.tier.exact))
    ops_seen = {name for stage in stages for name in called(stage.graph)}
    lower(gm, hand_kernels="fuse_act" in names, kernels={}, sm=0)
    stages.append(Stage("lowering", gm.graph, exact=False))
    results = run_all(stages)
    for before, after, stage in zip(results, results[1:], stages[1:], strict=False):
        check(before, after, stage)
    return matched, ops_seen


def prove_many(
    names: tuple[str, ...], steps: Any, heads: Any, expected: set[str], examples: int
) -> set[str]:
    """``prove`` on each step by itself, which reaches what few random graphs do, then on so many of
    these, and on more until each pass matched and each expected op was there; returns the ops that
    were."""
    matched: set[str] = set()
    seen: set[str] = set()
    for step in dict.fromkeys(steps):
        for number in NUMBERS:
            found = prove(built([(step, number, number)], False), names)
            matched |= found[0]
            seen |= found[1]

    for count in (examples, *[examples // 4 or 1] * 28):

        @settings(max_examples=count, database=None)
        @given(step_lists(steps, 9), heads)
        def proven(drawn: Any, head: bool) -> None:
            for had, more in zip((matched, seen), prove(built(drawn, head), names), strict=True):
                had.update(more)

        proven()
        if matched == set(names) and expected <= seen:
            break
    assert matched == set(names), "no match of some"
    assert expected <= seen, "some ops are in no graph"
    return seen


def verify_many(names: tuple[str, ...], steps: Any, heads: Any, examples: int) -> None:
    """``prove`` with each rewrite verified."""

    @settings(max_examples=examples, database=None)
    @given(step_lists(steps, 9), heads)
    def proven(drawn: Any, head: bool) -> None:
        prove(built(drawn, head), names, verify=True)

    proven()


OF_RANKS = ("fuse_all_reduce_norm",)
ONE_RANK = tuple(name for name in PASSES if name not in OF_RANKS)
REDUCING = ("cleanup", "fuse_add_norm", "fuse_norm_quant", *OF_RANKS, "fuse_chain")
LISTS = {"-O1": LEVELS[1].passes, "-O2, -O3": ONE_RANK}
FUSED = {
    *("rms_norm", "add_rms_norm", "silu_mul", "gelu_tanh_mul", "rotary_embedding", "kv_store"),
    *("rope_kv_store", "paged_attention", "linear"),
    *("route", "expert_linear", "combine_experts", "fused_moe"),
    *("argmax", "embedding", "gather_last_token", "quant_fp8_static", "quant_fp8_dynamic"),
    "chain",
    *(f"{op}_quant_{kind}" for op in ("rms_norm", "add_rms_norm") for kind in KINDS),
    *(f"{op}_quant_{kind}" for op in ("silu_mul", "gelu_tanh_mul") for kind in KINDS),
}
"""The ops of graphs before and after every pass, but those that reduce over ranks."""


HEADS = st.sampled_from([False, False, False, True])


@pytest.mark.slow
@pytest.mark.parametrize(("level", "examples"), [("-O1", 12), ("-O2, -O3", 40)])
def test_no_level_changes_a_random_graph(level: str, examples: int, fw_cases: int) -> None:
    every = {f"fw.{name}.default" for name in FUSED}
    expected = every if level != "-O1" else set()
    seen = prove_many(LISTS[level], STEPS, HEADS, expected, examples * fw_cases)
    assert not expected or seen == every


@pytest.mark.slow
def test_no_rewrite_of_a_random_graph_is_refused(fw_cases: int) -> None:
    verify_many(ONE_RANK, STEPS, HEADS, 7 * fw_cases)


def test_every_level_is_among_them() -> None:
    """The pass of sums over ranks has graphs of its own, below."""
    assert [level.passes for level in LEVELS.values()] == [(), LISTS["-O1"], PASSES, PASSES]
    assert {*PASSES} == {*LISTS["-O2, -O3"], *REDUCING}


@pytest.mark.slow
def test_nor_one_that_reduces_over_ranks(fw_cases: int) -> None:
    reduces = {f"fw.{op.name}.default" for op in ops.ALL_OPS if op.collective}
    prove_many(REDUCING, RANK_STEPS, st.just(False), reduces, 8 * fw_cases)
    verify_many(REDUCING, RANK_STEPS, st.just(False), 4 * fw_cases)
