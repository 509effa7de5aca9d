"""``linear`` and ``linear_fp8`` at each product of each model; "native" is cuBLAS."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from .harness import MODELS, TOKENS, Model, Work, cases, measure, randn

GROUP = 128


def products(model: Model) -> dict[str, tuple[int, int]]:
    """(out_features, in_features) by name; of a MoE the parts that every token passes."""
    found = {"qkv": (model.qkv, model.hidden), "o": (model.hidden, model.heads * model.head_dim)}
    if model.intermediate > model.hidden:
        found["gate_up"] = (2 * model.intermediate, model.hidden)
        found["down"] = (model.hidden, model.intermediate)
    return found


def distinct() -> dict[tuple[int, int], str]:
    """Every distinct product, under the name of the first model that has it."""
    named: dict[tuple[int, int], str] = {}
    for model in MODELS:
        for name, shape in products(model).items():
            named.setdefault(shape, f"{model.name} {name}")
    return named


def make(rows: int, n: int, k: int) -> tuple[Any, ...]:
    return randn(rows, k), randn(n, k) * k**-0.5, None


def fp8(*shape: int) -> Tensor:
    return randn(*shape).to(torch.float8_e4m3fn)


def make_fp8(scheme: str, rows: int, n: int, k: int) -> tuple[Any, ...]:
    def scales(*shape: int) -> Tensor:
        return torch.rand(shape, device="cuda") + 0.5

    x_scale, weight_scale = {
        "static": lambda: (scales(1, 1), scales(1, 1)),
        "per-token": lambda: (scales(rows, 1), scales(n, 1)),
        "block": lambda: (scales(k // GROUP, rows).t(), scales(-(-n // GROUP), -(-k // GROUP))),
    }[scheme]()
    return fp8(rows, k), x_scale, fp8(n, k), weight_scale, None, torch.bfloat16


def works() -> Iterator[Work]:
    for (n, k), name in distinct().items():
        for rows in TOKENS:
            yield Work("linear", f"{name}, {rows} rows", partial(make, rows, n, k))
            for scheme in ("static", "per-token", "block"):
                label = f"{name}, {rows} rows, {scheme}"
                yield Work("linear_fp8", label, partial(make_fp8, scheme, rows, n, k))


@pytest.mark.parametrize(("work", "contender"), cases(works()))
def test_linear(benchmark: BenchmarkFixture, work: Work, contender: str) -> None:
    measure(benchmark, work, contender)
