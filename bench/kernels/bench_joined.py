"""Linears with what follows them in one op against Inductor: cuBLAS, or its own GEMM of few rows,
and one kernel for the rest.  Gated layers, at the sizes of prefill too, also against the fastest of
cuBLASLt and of CUTLASS with our activation behind it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .fusion import against_inductor
from .gemm_rivals import RIVALS
from .harness import MODELS, TOKENS, KernelWork, Model, benchmark_of, randn

ROWS = [rows for rows in TOKENS if rows <= 256]
GATED_ROWS = sorted({*TOKENS, 17, 512, 8192})
DENSE = [model for model in MODELS if model.intermediate > model.hidden]


def weight(out_features: int, in_features: int, device: torch.device) -> Tensor:
    values: Tensor = randn(out_features, in_features, device=device) * in_features**-0.5
    return values


def make_gated(model: Model, rows: int, device: torch.device) -> tuple[Any, ...]:
    x = randn(rows, model.hidden, device=device)
    gate_up = weight(2 * model.intermediate, model.hidden, device)
    return x, gate_up, None, None, None, None, "silu", None


def make_pair(
    model: Model, rows: int, device: torch.device, *, first: str, then: str, activation: str = ""
) -> tuple[Any, ...]:
    """Two layers with the add and the norm between them, by the names of their sizes."""
    sizes = {"o": model.heads * model.head_dim, "down": model.intermediate}
    width, behind = sizes[first], {"gate_up": 2 * model.intermediate, "qkv": model.qkv}[then]
    weights = [weight(model.hidden, width, device), randn(model.hidden, device=device)]
    weights.append(weight(behind, model.hidden, device))
    gate = f", activation={activation!r}" if activation else ""
    text = f"linear(weight) > add_norm(weight, eps=1e-05) > linear(weight{gate})"
    x, residual = (randn(rows, size, device=device) for size in (width, model.hidden))
    return x, residual, weights, text


O_TO_MLP = partial(make_pair, first="o", then="gate_up", activation="silu")
DOWN_TO_QKV = partial(make_pair, first="down", then="qkv")
KINDS = (
    ("linear", "gate_up with SiLU-mul", make_gated, DENSE, (0,)),
    ("chain", "o to gate_up", O_TO_MLP, DENSE, (0, 1)),
    ("chain", "down to qkv", DOWN_TO_QKV, DENSE, (0, 1)),
)


def works() -> Iterator[KernelWork]:
    for op, name, make, models, counted in KINDS:
        for model in models:
            make_rows = partial(make, model)
            gated = op == "linear"
            for rows in GATED_ROWS if gated else ROWS:
                shape = f"{model.name} {name}"
                label = f"{shape}, {rows} rows"
                work = against_inductor(op, label, make_rows, shape, rows, counted)
                rivals = {**work.libraries, **(RIVALS if gated else {})}
                yield replace(work, libraries=rivals)


test_joined = benchmark_of(works())
