"""Mutation testing of the compiler: every wrong rewrite below is caught by verification.

Each mutation spoils the real output of a pass on a captured graph: ``inside`` it changes the call
that the pass puts in place (both what it declares and what it does), else the graph after it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx

from fusewright.config import PASSES
from fusewright.passes import PassReport, VerificationError, build_passes, digest, run_passes
from fusewright.passes.rule import Context, Rule
from tests.passes import experts
from tests.passes.changes import (
    FW,
    Change,
    GraphChange,
    apply,
    at,
    become,
    drop,
    dropped_next_bias,
    exchange_stores,
    like_the_first,
    other_item,
    out_in_place_of,
    part_as_sum,
    put,
    residual_of_every_rank,
    reword,
    same,
    several,
    skip,
    stale_residual,
    swap,
    swap_between,
    swapped_results,
    to_the_end,
    without_bias,
    without_group,
    wrong_constant,
)
from tests.passes.models import (
    GROUP,
    OTHER_GROUP,
    SIZE,
    act_group,
    act_static,
    attention,
    between_linears,
    fp8_layers,
    gated,
    gated_fp8,
    graph_of,
    norm_group,
    norm_static,
    outcome,
    reduced_add_norm,
    reduced_between_linears,
    reduced_norm,
    reduced_static,
    rope_store,
    silu_gate,
    stores,
    two_norms,
)


@dataclass(frozen=True)
class Mutation:
    name: str
    rule: str
    model: Callable[..., Any]
    inside: Change | None = None
    after: GraphChange | None = None


def _in(rule: str, model: Any, **changes: Change) -> list[Mutation]:
    return [Mutation(f"{rule}: {n}", rule, model, inside=c) for n, c in changes.items()]


def _on(rule: str, model: Any, **changes: GraphChange) -> list[Mutation]:
    return [Mutation(f"{rule}: {n}", rule, model, after=c) for n, c in changes.items()]


CHAIN = {
    "dropped_residual": apply(1, operator.mul, 0),
    "x_as_residual": same(1, 0),
    "transposed_weight": apply((2, 0), "t"),
    "transposed_next_weight": apply((2, 2), "t"),
    "gemma_weight": apply((2, 1), operator.add, 1),
}
"""Changes of two linear layers joined by a norm, with or without a sum over ranks inside."""

MUTATIONS = [
    *_in(
        "fuse_add_norm",
        two_norms,
        dropped_residual=same(1, 0),
        doubled_residual=same(0, 1),
        dropped_eps=put(3, 0.0),
        eps_of_another_model=put(3, 1e-4),
        negated_x=apply(0, operator.neg),
        gemma_weight=apply(2, operator.add, 1),
    ),
    *_on(
        "fuse_add_norm",
        two_norms,
        eps_of_the_other_norm=like_the_first("add_rms_norm", 3),
        weights_of_each_other=swap_between("add_rms_norm", 2),
        stale_residual=stale_residual,
        normed_as_residual=other_item,
    ),
    *_in(
        "fuse_act",
        silu_gate,
        swapped_gate_and_up=apply(0, "roll", SIZE // 2, -1),
        off_by_one_split=apply(0, "roll", 1, -1),
        another_activation=become("gelu_tanh_mul"),
        negated_gate=apply(0, operator.neg),
    ),
    *_in(
        "fuse_gated_linear",
        gated,
        another_activation=put(6, "gelu_tanh"),
        swapped_gate_and_up=apply(1, "roll", SIZE // 2, 0),
        off_by_one_split=apply(1, "roll", 1, 0),
        transposed_weight=apply(1, "t"),
    ),
    *_in(
        "fuse_gated_linear",
        gated_fp8,
        another_activation=put(6, "gelu_tanh"),
        off_by_one_split=apply(1, "roll", 1, 0),
        inverted_scale=apply(7, "reciprocal"),
        swapped_scales=swap(4, 7),
        x_scale_as_out_scale=same(7, 3),
        another_rounding=put(5, torch.float32),
    ),
    *_in(
        "fuse_moe",
        experts.shared,
        other_activation=put(18, "silu"),
        renormalized=put(14, True),
        other_scoring=put(13, "softmax"),
        all_groups=put(16, 2),
        unscaled=put(17, 1.0),
        fewer_experts=put(12, 1),
        no_gate=put(11, None),
        negated_x=apply(0, operator.neg),
    ),
    *_in(
        "fuse_chain",
        experts.between_linears,
        residual_of_x=same(1, 0),
        first_norm_behind=same((2, 5), (2, 1)),
        eps_of_the_other=reword("eps=1e-06", "eps=1e-05"),
        no_eps=reword("eps=1e-05", "eps=0.0"),
        no_next_bias=without_bias(7),
        other_activation=reword("silu", "gelu_tanh"),
        fewer_experts=reword("top_k=2", "top_k=1"),
    ),
    *_in(
        "fuse_chain",
        between_linears,
        **CHAIN,
        dropped_eps=reword("eps=1e-05", "eps=0.0"),
        eps_of_another_model=reword("eps=1e-05", "eps=0.0001"),
        swapped_gate_and_up=apply((2, 2), "roll", SIZE // 2, 0),
    ),
    *_on(
        "fuse_chain",
        between_linears,
        another_activation=at("chain", reword("silu", "gelu_tanh")),
        stale_residual=like_the_first("chain", 1),
        norms_of_each_other=swap_between("chain", (2, 1)),
        dropped_bias=dropped_next_bias,
    ),
    *_in(
        "fuse_chain",
        fp8_layers,
        fp8_x_as_residual=same(1, 0),
        fp8_first_norm_behind=same((2, 7), (2, 2)),
        large_eps_behind=reword("eps=1e-06", "eps=10000.0"),
        fp8_other_activation=reword("silu", "gelu_tanh"),
        fp8_swapped_gate_and_up=apply((2, 3), "roll", SIZE // 2, 0),
        next_as_first=same((2, 0), (2, 8)),
        fp8_no_next_bias=without_bias(20),
        swapped_scales=swap((2, 1), (2, 10)),
        scale_of_another_layer=same((2, 6), (2, 1)),
        weight_of_another_layer=same((2, 16), (2, 5)),
    ),
    *_in(
        "fuse_norm_quant",
        norm_static,
        inverted_scale=apply(4, "reciprocal"),
        doubled_scale=apply(4, operator.mul, 2),
        dropped_residual=same(1, 0),
        eps_of_another_model=put(3, 1e-4),
    ),
    *_on(
        "fuse_norm_quant",
        norm_static,
        swapped_scales=swap_between("add_rms_norm_quant_static", 4),
        scale_of_the_other=like_the_first("add_rms_norm_quant_static", 4),
        weights_of_each_other=swap_between("add_rms_norm_quant_static", 2),
        eps_of_the_other_norm=like_the_first("add_rms_norm_quant_static", 3),
    ),
    *_in(
        "fuse_norm_quant",
        norm_group,
        swapped_residual=several(apply(0, operator.neg), apply(1, operator.neg)),
        dropped_x=same(0, 1),
        scale_in_place_of_weight=apply(2, operator.mul, 2),
    ),
    *_in(
        "fuse_all_reduce_norm",
        reduced_add_norm,
        dropped_reduce=without_group("add_rms_norm"),
        double_reduce=apply(0, FW.all_reduce.default, GROUP),
        residual_of_every_rank=residual_of_every_rank,
        reduced_residual=swap(0, 1),
        dropped_residual=same(1, 0),
        eps_of_another_model=put(3, 1e-4),
        another_group=put(5, OTHER_GROUP),
    ),
    *_in(
        "fuse_chain",
        reduced_between_linears,
        **{f"{name}_over_ranks": change for name, change in CHAIN.items()},
        dropped_bias_over_ranks=without_bias(3),
        an_activation=reword("weight, bias", "weight, bias, activation='gelu_tanh'"),
        another_group=put(4, OTHER_GROUP),
        mean_over_ranks=apply(0, operator.truediv, 2),
    ),
    *_on("fuse_all_reduce_norm", reduced_norm, part_as_sum=part_as_sum),
    *_in(
        "fuse_all_reduce_norm",
        reduced_norm,
        double_reduce=apply(0, FW.all_reduce.default, GROUP),
        mean_over_ranks=apply(0, operator.truediv, 2),
    ),
    *_in(
        "fuse_all_reduce_norm",
        reduced_static,
        inverted_scale=apply(4, "reciprocal"),
        dropped_reduce=without_group("add_rms_norm_quant_static"),
        residual_of_every_rank=residual_of_every_rank,
    ),
    *_in("fuse_act_quant", act_static, inverted_scale=apply(1, "reciprocal"),
         another_activation=become("gelu_tanh_mul_quant_static"),
         swapped_gate_and_up=apply(0, "roll", SIZE // 2, -1)),
    *_in("fuse_act_quant", act_group, scale_a_token_not_a_group=put(1, 0),
         off_by_one_split=apply(0, "roll", 1, -1)),
    *_in(
        "fuse_attn_quant",
        attention,
        inverted_out_scale=apply(10, "reciprocal"),
        dropped_kv_scale=put(9, None),
        another_softmax_scale=put(6, 1.0),
        window_off_by_one=put(7, 5),
        dropped_soft_cap=put(8, 0.0),
        dropped_sinks=put(11, None),
        dropped_chunks=put(12, 0),
        lengths_off_by_one=apply(3, operator.sub, 1),
        written_to_a_copy=apply(5, "clone"),
    ),
    *_on(
        "fuse_attn_quant",
        attention,
        dropped_attention=drop("paged_attention"),
        dropped_out_scale=at("paged_attention", put(10, None)),
        missing_cast=at("paged_attention", out_in_place_of(torch.bfloat16)),
    ),
    *_in(
        "fuse_rope_store",
        rope_store,
        swapped_keys_and_values=swap(2, 3),
        slots_as_positions=same(0, 6),
        swapped_weights=swap(7, 8),
        eps_of_another_model=put(9, 1e-5),
        dropped_norms=several(put(7, None), put(8, None)),
        dropped_kv_scale=put(10, None),
        scales_of_keys_and_values_swapped=apply(10, "flip", 0),
        stored_into_a_copy=apply(5, "clone"),
        slots_off_by_one=apply(6, operator.add, 1),
        padding_stored=apply(6, "clamp", 0),
        positions_off_by_one=apply(0, operator.add, 1),
    ),
    *_on("fuse_rope_store", rope_store, late_store=to_the_end("rope_kv_store")),
    *_on(
        "cleanup",
        stores,
        reordered_stores=exchange_stores,
        dropped_store=drop("kv_store"),
        late_store=to_the_end("kv_store"),
        dropped_copy=skip("to"),
        dropped_cast=skip("float"),
        dropped_layout=skip("contiguous"),
        another_constant=wrong_constant,
        swapped_results=swapped_results,
        stored_into_other=swap_between("kv_store", 0),
        swapped_slots=like_the_first("kv_store", 1),
    ),
]  # fmt: skip


class Spoiled:
    """A rule whose rewrites, or whose graph, are changed."""

    def __init__(self, rule: Rule, mutation: Mutation) -> None:
        self.name, self.tier, self.rule, self.mutation = rule.name, rule.tier, rule, mutation

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        report = self.rule(gm, _Spoiling(self.mutation, context))
        if self.mutation.after:
            self.mutation.after(gm.graph)
        return report


class _Spoiling(Context):
    def __init__(self, mutation: Mutation, into: Context) -> None:
        super().__init__(into.keep_rewrites, into.rewrites)
        self.inside = mutation.inside

    def replace(
        self, rule: Any, site: Any, old: Any, outputs: Any, build: Any, tier: Any = None
    ) -> None:
        def wrong(graph: fx.Graph) -> Any:
            first = site.prev
            made = build(graph)
            node = first.next
            while node is not site:
                following = node.next
                if self.inside and getattr(node.target, "namespace", "") == "fw":
                    self.inside(node)
                node = following
            return made

        super().replace(rule, site, old, outputs, wrong, tier)


def _found(name: str, model: Callable[..., Any]) -> tuple[Rule, fx.GraphModule]:
    """The pass, and the graph that it finds behind those before it."""
    (rule,) = build_passes([name])
    return rule, graph_of(model, PASSES[: PASSES.index(name)])


@cache
def _right(name: str, model: Callable[..., Any]) -> tuple[str, Any]:
    """Digest and results of the graph behind a pass that nothing spoils."""
    rule, right = _found(name, model)
    (report,) = run_passes(right, [rule], verify=True)
    assert report.matched
    return digest(right), outcome(right, model)


@pytest.mark.product
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_every_wrong_rewrite_is_caught_and_would_show(mutation: Mutation) -> None:
    """Without verification it would be a wrong number, or a crash."""
    rule, wrong = _found(mutation.rule, mutation.model)
    with pytest.raises(VerificationError, match=mutation.rule):
        run_passes(wrong, [Spoiled(rule, mutation)], verify=True)
    right, results = _right(mutation.rule, mutation.model)
    assert digest(wrong) != right, "the mutation changed nothing"
    assert outcome(wrong, mutation.model) != results


def test_every_pass_is_mutated() -> None:
    assert {m.rule for m in MUTATIONS} == set(PASSES)
    assert len({m.name + m.model.__name__ for m in MUTATIONS}) == len(MUTATIONS) >= 30
