"""Router, experts and their sum become one op, and nothing becomes one that is not the same."""

from __future__ import annotations

import pytest
import torch

from fusewright.passes import build_passes, run_passes
from tests.passes import experts
from tests.passes.graphs import capture, targets

PASSES = ["fuse_gated_linear", "fuse_moe"]


@pytest.mark.parametrize("model", [experts.moe, experts.biased, experts.shared, experts.fp8])
def test_they_become_one_op_and_no_bit_changes(model: experts.Model) -> None:
    x, flat = experts.inputs()
    gm = capture(model, x=x, flat=flat)
    reports = run_passes(gm, build_passes(PASSES), verify=True)
    assert [(r.matched, len(r.missed)) for r in reports] == [(1, 0), (1, 0)]
    found = [t for t in targets(gm) if t.endswith(".default")]
    assert found == ["fused_moe.default"]
    sizes = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    values = iter((flat, x) if sizes[0].dim() == 1 else (x, flat))
    (got,) = gm(*(s.node.hint if isinstance(s, torch.SymInt) else next(values) for s in sizes))
    assert torch.equal(got, model(x, flat))


@pytest.mark.parametrize("model", [experts.moe, experts.biased, experts.shared, experts.fp8])
def test_an_activation_that_is_apart_joins_too(model: experts.Model) -> None:
    """As where ``fuse_gated_linear`` is off for the dtype."""
    x, flat = experts.inputs()
    gm = capture(model, x=x, flat=flat)
    (report,) = run_passes(gm, build_passes(["fuse_moe"]), verify=True)
    assert (report.matched, report.missed) == (1, [])
    assert [t for t in targets(gm) if t.endswith(".default")] == ["fused_moe.default"]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (experts.other_ids, "are not of one route"),
        (experts.weights_read, "is also read by"),
        (experts.other_input, "the router reads"),
        (experts.no_gate, "not from layers of experts"),
        (experts.logits_added, "not from a plain linear layer"),
    ],
)
def test_a_miss_has_its_reason(model: experts.Model, reason: str) -> None:
    x, flat = experts.inputs()
    gm = capture(model, x=x, flat=flat)
    _, report = run_passes(gm, build_passes(PASSES))
    (site,) = report.missed
    assert reason in site.reason
    assert "combine_experts.default" in targets(gm)


def test_experts_whose_sums_are_read_keep_their_activation_apart() -> None:
    x, flat = experts.inputs()
    gm = capture(experts.gate_up_read, x=x, flat=flat)
    (report,) = run_passes(gm, build_passes(["fuse_gated_linear"]), verify=True)
    (site,) = report.missed
    assert "has 2 users, not the activation alone" in site.reason
