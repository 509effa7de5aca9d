"""``silu_mul``, with and without FP8 quantization, against Inductor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from ...ops.norm.gated_act import GATED_ACTS
from .fusion import InductorFusion
from .harness import MODELS, QUANTS, TOKENS, KernelWork, cases, measure, quant_argument, randn


def make(intermediate: int, scheme: str, rows: int, device: torch.device) -> tuple[Any, ...]:
    return randn(rows, 2 * intermediate, device=device), *quant_argument(scheme, device)


def works() -> Iterator[KernelWork]:
    for scheme, quant in QUANTS.items():
        name = GATED_ACTS["silu", quant].name
        for intermediate in sorted({model.intermediate for model in MODELS}):
            make_rows = partial(make, intermediate, scheme)
            for rows in TOKENS:
                label = f"{rows} x {intermediate}" + f", {scheme}" * bool(scheme)
                rival = InductorFusion(name, f"{intermediate} {scheme}", rows, make_rows)
                yield KernelWork(name, label, partial(make_rows, rows), {}, {"inductor": rival})


@pytest.mark.parametrize(("work", "contender"), cases(works()))
def test_activation(benchmark: BenchmarkFixture, work: KernelWork, contender: str) -> None:
    measure(benchmark, work, contender)
