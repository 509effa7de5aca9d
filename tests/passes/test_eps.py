"""A number that the caller passes is made a constant only where a norm reads it as its eps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from fusewright.passes.canonicalize_norm import is_eps

rms_norm = nn.functional.rms_norm
Spelling = Callable[[Any, Any], Any]
EPS: dict[str, Spelling] = {
    "a mean of squares": lambda x, n: torch.mean(x * x, -1) + n,
    "of a power": lambda x, n: n + x.pow(2).mean(-1),
    "by keywords": lambda x, n: torch.add(
        input=torch.mean(input=torch.square(input=x), dim=-1), other=n
    ),
    "a sum over a size": lambda x, n: x.square().sum(-1) / 32 + n,
    "a sum times its inverse": lambda x, n: torch.mul(torch.sum(x * x, -1), 1 / 32) + n,
    "a quotient by keywords": lambda x, n: torch.div(input=x.square().sum(-1), other=32) + n,
    "an op": lambda x, n: rms_norm(x, (32,), None, n),
    "an op by keywords": lambda x, n: rms_norm(x, (32,), eps=n),
}
OTHER: dict[str, Spelling] = {
    "a mean": lambda x, n: torch.mean(x, -1) + n,
    "a mean by keywords": lambda x, n: torch.mean(input=x, dim=-1) + n,
    "a mean of cubes": lambda x, n: x.pow(3).mean(-1) + n,
    "a product of two": lambda x, n: torch.mean(x * (x + 1), -1) + n,
    "squares": lambda x, n: x * x + n,
    "a quotient by keywords": lambda x, n: torch.div(input=x, other=3) + n,
    "a multiple": lambda x, n: torch.add(x.square().mean(-1), n, alpha=2),
    "a factor": lambda x, n: x.square().mean(-1) * n,
    "a weight": lambda x, n: rms_norm(x, (32,), n, 1e-6),
    "its own multiple": lambda x, n: torch.add(1, x, alpha=n),
}


def is_read_as_eps(spelling: Spelling) -> bool:
    class Spelled(nn.Module):
        def forward(self, x: Any, n: Any) -> Any:
            return spelling(x, n)

    graph = fx.symbolic_trace(Spelled()).graph
    _, number = graph.find_nodes(op="placeholder")
    return any(is_eps(number, user) for user in number.users)


@pytest.mark.parametrize("spelling", EPS.values(), ids=EPS)
def test_a_norm_adds_its_eps_to_a_mean_of_squares(spelling: Spelling) -> None:
    assert is_read_as_eps(spelling)


@pytest.mark.parametrize("spelling", OTHER.values(), ids=OTHER)
def test_any_other_number_stays_an_input(spelling: Spelling) -> None:
    assert not is_read_as_eps(spelling)
