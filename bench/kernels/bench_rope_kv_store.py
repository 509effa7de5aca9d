"""``rope_kv_store``: [QK-norm +] rotary embedding + KV store, against Inductor's fusion."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from .harness import MODELS, TOKENS, Model, Work, cases, inductor, measure, randn

PAGE, POSITIONS = 16, 8192


def make(model: Model, rows: int) -> tuple[Any, ...]:
    heads, kv_heads, dim = model.heads, model.kv_heads, model.head_dim
    q, k, v = randn(rows, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], dim=1)
    blocks = -(-rows // PAGE) + 1
    angles = torch.rand(POSITIONS, dim // 2, device="cuda")
    weights = (randn(dim), randn(dim)) if model.qk_norm else (None, None)
    return (
        torch.randint(POSITIONS, (rows,), device="cuda", dtype=torch.int32),
        q,
        k,
        v,
        torch.cat((angles.cos(), angles.sin()), dim=-1),
        randn(blocks, 2, PAGE, kv_heads, dim),
        torch.randperm(blocks * PAGE, device="cuda")[:rows].int(),
        *weights,
        1e-6 if model.qk_norm else 0.0,
    )


def works() -> Iterator[Work]:
    libraries = {"inductor": inductor("rope_kv_store")}
    for model in MODELS:
        for rows in TOKENS:
            label = f"{model.name}, {rows} tokens"
            yield Work("rope_kv_store", label, partial(make, model, rows), libraries=libraries)


@pytest.mark.parametrize(("work", "contender"), cases(works()))
def test_rope_kv_store(benchmark: BenchmarkFixture, work: Work, contender: str) -> None:
    measure(benchmark, work, contender)
