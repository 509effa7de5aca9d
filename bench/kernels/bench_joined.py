"""Linears with what follows them in one op, at the sizes of decoding, against Inductor: cuBLAS, or
its own GEMM of few rows, and one kernel for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .fusion import against_inductor
from .harness import MODELS, TOKENS, KernelWork, Model, benchmark_of, randn

ROWS = [rows for rows in TOKENS if rows <= 256]
EPS = 1e-5
DENSE = [model for model in MODELS if model.intermediate > model.hidden]


def weight(out_features: int, in_features: int, device: torch.device) -> Tensor:
    values: Tensor = randn(out_features, in_features, device=device) * in_features**-0.5
    return values


def make_gated(model: Model, rows: int, device: torch.device) -> tuple[Any, ...]:
    x = randn(rows, model.hidden, device=device)
    gate_up = weight(2 * model.intermediate, model.hidden, device)
    return x, gate_up, None, None, None, None, "silu", None


def make_o_to_mlp(model: Model, rows: int, device: torch.device) -> tuple[Any, ...]:
    width = model.heads * model.head_dim
    return (
        randn(rows, width, device=device),
        weight(model.hidden, width, device),
        None,
        randn(rows, model.hidden, device=device),
        randn(model.hidden, device=device),
        EPS,
        weight(2 * model.intermediate, model.hidden, device),
        None,
        "silu",
    )


def make_down_to_qkv(model: Model, rows: int, device: torch.device) -> tuple[Any, ...]:
    return (
        randn(rows, model.intermediate, device=device),
        weight(model.hidden, model.intermediate, device),
        None,
        randn(rows, model.hidden, device=device),
        randn(model.hidden, device=device),
        EPS,
        weight(model.qkv, model.hidden, device),
        None,
        None,
    )


KINDS = (
    ("linear", "gate_up with SiLU-mul", make_gated, DENSE, (0,)),
    ("linear_add_norm_linear", "o to gate_up", make_o_to_mlp, DENSE, (0, 3)),
    ("linear_add_norm_linear", "down to qkv", make_down_to_qkv, DENSE, (0, 3)),
)


def works() -> Iterator[KernelWork]:
    for op, name, make, models, counted in KINDS:
        for model in models:
            make_rows = partial(make, model)
            for rows in ROWS:
                shape = f"{model.name} {name}"
                yield against_inductor(op, f"{shape}, {rows} rows", make_rows, shape, rows, counted)


test_joined = benchmark_of(works())
