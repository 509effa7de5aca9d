"""Times of ``linear`` at few rows: the chain of all products of a Llama-3-8B token, each shape.

``python -m fusewright.bench.ops.bench_linear [--json FILE]``.  Every product of a round has its own
weight: 15 GB, so that all come from memory and none from L2.  "skinny" is what a program calls, its
choice between the streaming kernel and cuBLAS included; "native" is cuBLAS.
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
from ...ops import BY_NAME
from ..environment import environment

OP = BY_NAME["linear"]
COPY_TB_S = 4.28  # device-to-device copy, bytes read and written (bench/NOTES.md)
LAYERS = 32
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
LM_HEAD = (128256, 4096)
ROWS = (1, 2, 4, 8, 16, 32, 64)
ROUNDS = 20

Weights = dict[str, list[Tensor]]


def make_weights() -> Weights:
    """Random, scaled so that a chain neither grows nor dies."""

    def draw(shape: tuple[int, int]) -> Tensor:
        bound = (3 / shape[1]) ** 0.5
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda").uniform_(-bound, bound)

    weights = {name: [draw(shape) for _ in range(LAYERS)] for name, shape in SHAPES.items()}
    return {**weights, "lm_head": [draw(LM_HEAD)]}


def chain(run: Callable[..., Tensor], weights: Weights, x: Tensor) -> Tensor:
    """All products in their order, each on the result of the one before it."""
    for qkv, o, gate_up, down in zip(*(weights[name] for name in SHAPES), strict=True):
        x = run(run(x, qkv, None)[:, : o.shape[1]], o, None)
        x = run(run(x, gate_up, None)[:, : down.shape[1]], down, None)
    return run(x, weights["lm_head"][0], None)


def moved(rows: int, weights: list[Tensor]) -> int:
    """Bytes by the op's own cost."""
    x = torch.empty(1, dtype=torch.bfloat16, device="meta")
    args = ((x.expand(rows, w.shape[1]), w, None) for w in weights)
    return sum(int(OP.cost(OP.describe(a)).bytes) for a in args)


def measure(rows: int, weights: Weights) -> Iterator[dict[str, Any]]:
    """One figure a work and implementation: us a call (of the chain: a token), rate, share."""
    every = [weight for group in weights.values() for weight in group]
    works: dict[str, list[Tensor]] = {"chain": every, **weights}
    for work, group in works.items():
        calls = 1 if work == "chain" else len(group)
        x = torch.randn(rows, group[0].shape[1], device="cuda").bfloat16()
        for name in ("native", "skinny"):
            run = OP.overload(name)

            def call(
                run: Callable[..., Tensor] = run, x: Tensor = x, group: list[Tensor] = group
            ) -> None:
                if group is every:
                    chain(run, weights, x)
                else:
                    for weight in group:
                        run(x, weight, None)

            us = graph_us([call], calls=1, rounds=ROUNDS)
            tb_s = moved(rows, group) / us / 1e6
            yield {
                "rows": rows,
                "work": work,
                "implementation": name,
                "us": round(us / calls, 2),
                "tb_s": round(tb_s, 3),
                "share_of_copy": round(tb_s / COPY_TB_S, 3),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    torch.manual_seed(0)
    weights = make_weights()
    sample = (weights["o"][0][:1], weights["o"][0], None)
    major, minor = torch.cuda.get_device_capability()
    reason = OP.implementation("skinny").supports(OP.describe(sample, sm=10 * major + minor))
    if reason:
        raise SystemExit(f"bench_linear: the streaming kernel does not run here: {reason}")
    figures: list[dict[str, Any]] = []
    with torch.inference_mode():
        for rows in ROWS:
            for figure in measure(rows, weights):
                figures.append(figure)
                print(*figure.values(), flush=True)
    if options.json:
        report = {**environment(), "rounds": ROUNDS, "figures": figures}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
