"""``fusewright bisect`` finds a wrong rewrite among right ones, and says nothing without one."""

from __future__ import annotations

import json
import operator
from typing import Any

import pytest
import torch
from torch import fx

from fusewright.compiler.inspect.bisect import OutputDifference, compare, first_bad
from fusewright.config import EngineOptions
from fusewright.engine.bisect import bisect_model
from fusewright.passes import PassReport, build_passes
from fusewright.passes.rule import EXACT, Context, is_call
from fusewright.serve.cli import main

OPTIONS = EngineOptions(device="cpu", dtype="float32", passes=("cleanup", "fuse_act"), seed=3)


class WrongEps:
    """Fuses add + norm as ``fuse_add_norm`` does, but for one site, which gets another eps."""

    name, tier = "wrong_eps", EXACT

    def __init__(self, wrong: int) -> None:
        self.wrong = wrong

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        report = PassReport(self.name)
        for norm in list(gm.graph.nodes):
            add: Any = norm.args[0] if norm.args else None
            if not is_call(norm, torch.ops.fw.rms_norm.default) or not is_call(add, operator.add):
                continue
            eps = 10.0 if len(report.sites) == self.wrong else norm.args[2]
            args = (add.args[1], add.args[0], norm.args[1], eps)

            def build(graph: fx.Graph, args: Any = args) -> list[fx.Node]:
                fused = graph.call_function(torch.ops.fw.add_rms_norm.default, args)
                return [graph.call_function(operator.getitem, (fused, i)) for i in (0, 1)]

            report.match(norm.name)
            context.replace(self, norm, old=[add, norm], outputs=[norm, add], build=build)
        return report


@pytest.mark.product
@pytest.mark.parametrize("wrong", [0, 3, 9])
def test_one_wrong_rewrite_among_ten_is_found(wrong: int) -> None:
    cleanup, fuse_act = build_passes(["cleanup", "fuse_act"])
    said: list[str] = []
    culprit, tolerance = bisect_model(
        OPTIONS, rules=[cleanup, WrongEps(wrong), fuse_act], say=said.append
    )
    assert culprit is not None
    assert (culprit.stage, culprit.name) == ("pass", "wrong_eps")
    module = ["layers.0.mlp_norm", *(f"layers.{i}.{n}_norm" for i in range(1, 5) for n in
              ("attention", "mlp")), "norm"][wrong]  # fmt: skip
    assert culprit.module == module
    found = culprit.difference
    assert found.output == "logits of step 0" and found.error > tolerance == 1e-4
    assert found.want != found.got
    assert len(said) < 12, "it tries halves, not every site"


def test_a_pass_that_is_wrong_beside_its_replacements_is_named_without_a_site() -> None:
    class ChangesEps:
        name, tier = "changes_eps", EXACT

        def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
            for node in gm.graph.find_nodes(
                op="call_function", target=torch.ops.fw.rms_norm.default
            ):
                node.args = (*node.args[:2], node.args[2] + 1.0)
            return PassReport(self.name)

    culprit, _ = bisect_model(OPTIONS, rules=[*build_passes(["cleanup"]), ChangesEps()])
    assert culprit is not None
    assert (culprit.stage, culprit.name, culprit.site) == ("pass", "changes_eps", "")


def test_the_command_prints_pass_site_values_and_seed(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bisect", "abacus", "--device", "cpu", "--passes", "cleanup,fuse_act", "--seed", "5"]
    assert main([*argv, "--tolerance", "1e-12"]) == 1  # fused, the product is rounded once
    captured = capsys.readouterr()
    assert captured.out.startswith("pass fuse_act at ")
    assert "layers.0.mlp: logits of step 0 is off by" in captured.out
    assert "became" in captured.out and captured.out.endswith("inputs from seed 5\n")
    assert "fuse_act, 0 of 5 sites" in captured.err
    assert main([*argv, "--tolerance", "1e-12", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["seed"] == 5 and told["culprit"]["stage"] == "pass"
    assert main([*argv, "-O0"]) == 2
    assert main([*argv, "--tolerance", "0"]) == 2
    assert "tolerance=0.0: expected a number above 0" in capsys.readouterr().err


def test_a_level_within_tolerance_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bisect", "abacus", "--device", "cpu", "--dtype", "float32", "-O2"]
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert captured.out == "-O2 is within 0.0001 of -O0 (inputs from seed 0)\n"
    assert captured.err.splitlines()[-1] == "the compiled program"


def test_the_first_bad_number_is_found_by_halves() -> None:
    wrong = OutputDifference("x", 1.0, 0, 0.0, 1.0)
    for count in range(1, 20):
        for first in range(1, count + 1):
            tried: list[int] = []

            def bad(
                n: int, first: int = first, tried: list[int] = tried
            ) -> OutputDifference | None:
                tried.append(n)
                return wrong if n >= first else None

            assert first_bad(count, bad) == (first, wrong)
            assert len(tried) <= 1 + count.bit_length()
        assert first_bad(count, lambda n: None) is None


def test_errors_are_of_the_whole_output_and_see_what_is_not_finite() -> None:
    want = torch.tensor([3.0, 4.0, torch.inf, torch.nan])
    assert compare("x", want, want.clone()).error == 0.0
    found = compare("x", want, torch.tensor([3.0, 4.5, torch.inf, torch.nan]))
    assert (found.error, found.index, found.want, found.got) == (0.1, 1, 4.0, 4.5)
    assert compare("x", want, torch.tensor([3.0, torch.nan, torch.inf, torch.nan])).error > 1e300
    assert compare("x", want[:0], want[:0]).error == 0.0
