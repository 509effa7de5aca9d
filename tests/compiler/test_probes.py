"""``--verify`` runs every pass over graphs that have each part which a pass can read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from fusewright.compiler import probes
from fusewright.compiler.inspect.fusions import fusions
from fusewright.compiler.probes import PROBES, check_probes, run_probe
from fusewright.config import PASSES
from fusewright.passes import VerificationError, build_passes, fake_value, run_passes
from fusewright.passes.rule import Context

COLLECTIVE = {"fuse_all_reduce_norm", "fuse_async_tp"}
"""Sums over ranks are verified where a model has them."""


@pytest.mark.parametrize("name", PROBES)
def test_every_pass_of_a_probe_matches_and_every_input_of_it_shows(name: str) -> None:
    reports = run_probe(PROBES[name], tuple(PASSES))
    assert {r.name for r in reports if r.matched} == {*PROBES[name].passes}
    assert not [check for report in reports for check in report.checks if check.unseen]


def test_every_pass_has_a_probe() -> None:
    probed = {name for probe in PROBES.values() for name in probe.passes}
    assert probed == {*PASSES} - COLLECTIVE - {"cleanup"}


def test_the_list_of_fusions_names_every_op_that_a_pass_makes() -> None:
    """``explain`` prints that list as "every fusion"."""
    made = {"linear_all_reduce_add_norm_linear"}  # of ranks: no probe has them
    for probe in PROBES.values():
        gm = probes.graph_of(probe)
        of_model = {node.target for node in gm.graph.nodes}
        for rule in build_passes(tuple(PASSES)):
            run_passes(gm, [rule])
            called = {node.target for node in gm.graph.nodes} - of_model
            made |= {t._opname for t in called if isinstance(t, torch._ops.OpOverload)}
    assert len(made) > 10
    assert not made - {fusion.op for fusion in fusions()}


LOST = [
    ("dense", "linear_add_norm_linear", ("bias", "next_bias", "norm_weight")),
    ("dense", "linear", ("bias",)),
    ("FP8, scales of tokens", "linear_add_norm_mlp", ("bias", "next_bias", "weight_scale")),
    ("FP8, static scales", "linear", ("bias", "out_scale")),
    ("normed heads", "rope_kv_store", ("k_weight", "kv_scale", "v")),
    ("attention", "paged_attention", ("kv_scale",)),
    ("shared experts", "fused_moe", ("correction_bias", "shared", "shared_gate")),
    ("experts between linear layers", "linear_add_norm_moe", ("bias", "next_norm_weight")),
]


@pytest.mark.parametrize(
    ("name", "op", "argument"), [(name, op, a) for name, op, arguments in LOST for a in arguments]
)
def test_an_argument_that_a_pass_loses_is_caught(
    name: str, op: str, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its place is another argument of the same shape if there is one, else none."""
    overload = getattr(torch.ops.fw, op).default
    at = [a.name for a in overload._schema.arguments].index(argument)
    replace = Context.replace

    def losing(self: Context, rule: Any, site: fx.Node, *args: Any, **kwargs: Any) -> None:
        build, old = kwargs.pop("build", None), {*site.graph.nodes}
        args, build = (args, build) if build else (args[:2] + args[3:], args[2])

        def wrong(graph: fx.Graph) -> Any:
            built = build(graph)
            for node in graph.nodes:
                if node not in old and node.target is overload and len(node.args) > at:
                    node.update_arg(at, another(node, node.args[at]))
            return built

        old_nodes, outputs, *tier = args if args else (kwargs.pop("old"), kwargs.pop("outputs"))
        replace(self, rule, site, old_nodes, outputs, wrong, *tier, **kwargs)

    monkeypatch.setattr(Context, "replace", losing)
    probe = PROBES[name]
    with pytest.raises(VerificationError, match="rewrite fuse_"):
        run_probe(probe, probe.passes)


def another(node: fx.Node, lost: Any) -> Any:
    like = describe(lost)
    return next((a for a in node.args if a is not lost and describe(a) == like), None)


def describe(arg: Any) -> Any:
    value = fake_value(arg) if isinstance(arg, fx.Node) else None
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else None


def test_verify_names_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> None:
        raise VerificationError("rewrite x at y")

    monkeypatch.setattr(probes, "run_probe", refused)
    with pytest.raises(VerificationError, match="in the probe 'normed heads': rewrite x at y"):
        check_probes.__wrapped__(("fuse_rope_store",))
    check_probes.__wrapped__(("cleanup",))
