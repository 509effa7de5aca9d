"""``linear`` in bfloat16 and FP8 at each layer of each model, against cuBLAS."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...ops import BY_NAME
from ...ops.launches.quant import GROUP
from .harness import MODELS, TOKENS, KernelWork, Model, benchmark_of, randn

LIBRARY = {"": "native", "FP8": "scaled_mm"}


def linears(model: Model) -> dict[str, tuple[int, int]]:
    """(out_features, in_features) by name; of a MoE the parts that every token passes."""
    shapes = {"qkv": (model.qkv, model.hidden), "o": (model.hidden, model.heads * model.head_dim)}
    if model.intermediate > model.hidden:
        shapes["gate_up"] = (2 * model.intermediate, model.hidden)
        shapes["down"] = (model.hidden, model.intermediate)
    return shapes


def distinct() -> dict[tuple[int, int], str]:
    """Every distinct linear, under the name of the first model that has it."""
    named: dict[tuple[int, int], str] = {}
    for model in MODELS:
        for name, shape in linears(model).items():
            named.setdefault(shape, f"{model.name} {name}")
    return named


def make(rows: int, n: int, k: int, device: torch.device) -> tuple[Any, ...]:
    return randn(rows, k, device=device), randn(n, k, device=device) * k**-0.5, None


def make_fp8(scheme: str, rows: int, n: int, k: int, device: torch.device) -> tuple[Any, ...]:
    def values(*shape: int) -> Tensor:
        return randn(*shape, device=device).to(torch.float8_e4m3fn)

    def scales(*shape: int) -> Tensor:
        return torch.rand(shape, device=device) + 0.5

    x_scale, weight_scale = {
        "static": lambda: (scales(1, 1), scales(1, 1)),
        "token": lambda: (scales(rows, 1), scales(n, 1)),
        "block": lambda: (scales(k // GROUP, rows).t(), scales(-(-n // GROUP), -(-k // GROUP))),
    }[scheme]()
    return values(rows, k), values(n, k), None, x_scale, weight_scale, torch.bfloat16


def works() -> Iterator[KernelWork]:
    cublas = {kind: {"cublas": BY_NAME["linear"].overload(name)} for kind, name in LIBRARY.items()}
    for (n, k), name in distinct().items():
        for rows in TOKENS:
            label = f"{name}, {rows} rows"
            yield KernelWork("linear", label, partial(make, rows, n, k), {}, cublas[""])
            for scheme in ("static", "token", "block"):
                make_args = partial(make_fp8, scheme, rows, n, k)
                yield KernelWork("linear", f"{label}, FP8 {scheme}", make_args, {}, cublas["FP8"])


test_linear = benchmark_of(works())
