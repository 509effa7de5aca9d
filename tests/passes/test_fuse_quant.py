"""FP8 quantization folds into the norm, activation or attention before it, and no bit changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fusewright import ops
from fusewright.passes import PassReport, VerificationError, build_passes, run_passes
from fusewright.passes.fuse_quant import NORM
from fusewright.passes.rule import Context
from fusewright.passes.sites import SitePass
from tests.passes.graphs import capture, hidden, targets
from tests.passes.quantizers import (
    Quantize,
    int8_per_token,
    int8_static,
    per_group,
    per_token,
    static,
)

SIZE, EPS = 256, 1e-5


KINDS = {
    static: "static",
    per_token: "dynamic",
    per_group: "dynamic",
    int8_static: "int8_static",
    int8_per_token: "int8_dynamic",
}


def tensors(width: int = SIZE) -> dict[str, Tensor]:
    """In the order in which the models here first read them."""
    return {
        "scale": torch.rand(1) * 0.02 + 0.01,
        "x": hidden(dtype=torch.bfloat16, size=width),
        "residual": hidden(dtype=torch.bfloat16, size=width),
        "weight": torch.randn(width).bfloat16(),
    }


def norm(t: dict[str, Tensor], quantize: Quantize) -> tuple[Tensor, ...]:
    scale = t["scale"].view(1, 1)
    return quantize(ops.rms_norm(t["x"], t["weight"], EPS), scale)


def add_norm(t: dict[str, Tensor], quantize: Quantize) -> tuple[Tensor, ...]:
    scale = t["scale"].view(1, 1)
    total = t["residual"] + t["x"]
    return (*quantize(ops.rms_norm(total, t["weight"], EPS), scale), total * 2)


def last_add_norm(t: dict[str, Tensor], quantize: Quantize) -> tuple[Tensor, ...]:
    scale = t["scale"].view(1, 1)
    return quantize(ops.rms_norm(t["residual"] + t["x"], t["weight"], EPS), scale)


def act(t: dict[str, Tensor], quantize: Quantize) -> tuple[Tensor, ...]:
    scale = t["scale"].view(1, 1)
    return quantize(ops.silu_mul(t["x"]), scale)


def gelu(t: dict[str, Tensor], quantize: Quantize) -> tuple[Tensor, ...]:
    scale = t["scale"].view(1, 1)
    return quantize(ops.gelu_tanh_mul(t["x"]), scale)


def captured(
    model: Callable[..., Any], given: dict[str, Tensor], quantize: Quantize
) -> tuple[fx.GraphModule, dict[str, Tensor]]:
    """The graph, and those of the inputs that it reads."""
    used: list[str] = []

    class Watching(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            used.append(name)
            return super().__getitem__(name)

    model(Watching(given), quantize)
    given = {name: given[name] for name in dict.fromkeys(used)}
    return capture(lambda **t: model(t, quantize), **given), given


def run(gm: fx.GraphModule, given: dict[str, Tensor]) -> Any:
    values = iter(given.values())
    fakes = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    return gm(*(f.node.hint if isinstance(f, torch.SymInt) else next(values) for f in fakes))


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


@pytest.mark.parametrize("quantize", KINDS)
@pytest.mark.parametrize(
    ("model", "rule", "op", "width"),
    [
        (norm, "fuse_norm_quant", "rms_norm", SIZE),
        (add_norm, "fuse_norm_quant", "add_rms_norm", SIZE),
        (last_add_norm, "fuse_norm_quant", "add_rms_norm", SIZE),
        (act, "fuse_act_quant", "silu_mul", 2 * SIZE),
        (gelu, "fuse_act_quant", "gelu_tanh_mul", 2 * SIZE),
    ],
)
def test_both_become_one_op_and_no_bit_changes(
    model: Callable[..., Any], rule: str, op: str, width: int, quantize: Quantize
) -> None:
    gm, given = captured(model, tensors(width), quantize)
    *_, report = run_passes(gm, build_passes(["fuse_add_norm", rule]), verify=True)
    assert report.matched == 1 and not report.missed
    kind = KINDS[quantize]
    assert f"{op}_quant_{kind}.default" in targets(gm)
    assert not any(
        t in (f"{op}.default", f"quant_fp8_{kind}.default", f"quant_{kind}.default")
        for t in targets(gm)
    )
    for want, got in zip(model(given, quantize), run(gm, given), strict=True):
        assert want.dtype == got.dtype
        assert torch.equal(bits(want), bits(got))


def read_twice(t: dict[str, Tensor], quantize: Quantize) -> tuple[Tensor, ...]:
    scale = t["scale"].view(1, 1)
    normed = ops.rms_norm(t["x"], t["weight"], EPS)
    return (*quantize(normed, scale), normed + 1)


def late_scale(t: dict[str, Tensor], quantize: Quantize) -> tuple[Tensor, ...]:
    normed = ops.rms_norm(t["x"], t["weight"], EPS)
    return quantize(normed, (t["scale"] * 2).view(1, 1))


@pytest.mark.parametrize(
    ("model", "reason"),
    [(read_twice, "is also read unquantized, by"), (late_scale, "is not known before")],
)
def test_a_miss_says_why(model: Callable[..., Any], reason: str) -> None:
    gm, _ = captured(model, tensors(), static)
    before = targets(gm)
    (report,) = run_passes(gm, build_passes(["fuse_norm_quant"]), verify=True)
    (site,) = report.missed
    assert reason in site.reason
    assert targets(gm) == before


@pytest.mark.parametrize(("model", "rule"), [(norm, "fuse_norm_quant"), (act, "fuse_act_quant")])
@pytest.mark.parametrize("times", [0, 2])
def test_a_dynamic_quantization_not_read_once_is_a_miss(
    model: Callable[..., Any], rule: str, times: int
) -> None:
    gm, _ = captured(model, tensors(2 * SIZE if model is act else SIZE), per_token)
    (output,) = gm.graph.find_nodes(op="output")
    values, scales = output.args[0]
    with gm.graph.inserting_after(scales):
        again = [gm.graph.node_copy(scales) for _ in range(times)]
    output.args = ((values, *again),)
    gm.graph.erase_node(scales)
    (report,) = run_passes(gm, build_passes([rule]))
    reason = f"its values are taken 1 times and its scales {times} times, not once"
    assert [site.reason for site in report.missed] == [reason]
    assert "quant_fp8_dynamic.default" in targets(gm)


def test_verify_catches_a_fusion_that_swaps_its_scale() -> None:
    class Wrong(SitePass):
        def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
            report = super().__call__(gm, context)
            (rewrite,) = context.rewrites
            (fused,) = rewrite.after.module.graph.find_nodes(
                op="call_function", target=torch.ops.fw.rms_norm_quant_static.default
            )
            fused.args = (*fused.args[:2], 0.5, fused.args[3])
            rewrite.after.module.recompile()
            return report

    gm, _ = captured(norm, tensors(), static)
    with pytest.raises(VerificationError, match="fuse_norm_quant"):
        run_passes(gm, [Wrong(NORM.name, NORM.tier, NORM.read)], verify=True)


HEADS, KV_HEADS, DIM, BLOCK, SEQS = 4, 2, 32, 8, 5


def attention_inputs() -> dict[str, Tensor]:
    return {
        "scale": torch.rand(1) * 0.02 + 0.01,
        "q": torch.randn(SEQS, HEADS, DIM).bfloat16(),
        "kv_cache": torch.randn(6, 2, BLOCK, KV_HEADS, DIM).bfloat16(),
        "table": torch.randint(0, 6, (SEQS, 3)).int(),
        "seq_lens": torch.randint(1, 24, (SEQS,)).int(),
        "starts": torch.arange(SEQS + 1).int(),
    }


def attention(t: dict[str, Tensor], quantize: Quantize) -> tuple[Tensor, ...]:
    scale, q = t["scale"].view(1, 1), t["q"]
    out = torch.empty_like(q)
    ops.paged_attention(
        q, t["kv_cache"], t["table"], t["seq_lens"], t["starts"], out, DIM**-0.5, 0, 0.0
    )
    return quantize(out.view(-1, HEADS * DIM), scale)


def test_attention_writes_fp8_within_one_step() -> None:
    gm, given = captured(attention, attention_inputs(), static)
    (report,) = run_passes(gm, build_passes(["fuse_attn_quant"]), verify=True)
    assert report.matched == 1 and not report.missed
    assert "quant_fp8_static.default" not in targets(gm)
    (want,), (got,) = attention(given, static), run(gm, given)
    assert got.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(got.float(), want.float(), atol=2.0**-9, rtol=2.0**-3)
    assert bits(got).unique().numel() > 10


def attention_with_sinks(t: dict[str, Tensor], quantize: Quantize) -> tuple[Tensor, ...]:
    scale, out = t["scale"].view(1, 1), torch.empty_like(t["q"])
    batch = (t["q"], t["kv_cache"], t["table"], t["seq_lens"], t["starts"])
    ops.paged_attention(*batch, out, DIM**-0.5, 0, 0.0, None, None, t["sinks"], 4)
    return quantize(out.view(-1, HEADS * DIM), scale)


def test_attention_that_writes_fp8_keeps_its_sinks_and_chunks() -> None:
    inputs = attention_inputs() | {"sinks": torch.randn(HEADS)}
    gm, given = captured(attention_with_sinks, inputs, static)
    (report,) = run_passes(gm, build_passes(["fuse_attn_quant"]), verify=True)
    assert report.matched == 1 and not report.missed
    (want,), (got,) = attention_with_sinks(given, static), run(gm, given)
    torch.testing.assert_close(got.float(), want.float(), atol=2.0**-9, rtol=2.0**-3)


@pytest.mark.parametrize(("quantize", "what"), [(per_token, "token"), (per_group, "group of 128")])
def test_attention_cannot_find_a_scale_of_its_own(quantize: Quantize, what: str) -> None:
    gm, _ = captured(attention, attention_inputs(), quantize)
    (report,) = run_passes(gm, build_passes(["fuse_attn_quant"]))
    (site,) = report.missed
    assert site.reason == f"a scale a {what} follows from values of several blocks of the kernel"


def attention_into(
    t: dict[str, Tensor], quantize: Quantize, out: Tensor, windows: tuple[int, ...]
) -> tuple[Tensor, ...]:
    for window in windows:
        rest = (t["table"], t["seq_lens"], t["starts"], out, DIM**-0.5, window, 0.0)
        ops.paged_attention(t["q"], t["kv_cache"], *rest)
    return quantize(out.view(-1, HEADS * DIM), t["scale"].view(1, 1))


def two_attentions(t: dict[str, Tensor], quantize: Quantize) -> tuple[Tensor, ...]:
    return attention_into(t, quantize, torch.empty_like(t["q"]), (0, 3))


def into_zeros(t: dict[str, Tensor], quantize: Quantize) -> tuple[Tensor, ...]:
    return attention_into(t, quantize, torch.zeros_like(t["q"]), (0,))


def first_half(t: dict[str, Tensor], quantize: Quantize) -> tuple[Tensor, ...]:
    def of_half(x: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        return quantize(x[:, : HEADS * DIM // 2], scale)

    return attention_into(t, of_half, torch.empty_like(t["q"]), (0,))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (two_attentions, "is written by paged_attention"),
        (into_zeros, "the output lies in zeros_like, not in a buffer of its own"),
        (first_half, "is another view of the output than a reshape"),
    ],
)
def test_an_attention_whose_output_cannot_be_fp8_says_why(model: Any, reason: str) -> None:
    gm, _ = captured(model, attention_inputs(), static)
    (report,) = run_passes(gm, build_passes(["fuse_attn_quant"]), verify=True)
    (site,) = report.missed
    assert reason in site.reason
