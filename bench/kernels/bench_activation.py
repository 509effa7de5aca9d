"""``silu_mul``, with and without FP8 quantization, against Inductor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from .harness import (
    MODELS,
    QUANTS,
    TOKENS,
    Work,
    cases,
    inductor,
    measure,
    quant_argument,
    randn,
)


def make(rows: int, intermediate: int, quant: str) -> tuple[Any, ...]:
    return (randn(rows, 2 * intermediate), *quant_argument(quant))


def works() -> Iterator[Work]:
    for quant in QUANTS:
        name = f"silu_mul{quant}"
        libraries = {"inductor": inductor(name)}
        for intermediate in sorted({model.intermediate for model in MODELS}):
            for rows in TOKENS:
                made = partial(make, rows, intermediate, quant)
                yield Work(name, f"{rows} x {intermediate}", made, libraries=libraries)


@pytest.mark.parametrize(("work", "contender"), cases(works()))
def test_activation(benchmark: BenchmarkFixture, work: Work, contender: str) -> None:
    measure(benchmark, work, contender)
