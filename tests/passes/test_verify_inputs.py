"""Verification draws inputs that all show: another value of any of them moves a result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright import ops
from fusewright.config import PASSES
from fusewright.passes import build_passes, run_passes
from fusewright.passes.fuse_add_norm import FUSE_ADD_NORM
from tests.passes.graphs import capture, hidden
from tests.passes.models import graph_of
from tests.passes.test_mutations import MUTATIONS

MODELS = list(dict.fromkeys(mutation.model for mutation in MUTATIONS))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_input_of_every_rewrite_shows(model: Callable[..., Any]) -> None:
    reports = run_passes(graph_of(model), build_passes(PASSES), verify=True)
    checks = [check for report in reports for check in report.checks]
    assert checks and {check.site: check.unseen for check in checks if check.unseen} == {}


def test_an_input_that_never_shows_is_named() -> None:
    def model(x: Tensor, r: Tensor, w: Tensor, nothing: Tensor) -> Tensor:
        return ops.rms_norm(r + x.where(x.isnan(), x), w, 1e-5) * nothing

    gm = capture(model, x=hidden(), r=hidden(), w=torch.randn(32), nothing=torch.randn(32))
    (report,) = run_passes(gm, [FUSE_ADD_NORM], verify=True)
    assert [check.unseen for check in report.checks] == [[]]
