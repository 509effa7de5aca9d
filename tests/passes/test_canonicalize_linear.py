"""A product with a transposed weight is a linear layer, one with a weight stored by input none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusewright.passes import run_passes
from fusewright.passes.raising.canonicalize_linear import CANONICALIZE_LINEAR
from tests.passes.graphs import dispatched, targets


def plain(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.mm(x, w.t()) * b


def biased(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(b, x, w.transpose(0, 1))


def by_input(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.addmm(b, x, w)


@pytest.mark.parametrize(
    ("fn", "missed"), [(plain, []), (biased, []), (by_input, ["the weight is stored by input"])]
)
def test_products_with_transposed_weights_are_raised(
    fn: Callable[..., Tensor], missed: list[str]
) -> None:
    gm = dispatched(fn, "w", "b", x=torch.randn(7, 8), w=torch.randn(8, 8), b=torch.randn(8))
    (report,) = run_passes(gm, [CANONICALIZE_LINEAR], verify=True)
    assert [site.reason for site in report.missed] == missed
    assert ("linear.default" in targets(gm)) == (not missed)


def test_a_weight_by_input_that_lies_by_output_is_raised() -> None:
    """As the weights of GPT-2 lie once they are loaded."""
    w = torch.randn(12, 8).t()  # [in_features, out_features]
    gm = dispatched(by_input, "w", "b", x=torch.randn(7, 8), w=w, b=torch.randn(12))
    (report,) = run_passes(gm, [CANONICALIZE_LINEAR], verify=True)
    assert (report.matched, report.missed) == (1, [])
    assert "linear.default" in targets(gm)
