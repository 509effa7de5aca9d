"""FP8 quantization by itself, as before the linear after attention, against Inductor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from ...ops.norm.quantize import QUANTIZE
from .fusion import InductorFusion
from .harness import MODELS, QUANTS, TOKENS, KernelWork, cases, measure, quant_argument, randn


def make(columns: int, scheme: str, rows: int, device: torch.device) -> tuple[Any, ...]:
    return randn(rows, columns, device=device), *quant_argument(scheme, device)


def works() -> Iterator[KernelWork]:
    for scheme in [scheme for scheme in QUANTS if scheme]:
        name = QUANTIZE[QUANTS[scheme]].name
        for columns in sorted({model.heads * model.head_dim for model in MODELS}):
            make_rows = partial(make, columns, scheme)
            for rows in TOKENS:
                rival = InductorFusion(name, f"{columns} {scheme}", rows, make_rows)
                label = f"{rows} x {columns}, {scheme}"
                yield KernelWork(name, label, partial(make_rows, rows), {}, {"inductor": rival})


@pytest.mark.parametrize(("work", "contender"), cases(works()))
def test_quantize(benchmark: BenchmarkFixture, work: KernelWork, contender: str) -> None:
    measure(benchmark, work, contender)
