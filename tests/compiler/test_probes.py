"""``--verify`` runs every pass over graphs that have each part which a pass can read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx

from fusewright.compiler import probes
from fusewright.compiler.inspect.fusions import fusions
from fusewright.compiler.probes import PROBES, check_probes, run_probe
from fusewright.config import PASSES
from fusewright.ops.chain.stages import parse
from fusewright.passes import VerificationError, build_passes, fake_value, run_passes
from fusewright.passes.rule import Context

COLLECTIVE = {"fuse_all_reduce_norm"}
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
    made = {"chain_over_ranks"}  # of ranks: no probe has them
    for probe in PROBES.values():
        gm = probes.graph_of(probe)
        of_model = {node.target for node in gm.graph.nodes}
        for rule in build_passes(tuple(PASSES)):
            run_passes(gm, [rule])
            called = {node.target for node in gm.graph.nodes} - of_model
            made |= {t._opname for t in called if isinstance(t, torch._ops.OpOverload)}
    assert len(made) > 8
    assert not made - {fusion.op for fusion in fusions()}


LOST = [
    ("dense", "chain", ("0.bias", "2.bias", "3.bias", "5.bias", "1.weight", "4.weight")),
    ("dense", "linear", ("bias",)),
    ("FP8, scales of tokens", "chain", ("0.bias", "6.bias", "0.weight_scale")),
    ("FP8, static scales", "linear", ("bias", "out_scale")),
    ("normed heads", "rope_kv_store", ("k_weight", "kv_scale", "v")),
    ("attention", "paged_attention", ("kv_scale", "sinks")),
    ("shared experts", "fused_moe", ("correction_bias", "shared", "shared_gate")),
    ("experts between linear layers", "chain", ("0.bias", "3.weight")),
]


@pytest.mark.product
@pytest.mark.parametrize(
    ("name", "op", "argument"), [(name, op, a) for name, op, arguments in LOST for a in arguments]
)
def test_an_argument_that_a_pass_loses_is_caught(
    name: str, op: str, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its place is another argument of the same shape if there is one, else none.  Operands of
    chains are named with the number of their stage."""
    overload = getattr(torch.ops.fw, op).default
    names = [a.name for a in overload._schema.arguments]
    rewrite = Context.replace

    def losing(self: Context, rule: Any, site: fx.Node, *args: Any, **kwargs: Any) -> None:
        build, old = kwargs.pop("build", None), {*site.graph.nodes}
        args, build = (args, build) if build else (args[:2] + args[3:], args[2])

        def wrong(graph: fx.Graph) -> Any:
            built = build(graph)
            for node in graph.nodes:
                if node in old or node.target is not overload:
                    continue
                if op == "chain":
                    lose_operand(node, *argument.split("."))
                elif len(node.args) > (at := names.index(argument)):
                    node.update_arg(at, another(node.args, node.args[at]))
            return built

        old_nodes, outputs, *tier = args if args else (kwargs.pop("old"), kwargs.pop("outputs"))
        rewrite(self, rule, site, old_nodes, outputs, wrong, *tier, **kwargs)

    monkeypatch.setattr(Context, "replace", losing)
    probe = PROBES[name]
    with pytest.raises(VerificationError, match="rewrite fuse_"):
        run_probe(probe, probe.passes)


def lose_operand(node: fx.Node, stage: str, name: str) -> None:
    """Another operand of the same shape is in its place, or the stage has no such operand."""
    chain, operands = parse(str(node.args[3])), list[Any](node.args[2])  # type: ignore[arg-type]
    places = chain.deal(range(len(operands)))
    if (number := int(stage)) >= len(places) or name not in places[number]:
        return
    at = places[number][name]
    operands[at] = another(operands, operands[at])
    if operands[at] is None:
        del operands[at]
        changed = list(chain.stages)
        rest = tuple(each for each in changed[number].tensors if each != name)
        changed[number] = replace(changed[number], tensors=rest)
        node.update_arg(3, " > ".join(map(str, changed)))
    node.update_arg(2, operands)


def another(args: Any, lost: Any) -> Any:
    like = describe(lost)
    return next((a for a in args if a is not lost and describe(a) == like), None)


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
