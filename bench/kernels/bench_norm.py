"""``rms_norm`` and ``add_rms_norm``, with and without FP8 quantization, against Inductor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from ...ops.norm.norm import NORMS, Norm
from .fusion import InductorFusion
from .harness import MODELS, QUANTS, TOKENS, KernelWork, cases, measure, quant_argument, randn

EPS = 1e-5


def make(adds: bool, hidden: int, scheme: str, rows: int, device: torch.device) -> tuple[Any, ...]:
    tensors = [randn(rows, hidden, device=device) for _ in range(1 + adds)]
    weight = randn(hidden, device=device)
    return (*tensors, weight, EPS, *quant_argument(scheme, device))


def works() -> Iterator[KernelWork]:
    for adds in (False, True):
        for scheme, quant in QUANTS.items():
            op = NORMS[Norm(add=adds, quant=quant)].name
            for hidden in sorted({model.hidden for model in MODELS}):
                make_rows = partial(make, adds, hidden, scheme)
                for rows in TOKENS:
                    label = f"{rows} x {hidden}" + f", {scheme}" * bool(scheme)
                    counted = (0, 1) if adds else (0,)
                    rival = InductorFusion(op, f"{hidden} {scheme}", rows, make_rows, counted)
                    yield KernelWork(op, label, partial(make_rows, rows), {}, {"inductor": rival})


@pytest.mark.parametrize(("work", "contender"), cases(works()))
def test_norm(benchmark: BenchmarkFixture, work: KernelWork, contender: str) -> None:
    measure(benchmark, work, contender)
