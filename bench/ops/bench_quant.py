"""Times of the ops that quantize to FP8, each beside Inductor's fusion of its own definition.

``python -m fusewright.bench.ops.bench_quant [--json FILE] [--rows N ...]``.  A figure is the median
time of a call in a replayed graph of 20.  Calls take turns over inputs that together exceed the L2
cache, and each has outputs of its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...compiler.tune import graph_us
from ...ops import BY_NAME, SemanticOp
from ..environment import environment

COPY_TB_S = 4.28  # device-to-device copy, bytes read and written (bench/NOTES.md)
HIDDEN, INTERMEDIATE = 4096, 14336  # Llama-3-8B
OPS = ("rms_norm_quant", "add_rms_norm_quant", "silu_mul_quant", "gelu_tanh_mul_quant", "quant_fp8")
SCHEMES: tuple[Any, ...] = ("static", 0, 128)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
CALLS, ROUNDS = 20, 15
_ROTATED_BYTES = 250 << 20


def make_args(name: str, rows: int, scheme: Any) -> tuple[Any, ...]:
    """Arguments of ``name`` at the widths of Llama-3-8B; scheme: static, or a group size."""

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    how = torch.full((1, 1), 0.03, device="cuda") if scheme == "static" else scheme
    if "mul" in name:
        return randn(rows, 2 * INTERMEDIATE), how
    x = randn(rows, HIDDEN)
    if name == "quant_fp8":
        return x, how
    return (x, *([randn(rows, HIDDEN)] if "add" in name else []), randn(HIDDEN), 1e-5, how)


def in_graph(run: Callable[..., Any], sets: list[tuple[Any, ...]]) -> float:
    """Microseconds of a call; its results live as long as the graph, so no two share memory."""
    held: list[Any] = []

    def call(args: tuple[Any, ...]) -> Callable[[], None]:
        return lambda: held.append(run(*args))

    return graph_us([call(args) for args in sets], calls=CALLS, rounds=ROUNDS)


def measure(op: SemanticOp, name: str, rows: int, scheme: Any) -> dict[str, Any]:
    first = make_args(name, rows, scheme)
    nbytes = int(op.cost(op.describe(first)).bytes)
    copies = max(2, min(CALLS, 1 + _ROTATED_BYTES // nbytes))
    sets = [first, *(make_args(name, rows, scheme) for _ in range(copies - 1))]
    torch._dynamo.reset()
    inductor: Callable[..., Any] = torch.compile(op.reference, dynamic=False)
    times = {
        "triton": in_graph(op.overload("triton"), sets),
        "inductor": in_graph(inductor, sets),
    }
    tb_s = nbytes / times["triton"] / 1e6
    return {
        "op": op.name,
        "scheme": scheme,
        "rows": rows,
        "bytes": nbytes,
        "us": round(times["triton"], 2),
        "inductor_us": round(times["inductor"], 2),
        "tb_s": round(tb_s, 3),
        "share_of_copy": round(tb_s / COPY_TB_S, 3),
    }


def figures(rows: list[int]) -> Iterator[dict[str, Any]]:
    for name in OPS:
        for scheme in SCHEMES:
            op = BY_NAME[f"{name}_static" if scheme == "static" else f"{name}_dynamic"]
            for count in rows:
                yield measure(op, name, count, scheme)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--rows", type=int, nargs="+", default=[*ROWS])
    options = parser.parse_args()
    torch.manual_seed(0)
    found = []
    with torch.inference_mode():
        for figure in figures(options.rows):
            found.append(figure)
            print(*figure.values(), flush=True)
    if options.json:
        report = {**environment(), "calls": CALLS, "rounds": ROUNDS, "figures": found}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
