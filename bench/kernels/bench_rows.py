"""Norms, gated activations and quantization, which read and write rows, against Inductor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ...ops.norm.gated_act import GATED_ACTS
from ...ops.norm.norm import NORMS, Norm
from ...ops.norm.quantize import QUANTIZE
from .fusion import against_inductor
from .harness import MODELS, QUANTS, TOKENS, KernelWork, benchmark_of, quant_argument, randn

EPS = 1e-5


def make(adds: bool, hidden: int, scheme: str, rows: int, device: torch.device) -> tuple[Any, ...]:
    tensors = [randn(rows, hidden, device=device) for _ in range(1 + adds)]
    weight = randn(hidden, device=device)
    return (*tensors, weight, EPS, *quant_argument(scheme, device))


def make_one(columns: int, scheme: str, rows: int, device: torch.device) -> tuple[Any, ...]:
    """The arguments of an op of one tensor."""
    return randn(rows, columns, device=device), *quant_argument(scheme, device)


def norms() -> Iterator[KernelWork]:
    """``rms_norm`` and ``add_rms_norm``, with and without FP8 quantization."""
    for adds in (False, True):
        for scheme, quant in QUANTS.items():
            op = NORMS[Norm(add=adds, quant=quant)].name
            for hidden in sorted({model.hidden for model in MODELS}):
                make_rows = partial(make, adds, hidden, scheme)
                yield from _works(op, hidden, scheme, make_rows, (0, 1) if adds else (0,))


def activations() -> Iterator[KernelWork]:
    """``silu_mul``, with and without FP8 quantization."""
    for scheme, quant in QUANTS.items():
        for size in sorted({model.intermediate for model in MODELS}):
            make_rows = partial(make_one, 2 * size, scheme)
            yield from _works(GATED_ACTS["silu", quant].name, size, scheme, make_rows)


def quantizations() -> Iterator[KernelWork]:
    """FP8 quantization by itself, as before the linear after attention."""
    for scheme in filter(None, QUANTS):
        for columns in sorted({model.heads * model.head_dim for model in MODELS}):
            make_rows = partial(make_one, columns, scheme)
            yield from _works(QUANTIZE[QUANTS[scheme]].name, columns, scheme, make_rows)


def _works(
    op: str, size: int, scheme: str, make_rows: Any, counted: tuple[int, ...] = (0,)
) -> Iterator[KernelWork]:
    for rows in TOKENS:
        label = f"{rows} x {size}" + f", {scheme}" * bool(scheme)
        yield against_inductor(op, label, make_rows, f"{size} {scheme}", rows, counted)


def works() -> Iterator[KernelWork]:
    yield from norms()
    yield from activations()
    yield from quantizations()


test_rows = benchmark_of(works())
