"""Linear layers and what stands between them become one op; what is left out says why."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fusewright import ops
from fusewright.ops.chain.stages import Linear, parse
from fusewright.passes import (
    PassReport,
    RequiredFusionError,
    build_passes,
    check_required,
    run_passes,
)
from tests.passes import experts
from tests.passes.graphs import capture, hidden, targets
from tests.passes.models import GROUP

SIZE = 32
PASSES = (
    *("fuse_add_norm", "fuse_gated_linear", "fuse_moe", "fuse_norm_quant"),
    *("fuse_all_reduce_norm", "fuse_act_quant", "fuse_chain"),
)
Model = Callable[[Tensor, Tensor, Tensor, Tensor], Any]
L, N = "linear(weight)", "add_norm(weight, eps=1e-05)"
FP8, Q = "linear(weight, weight_scale, group_size=0)", "add_norm(weight, eps=1e-05, group_size=0)"
N1 = "add_norm(weight, eps=1e-05, offset=1.0)"
R = Q.replace("=0)", "=0, reduce=True)")
BIASED = FP8.replace("weight,", "weight, bias,", 1)
I8 = "linear(weight, weight_scale, weight_format='int8_channel')"
I8A = I8.replace("scale, ", "scale, activation='silu', ")
I8B = I8.replace("weight,", "weight, bias,", 1)
ACT = "act(activation='silu', group_size=0)"


def norm(total: Tensor, nw: Tensor, offset: float | None = None) -> Tensor:
    return ops.rms_norm(total, nw, 1e-5, offset)


def dense(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return ops.linear(x, w.view(SIZE, -1), bias)


def fp8(x: Tensor, w: Tensor, bias: Tensor | None = None, dtype: Any = torch.bfloat16) -> Tensor:
    """A layer with a scale a token and one a row of the weight."""
    q, x_scale = ops.quant_fp8_dynamic(x, 0)
    w = w.view(SIZE, -1)
    scale = w[:, :1].abs().float() + 0.5
    return ops.linear(q, w.to(torch.float8_e4m3fn), bias, x_scale, scale, dtype)


def int8(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """A layer of stored integers with a scale for each row."""
    w = w.view(SIZE, -1)
    stored = (w * 64).to(torch.int8), bias, None, w[:, :1].abs().float() + 0.01
    return ops.linear(x, *stored, None, None, None, None, "int8_channel")


def halved(w: Tensor) -> Tensor:
    return w.view(SIZE, SIZE)[:, : SIZE // 2].contiguous()


def mlp(total: Tensor, w: Tensor, nw: Tensor, linear: Any = fp8, offset: Any = None) -> Tensor:
    y = ops.silu_mul(linear(norm(total, nw, offset), w))
    down: Tensor = linear(y, halved(w))
    return down


def pair(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = r + dense(x, w)
    return dense(norm(total, nw), w, nw), total * 2


def swapped_sum(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = dense(x, w, nw) + r
    return dense(norm(total, nw), w), total


def whole_layer(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = r + dense(x, w)
    total = total + mlp(total, w, nw, dense)
    return dense(norm(total, nw), w), total


def last_layer(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    """The norm behind the MLP goes to no layer."""
    total = r + dense(x, w)
    return norm(total + mlp(total, w, nw, dense), nw)


def few_bits(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = r + int8(x, w, nw)
    total = total + mlp(total, w, nw, int8)
    return int8(norm(total, nw), w), total


def fp8_layer(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = r + fp8(x, w, nw)
    total = total + mlp(total, w, nw)
    return fp8(norm(total, nw), w, nw), total * 2


def fp8_last_layer(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = fp8(x, w) + r
    return norm(total + mlp(total, w, nw), nw)


def two_layers(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    for _ in range(2):
        r = r + fp8(x, w)
        r = r + mlp(r, w, nw)
        x = fp8(norm(r, nw), w)
    return x, r


def fp8_over_ranks(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = r + ops.all_reduce(fp8(x, w), GROUP)
    total = total + ops.all_reduce(mlp(total, w, nw), GROUP)
    return fp8(norm(total, nw), w), total


def offset_layer(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    """Gemma's, whose norms' weights have an offset."""
    total = r + dense(x, w)
    total = total + mlp(total, w, nw, dense, offset=1.0)
    return dense(norm(total, nw, 1.0), w), total


def gated(x: Tensor, w: Tensor) -> Tensor:
    """A layer with an activation, which no chain kernel adds to a residual."""
    return ops.silu_mul(ops.linear(x, w.view(SIZE, SIZE).repeat(2, 1)))


def gated_then_pair(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    """The first norm has no kernel; the second joins its layers."""
    total = r + gated(x, w)
    total = total + mlp(total, w, nw, dense)
    return dense(norm(total, nw), w), total


def next_is_read_twice(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    """The norm behind goes to two layers: the first part alone is joined."""
    total = r + fp8(x, w)
    total = total + mlp(total, w, nw)
    q, scale = ops.quant_fp8_dynamic(norm(total, nw), 0)
    weight, of_rows = w.view(SIZE, SIZE).to(torch.float8_e4m3fn), torch.ones(SIZE, 1)
    return [ops.linear(q, weight, b, scale, of_rows, torch.bfloat16) for b in (None, nw)]


def not_the_sum(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    """The second norm adds to something else than the first made."""
    total = r + dense(x, w)
    y = dense(ops.silu_mul(dense(norm(total, nw), w)), halved(w))
    return dense(norm(y + x, nw), w), total


MATCHED: list[tuple[Model, list[str]]] = [
    (pair, [f"{L} > {N} > linear(weight, bias)"]),
    (swapped_sum, [f"linear(weight, bias) > {N} > {L}"]),
    (whole_layer, [f"{L} > {N} > linear(weight, activation='silu') > {L} > {N} > {L}"]),
    (last_layer, [f"{L} > {N} > linear(weight, activation='silu')"]),
    (
        fp8_layer,
        [f"{BIASED} > {Q} > {FP8} > {ACT} > {FP8} > {Q} > {BIASED}"],
    ),
    (few_bits, [f"{I8B} > {N} > {I8A} > {I8} > {N} > {I8}"]),
    (fp8_last_layer, [f"{FP8} > {Q} > {FP8} > {ACT} > {FP8}"]),
    (two_layers, [" > ".join([f"{FP8} > {Q} > {FP8} > {ACT} > {FP8} > {Q} > {FP8}"] * 2)]),
    (not_the_sum, [f"{L} > {N} > linear(weight, activation='silu')", f"{L} > {N} > {L}"]),
    (next_is_read_twice, [f"{FP8} > {Q} > {FP8} > {ACT} > {FP8}"]),
    (offset_layer, [f"{L} > {N1} > linear(weight, activation='silu') > {L} > {N1} > {L}"]),
    (gated_then_pair, [f"{L} > {N} > {L}"]),
    (fp8_over_ranks, [f"{FP8} > {R} > {FP8} > {ACT} > {FP8} > {R} > {FP8}"]),
]


def given() -> dict[str, Tensor]:
    """The weight flat: of two dimensions its first would be captured as dynamic."""
    torch.manual_seed(3)
    x, r = (hidden(dtype=torch.bfloat16, size=SIZE) for _ in range(2))
    w = hidden(dtype=torch.bfloat16, size=SIZE, tokens=SIZE) / 6
    return {"x": x, "r": r, "w": w.flatten(), "nw": torch.randn(SIZE).bfloat16()}


@cache
def fused(model: Any, verify: bool = True) -> tuple[fx.GraphModule, PassReport]:
    """The graph after the passes, and the report of the last."""
    inputs = given()
    if model.__module__ == experts.__name__:
        inputs = dict(zip(("x", "flat"), experts.inputs(), strict=True))
    gm = capture(model, **inputs)
    *_, report = run_passes(gm, build_passes(PASSES), verify=verify)
    return gm, report


def chains(gm: fx.GraphModule) -> list[str]:
    calls = [node for node in gm.graph.nodes if "chain" in str(node.target)]
    return [str(call.args[3]) for call in calls]


@pytest.mark.parametrize(("model", "texts"), MATCHED, ids=lambda v: getattr(v, "__name__", ""))
def test_they_become_one_op_and_no_bit_changes(model: Model, texts: list[str]) -> None:
    """Verified: the sides before and after have the same bits."""
    gm, report = fused(model)
    assert chains(gm) == texts
    joints = [
        stage
        for text in texts
        for stage in parse(text).stages
        if not isinstance(stage, Linear) or stage.activation
    ]
    assert report.matched == sum(not isinstance(stage, Linear) for stage in joints)
    assert bool(report.missed) is (model in (next_is_read_twice, gated_then_pair))


@pytest.mark.parametrize(
    ("model", "left"),
    [
        (experts.between_linears, []),
        (experts.last_layer, ["add_rms_norm.default"]),
        (experts.fp8_between_linears, []),
        (experts.fp8_last_layer, ["add_rms_norm.default"]),
    ],
)
def test_experts_are_a_stage(model: Any, left: list[str]) -> None:
    gm, report = fused(model)
    assert not report.missed
    found = [t for t in targets(gm) if t.endswith(".default")]
    assert found == ["chain.default", *left]
    (text,) = chains(gm)
    assert [stage.kind for stage in parse(text).stages][2] == "experts"


def doubled(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    y = dense(x, w)
    return dense(norm(y + y, nw), w), r * 2


def no_linear(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    return dense(norm(r + x.cos(), nw), w)


def linear_read(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    y = dense(x, w)
    return dense(norm(r + y, nw), w), y.sum()


def normed_read(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    y = norm(r + dense(x, w), nw)
    return dense(y, w), y * 2


def early_sum(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = r + dense(x, w)
    y, half = norm(total, nw), total / 2
    return dense(y, w) + half


def write_between(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    y = norm(r + dense(x, w), nw)
    x.mul_(2)
    return dense(y, w)


def static(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = r + dense(x, w)
    scale = nw[:1].float().view(1, 1)
    q = ops.quant_fp8_static(norm(total, nw), scale)
    weight = w.view(SIZE, SIZE).to(torch.float8_e4m3fn)
    return ops.linear(q, weight, None, scale, scale, torch.bfloat16), total


def one_of_few_bits(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    return int8(norm(r + dense(x, w), nw), w)


def gated_before(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    return dense(norm(r + gated(x, w), nw), w)


def delta(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    """An adapter beside the layer behind the norm."""
    y = norm(r + dense(x, w), nw)
    down = w.view(SIZE, SIZE)[:4].contiguous()
    return dense(y, w) + ops.linear(ops.linear(y, down), down.t().contiguous())


def other_dtype(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = r + fp8(x, w)
    return fp8(norm(total, nw), w, dtype=torch.float32), total


def summed_by_nobody(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    """The residual comes from a linear layer, what is summed over ranks does not."""
    total = dense(r, w) + ops.all_reduce(x, GROUP)
    return dense(norm(total, nw), w)


def activated_alone(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    return ops.quant_fp8_dynamic(ops.silu_mul(torch.cat((x,) * 8, -1)), 128)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (gated_before, "the layer before the norm has an activation"),
        (one_of_few_bits, "reads no weights in int8_channel"),
        (delta, "is also read by linear"),
        (doubled, "is added to itself"),
        (no_linear, "comes from cos, not from a linear layer"),
        (linear_read, "is also read by sum"),
        (normed_read, "add_rms_norm is also read by mul"),
        (early_sum, "the sum is used before the next layer, by truediv"),
        (write_between, "writes to memory between"),
        (static, "has a static scale, for which there is no kernel"),
        (other_dtype, "the layer makes torch.float32, where the chain began in torch.bfloat16"),
        (summed_by_nobody, "comes from"),
        (activated_alone, "comes from cat, not from a linear layer"),
        (experts.shared_reads_the_norm, "a shared expert reads the norm too"),
        (experts.no_linear_before, "not from a linear layer"),
        (experts.added_to_itself, "is added to itself"),
        (experts.fp8_behind_the_norm, "either the experts or the layer before them are FP8"),
        (experts.fp8_layer_before, "either the experts or the layer before them are FP8"),
        (experts.static_layer_before, "has a static scale, for which there is no kernel"),
        (experts.norm_read_twice, "is also read by"),
        (experts.sum_read_early, "the sum is used before the next layer"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_every_norm_and_activation_that_is_left_says_why(model: Any, reason: str) -> None:
    """The reason names ops and no node, so that layers that are alike are told once."""
    gm, report = fused(model, verify=False)
    assert report.missed
    assert any(reason in site.reason for site in report.missed)
    nodes = {node.name for node in gm.graph.nodes if node.name[-1:].isdigit()}
    assert not any(f" {name} " in f" {site.reason} " for site in report.missed for name in nodes)


def test_a_required_chain_that_is_cut_is_printed() -> None:
    reports = [fused(gated_before, verify=False)[1]]
    with pytest.raises(RequiredFusionError) as error:
        check_required(reports, [("fuse_chain", 1)])
    cut = f"linear(weight, activation='silu') > {N} > {L}"
    assert f"(the layer before the norm has an activation: {cut})" in str(error.value)


@pytest.mark.parametrize("model", [experts.moe, experts.experts_read_the_sum])
def test_experts_that_read_no_norm_of_a_sum_are_no_site(model: Any) -> None:
    """Those behind a model's first norm, and those that read the sum itself."""
    assert not fused(model, verify=False)[1].sites


def test_what_no_kernel_computes_within_a_chain_is_matched_in_part() -> None:
    def gated_between(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
        for layer in (dense, gated, dense):
            r = r + layer(x, w)
            x = dense(norm(r, nw), w)
        return x, r

    _, report = fused(gated_between)
    reason = "runs by its own op: the layer before the norm has an activation"
    assert [(site.matched, site.reason) for site in report.sites] == [
        *((True, ""), (True, reason), (True, ""))
    ]


def test_views_of_a_result_are_known_as_views_of_it() -> None:
    """Else a piece with such a view would go to a compiler."""

    def model(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
        total = r + dense(x, w)
        q, k = dense(norm(total, nw), w).split([24, 8], dim=-1)
        return q * 2, k * 3, total * 2

    gm, _ = fused(model)
    (split,) = (node for node in gm.graph.nodes if node.target == "split")
    source = split.args[0].meta["example_value"].untyped_storage()
    for part in split.meta["example_value"]:
        assert part.untyped_storage()._cdata == source._cdata


def pair_over_ranks(x: Tensor, r: Tensor, w: Tensor, nw: Tensor) -> Any:
    total = r + ops.all_reduce(dense(x, w), GROUP)
    return dense(norm(total, nw), w), total


def test_layers_of_two_ranks_are_summed_in_the_chain() -> None:
    gm, report = fused(pair_over_ranks)
    assert report.matched == 1 and not report.missed
    (call,) = (node for node in gm.graph.nodes if "chain_over_ranks" in str(node.target))
    assert call.args[4] == GROUP and "reduce=True" in call.args[3]
