"""Verification draws inputs that all show: another value of any of them moves a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fusewright.config import PASSES
from fusewright.passes import PassReport, build_passes, run_passes
from fusewright.passes.rule import EXACT, Context, is_call
from tests.passes.graphs import capture, hidden
from tests.passes.models import graph_of
from tests.passes.test_mutations import MUTATIONS

MODELS = list(dict.fromkeys(mutation.model for mutation in MUTATIONS))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_input_of_every_rewrite_shows(model: Callable[..., Any]) -> None:
    reports = run_passes(graph_of(model), build_passes(PASSES), verify=True)
    checks = [check for report in reports for check in report.checks]
    assert {check.site: check.unseen for check in checks if check.unseen} == {}


class Again:
    """Replaces ``x + y * 0`` by the same calls."""

    name, tier = "again", EXACT

    def __call__(self, gm: fx.GraphModule, context: Context) -> PassReport:
        (total,) = (node for node in gm.graph.nodes if is_call(node, torch.add))
        x, product = total.args

        def build(graph: fx.Graph) -> list[fx.Node]:
            again = graph.call_function(torch.mul, product.args)
            return [graph.call_function(torch.add, (x, again))]

        context.replace(self, total, [product, total], [total], build)
        return PassReport(self.name)


def times_0(x: Tensor, y: Tensor) -> Tensor:
    return torch.add(x, torch.mul(y, 0))


def times_1(x: Tensor, y: Tensor) -> Tensor:
    return torch.add(x, torch.mul(y, 1))


@pytest.mark.parametrize("model", [times_0, times_1])
def test_an_input_that_never_shows_is_named(model: Callable[..., Any]) -> None:
    gm = capture(model, x=hidden(), y=hidden())
    (report,) = run_passes(gm, [Again()], verify=True)
    (check,) = report.checks
    assert len(check.unseen) == (model is times_0)
    assert PassReport.from_json(report.to_json()) == report
