"""Times of ``linear_fp8`` over the products of Llama-3-8B: schemes, implementations, bf16 cuBLAS.

``python -m fusewright.bench.ops.bench_linear_fp8 [--json FILE] [--rows N ...]``.  A figure is the
median time of a call in a replayed graph; calls take turns over weights that together exceed the L2
cache.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compiler.tune import graph_us
from ...ops import BY_NAME
from ..environment import environment

OP = BY_NAME["linear_fp8"]
COPY_TB_S = 4.28  # device-to-device copy, bytes read and written (bench/NOTES.md)
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
SCHEMES = ("tensor", "token", "block")
ROWS = (1, 16, 64, 256, 1024, 4096)
CALLS, ROUNDS = 20, 9
_ROTATED_BYTES = 250 << 20


def make_args(rows: int, shape: tuple[int, int], scheme: str) -> tuple[Any, ...]:
    n, k = shape

    def values(count: int) -> Tensor:
        return torch.randn(count, k, device="cuda").to(torch.float8_e4m3fn)

    def scales(count: int, columns: int) -> Tensor:
        return 0.5 + torch.rand(count, columns, device="cuda")

    x_scale, weight_scale = {
        "tensor": (scales(1, 1), scales(1, 1)),
        "token": (scales(rows, 1), scales(n, 1)),
        "block": (scales(k // 128, rows).t(), scales(n // 128, k // 128)),
    }[scheme]
    return values(rows), x_scale, values(n), weight_scale, None, torch.bfloat16


def copies_of(nbytes: int) -> int:
    return max(2, min(CALLS, 1 + _ROTATED_BYTES // nbytes))


def measure(name: str, rows: int) -> Iterator[dict[str, Any]]:
    """Each scheme by each implementation that takes it, and the same product in bfloat16."""
    shape = SHAPES[name]
    n, k = shape
    major, minor = torch.cuda.get_device_capability()
    for scheme in SCHEMES:
        sets = [make_args(rows, shape, scheme) for _ in range(copies_of(n * k))]
        cost = OP.cost(OP.describe(sets[0]))
        for impl in OP.implementations:
            if impl.supports(OP.describe(sets[0], sm=10 * major + minor)):
                continue
            run = OP.overload(impl.name)
            us = graph_us([partial(run, *args) for args in sets], calls=CALLS, rounds=ROUNDS)
            yield figure(name, rows, f"fp8 {scheme}", impl.name, us, int(cost.bytes), cost.flops)
        del sets
    made = [
        (torch.randn(rows, k).cuda().bfloat16(), torch.randn(n, k, device="cuda").bfloat16())
        for _ in range(copies_of(2 * n * k))
    ]
    us = graph_us([partial(F.linear, *pair) for pair in made], calls=CALLS, rounds=ROUNDS)
    nbytes = 2 * (rows * k + n * k + rows * n)
    yield figure(name, rows, "bf16", "cublas", us, nbytes, 2 * rows * n * k)


def figure(
    shape: str, rows: int, scheme: str, implementation: str, us: float, nbytes: int, flops: int
) -> dict[str, Any]:
    tb_s = nbytes / us / 1e6
    return {
        "shape": shape,
        "rows": rows,
        "scheme": scheme,
        "implementation": implementation,
        "us": round(us, 2),
        "tb_s": round(tb_s, 3),
        "share_of_copy": round(tb_s / COPY_TB_S, 3),
        "tflop_s": round(flops / us / 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--rows", type=int, nargs="+", default=[*ROWS])
    options = parser.parse_args()
    torch.manual_seed(0)
    found = []
    with torch.inference_mode():
        for name in SHAPES:
            for rows in options.rows:
                for entry in measure(name, rows):
                    found.append(entry)
                    print(*entry.values(), flush=True)
    if options.json:
        report = {**environment(), "calls": CALLS, "rounds": ROUNDS, "figures": found}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
