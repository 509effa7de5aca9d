"""``rope_kv_store``: [QK-norm +] rotary embedding + KV store, against Inductor's fusion."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from .fusion import against_inductor
from .harness import MODELS, TOKENS, KernelWork, Model, benchmark_of, randn

BLOCK_SIZE, POSITIONS = 16, 8192
BLOCKS = -(-max(TOKENS) // BLOCK_SIZE)


def make(model: Model, rows: int, device: torch.device) -> tuple[Any, ...]:
    heads, kv_heads, dim = model.heads, model.kv_heads, model.head_dim
    qkv = randn(rows, heads + 2 * kv_heads, dim, device=device)
    angles = torch.rand(POSITIONS, dim // 2, device=device)
    weights = (randn(dim, device=device), randn(dim, device=device))
    return (
        torch.randint(POSITIONS, (rows,), device=device, dtype=torch.int32),
        *qkv.split([heads, kv_heads, kv_heads], dim=1),
        torch.cat((angles.cos(), angles.sin()), dim=-1),
        randn(BLOCKS, 2, BLOCK_SIZE, kv_heads, dim, device=device),
        torch.randperm(BLOCKS * BLOCK_SIZE, device=device)[:rows].int(),
        *(weights if model.qk_norm else (None, None)),
        1e-6 if model.qk_norm else 0.0,
    )


def works() -> Iterator[KernelWork]:
    for model in MODELS:
        make_rows = partial(make, model)
        for rows in TOKENS:
            # Positions, q, k, v and slots have a row a token.
            counted, label = (0, 1, 2, 3, 6), f"{model.name}, {rows} tokens"
            yield against_inductor("rope_kv_store", label, make_rows, model.name, rows, counted)


test_rope_kv_store = benchmark_of(works())
