"""``rms_norm`` and ``add_rms_norm``, with and without FP8 quantization, against Inductor."""

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

EPS = 1e-5


def make(adds: bool, rows: int, hidden: int, quant: str) -> tuple[Any, ...]:
    tensors = [randn(rows, hidden) for _ in range(1 + adds)]
    return (*tensors, randn(hidden), EPS, *quant_argument(quant))


def works() -> Iterator[Work]:
    for op in ("rms_norm", "add_rms_norm"):
        for quant in QUANTS:
            name = op + quant
            libraries = {"inductor": inductor(name)}
            for hidden in sorted({model.hidden for model in MODELS}):
                for rows in TOKENS:
                    label = f"{rows} x {hidden}"
                    made = partial(make, op == "add_rms_norm", rows, hidden, quant)
                    yield Work(name, label, made, libraries=libraries)


@pytest.mark.parametrize(("work", "contender"), cases(works()))
def test_norm(benchmark: BenchmarkFixture, work: Work, contender: str) -> None:
    measure(benchmark, work, contender)
