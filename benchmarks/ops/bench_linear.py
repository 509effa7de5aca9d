"""Times of linear layers at few rows: the chain of all of a Llama-3-8B token, each shape.

``python -m fusewright.benchmarks.ops.bench_linear [--output F] [--rows N ...] [--formats F ...]``.
Formats: bfloat16, and FP8 with scales by tensor, token and block; of these chains one has lm_head
in FP8 too, one in bfloat16.  Every linear of a round has its own weight, 15 GB and 7.5 GB, so that
all come from memory and none from L2.  "skinny" is what a program calls, its choice between the
streaming kernel and the library included; "native" is cuBLAS and cuBLASLt, where there is a gated
activation with its kernel behind.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...bench.environment import environment
from ...bench.kernels.figures import COPY_TB_S
from ...compiler.lowering.search import graph_us
from ...ops import BY_NAME
from ...ops.core.device_table import gpu_of

LAYERS = 32
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
LM_HEAD = (128256, 4096)
ROWS = (1, 2, 4, 8, 16, 32, 64)
FORMATS = ("bf16", "tensor", "token", "block")
IMPLEMENTATIONS = ("native", "skinny")
ROUNDS = 20

Weights = dict[str, list[Tensor]]
LINEAR = BY_NAME["linear"]
Call = tuple[Any, ...]
"""Arguments of ``linear``."""


def make_weights() -> Weights:
    """Random, scaled so that a chain neither grows nor dies."""

    def draw(shape: tuple[int, int]) -> Tensor:
        bound = (3 / shape[1]) ** 0.5
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda").uniform_(-bound, bound)

    weights = {name: [draw(shape) for _ in range(LAYERS)] for name, shape in SHAPES.items()}
    return {**weights, "lm_head": [draw(LM_HEAD)]}


def quantized(weights: Weights) -> Weights:
    """The weights in FP8, scaled so that they use its range."""
    return {
        name: [(w * (100 * w.shape[1] ** 0.5)).to(torch.float8_e4m3fn) for w in group]
        for name, group in weights.items()
    }


def fp8_call(rows: int, weight: Tensor, scheme: str) -> Call:
    n, k = weight.shape

    def scales(count: int, columns: int) -> Tensor:
        return 1e-3 * (0.5 + torch.rand(count, columns, device="cuda"))

    x_scale, weight_scale = {
        "tensor": (scales(1, 1), scales(1, 1)),
        "token": (scales(rows, 1), scales(n, 1)),
        "block": (scales(k // 128, rows).t(), scales(-(-n // 128), k // 128)),
    }[scheme]
    x = torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn)
    return (x, weight, None, x_scale, weight_scale, torch.bfloat16)


def bf16_call(rows: int, weight: Tensor) -> Call:
    x = torch.randn(rows, weight.shape[1], device="cuda").bfloat16()
    return (x, weight, None)


def in_order(groups: dict[str, list[Call]], lm_head: list[Call]) -> list[Call]:
    """The calls of a token, layer by layer, and the last."""
    layers = zip(*(groups[name] for name in SHAPES), strict=True)
    return [call for layer in layers for call in layer] + lm_head


def chain(weights: Weights, x: Tensor, run: Callable[..., Tensor]) -> None:
    """All bfloat16 linears in their order, each on the result of the one before it."""
    for qkv, o, gate_up, down in zip(*(weights[name] for name in SHAPES), strict=True):
        x = run(run(x, qkv, None)[:, : o.shape[1]], o, None)
        x = run(run(x, gate_up, None)[:, : down.shape[1]], down, None)
    run(x, weights["lm_head"][0], None)


def works(
    rows: int, weights: Weights, fp8: Weights, formats: Sequence[str]
) -> Iterator[tuple[str, str, list[Call]]]:
    """Format, name and calls of what is measured."""
    bf16 = {name: [bf16_call(rows, w) for w in group] for name, group in weights.items()}
    if "bf16" in formats:
        yield "bf16", "chain", in_order(bf16, bf16["lm_head"])
        yield from (("bf16", name, calls) for name, calls in bf16.items())
        yield "bf16", "gated", [(*call, None, None, None, "silu") for call in bf16["gate_up"]]
    for scheme in formats:
        if scheme == "bf16":
            continue
        calls = {name: [fp8_call(rows, w, scheme) for w in group] for name, group in fp8.items()}
        yield scheme, "chain", in_order(calls, calls["lm_head"])
        yield scheme, "chain, lm_head bf16", in_order(calls, bf16["lm_head"])
        yield from ((scheme, name, group) for name, group in calls.items())


def library(call: Call) -> str:
    """The implementation that is the library's GEMM, with the activation's kernel behind it."""
    return "scaled_mm" if len(call) == 6 else "library" if len(call) > 6 else "native"


def measure(
    rows: int, weights: Weights, fp8: Weights, formats: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """One figure a work and implementation: us a call (of a chain: a token), rate, share."""
    for fmt, work, calls in works(rows, weights, fp8, formats):
        nbytes = sum(int(LINEAR.cost(LINEAR.describe(call)).bytes) for call in calls)
        count = 1 if work.startswith("chain") else len(calls)
        for name in IMPLEMENTATIONS:
            runs = [
                partial(LINEAR.overload(library(call) if name == "native" else name), *call)
                for call in calls
            ]

            def call(runs: Sequence[Callable[[], Any]] = runs) -> None:
                for run in runs:
                    run()

            timed: Callable[[], None] = call
            if (fmt, work) == ("bf16", "chain"):
                timed = partial(chain, weights, calls[0][0], LINEAR.overload(name))
            us = graph_us([timed], calls=1, rounds=ROUNDS)
            yield {
                "rows": rows,
                "format": fmt,
                "work": work,
                "implementation": name,
                "us": round(us / count, 2),
                "tb_s": round(nbytes / us / 1e6, 3),
                "share_of_copy": round(nbytes / us / 1e6 / COPY_TB_S, 3),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--output", type=Path, help="write the figures there")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS)
    options = parser.parse_args()
    torch.manual_seed(0)
    args = bf16_call(1, torch.zeros(4096, 4096, dtype=torch.bfloat16, device="cuda"))
    desc = LINEAR.describe(args, sm=gpu_of(torch.device("cuda"))[1])
    if reason := LINEAR.implementation("skinny").supports(desc):
        raise SystemExit(f"bench_linear: the streaming kernel does not run here: {reason}")
    weights = make_weights()
    fp8 = quantized(weights)
    figures: list[dict[str, Any]] = []
    with torch.inference_mode():
        for rows in options.rows:
            for figure in measure(rows, weights, fp8, options.formats):
                figures.append(figure)
                print(*figure.values(), flush=True)
    if options.output:
        report = {"environment": environment(), "rounds": ROUNDS, "figures": figures}
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
