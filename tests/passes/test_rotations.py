"""A rotation in float32 of a narrower tensor is raised with its cast where no cast follows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.passes import CANONICALIZE, run_passes
from tests.passes.graphs import aten
from tests.passes.spelled_rotations import BF16, angles, half, inputs


def left_wide(q: Tensor, k: Tensor, f: Tensor) -> Any:
    cos, sin = (t.unsqueeze(1) for t in angles(f, torch.float32))
    wide = (x.transpose(1, 2).float() for x in (q, k))
    return [x * cos + half(x) * sin for x in wide]


def cast_twice(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """The products read two casts of the same tensor."""
    cos, sin = (t.unsqueeze(1) for t in angles(f, torch.float32))
    narrow = (x.transpose(1, 2) for x in (q, k))
    return [x.float() * cos + half(x.to(torch.float32)) * sin for x in narrow]


@pytest.mark.parametrize(("spelling", "matched"), [(left_wide, 2), (cast_twice, 0)])
def test_a_result_that_stays_wide(spelling: Callable[..., Any], matched: int) -> None:
    gm = aten(spelling, **inputs(BF16))
    (report,) = run_passes(gm, [CANONICALIZE[1]], verify=True)
    assert report.matched == matched and bool(report.missed) is not bool(matched)
    for call in gm.graph.nodes:
        if "rotary" in str(call.target):
            assert {x.meta["example_value"].dtype for x in call.args[1:3]} == {torch.float32}
