"""Experts between two linear layers and their norms become one op where nothing else reads them."""

from __future__ import annotations

import pytest
import torch

from fusewright.passes import build_passes, run_passes
from tests.passes import experts
from tests.passes.graphs import capture, targets

PASSES = ["fuse_add_norm", "fuse_gated_linear", "fuse_moe", "fuse_norm_moe"]


@pytest.mark.parametrize(
    ("model", "left"),
    [
        (experts.between_linears, []),
        (experts.last_layer, ["add_rms_norm.default"]),
        (experts.fp8_between_linears, []),
        (experts.fp8_last_layer, ["add_rms_norm.default"]),
        (experts.fp8_before_a_plain_layer, ["add_rms_norm.default", "linear.default"]),
    ],
)
def test_they_become_one_op_and_no_bit_changes(model: experts.Model, left: list[str]) -> None:
    x, flat = experts.inputs()
    gm = capture(model, x=x, flat=flat)
    *_, report = run_passes(gm, build_passes(PASSES), verify=True)
    assert (report.matched, report.missed) == (1, [])
    (site,) = report.sites
    assert bool(left) is site.reason.startswith("without the norm and layer behind: ")
    found = [t for t in targets(gm) if t.endswith(".default")]
    assert found == ["linear_add_norm_moe.default", *left]
    sizes = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    values = iter((flat, x) if sizes[0].dim() == 1 else (x, flat))
    got = gm(*(s.node.hint if isinstance(s, torch.SymInt) else next(values) for s in sizes))
    for ours, theirs in zip(got, model(x, flat), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (experts.shared_reads_the_norm, "a shared expert reads the norm too"),
        (experts.no_linear_before, "does not come from a linear layer"),
        (experts.added_to_itself, "is added to itself"),
        (experts.fp8_behind_the_norm, "the experts are FP8, a linear layer beside them not"),
        (experts.fp8_layer_before, "the experts are not FP8, a linear layer beside them is"),
        (experts.static_layer_before, "is not quantized by quant_fp8_dynamic"),
        (experts.norm_read_twice, "is also read by"),
        (experts.sum_read_early, "the sum is used before the experts"),
    ],
)
def test_a_miss_has_its_reason(model: experts.Model, reason: str) -> None:
    x, flat = experts.inputs()
    gm = capture(model, x=x, flat=flat)
    *_, report = run_passes(gm, build_passes(PASSES))
    (site,) = report.missed
    assert reason in site.reason
    assert "fused_moe.default" in targets(gm)


def test_a_norm_that_is_taken_twice_is_a_miss() -> None:
    """By two nodes, of which the experts read one."""
    x, flat = experts.inputs()
    gm = capture(experts.between_linears, x=x, flat=flat)
    run_passes(gm, build_passes(PASSES[:-1]))
    (moe,) = (n for n in gm.graph.nodes if n.target == torch.ops.fw.fused_moe.default)
    (output,) = gm.graph.find_nodes(op="output")
    with gm.graph.inserting_after(moe):
        again = gm.graph.node_copy(moe.args[0])
    output.args = ((*output.args[0], again),)
    (report,) = run_passes(gm, build_passes(PASSES[-1:]))
    (site,) = report.missed
    assert site.reason.endswith("is also read elsewhere")


@pytest.mark.parametrize("model", [experts.moe, experts.experts_read_the_sum])
def test_experts_that_read_no_norm_of_a_sum_are_no_site(model: experts.Model) -> None:
    """Those behind a model's first norm, and those that read the sum itself."""
    x, flat = experts.inputs()
    gm = capture(model, x=x, flat=flat)
    *_, report = run_passes(gm, build_passes(PASSES))
    assert not report.sites
