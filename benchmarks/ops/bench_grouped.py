"""Compares builds of csrc's grouped GEMM, CUTLASS beside them, on the experts of a prefill.

``python -m fusewright.benchmarks.ops.bench_grouped --library NAME=PATH [--library ...]``
runs each library in a process of its own, in the order given; name one twice to see the drift of
the machine.  Every result is compared with torch's before it is timed, and two libraries whose
results differ in a bit are named at the end.  CUTLASS is torch's grouped GEMM, which multiplies
rows that were gathered before and applies no activation.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Timer
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compiler.lowering.search import graph_us
from ...ops import BY_NAME
from ...ops.core import cuda as _cuda
from ...ops.launches.experts import combine, sort_by_expert

TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
_CALLS, _ROUNDS = 6, 7
_MOST_ERROR = 6e-3


@dataclass(frozen=True)
class Shape:
    """The experts of a layer, or a rank's share of them."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
    "mixtral-8x7b": Shape(4096, 14336, 8, 2),
}
Row = dict[str, Any]


def draw_ids(shape: Shape, tokens: int, routing: str) -> Tensor:
    """Choices that differ within a token; "power": expert e in proportion to 1 / (e + 1)."""
    chances = torch.ones(shape.experts, device="cuda")
    if routing == "power":
        chances /= torch.arange(1, shape.experts + 1, device="cuda")
    return torch.multinomial(chances.expand(tokens, -1), shape.top_k).to(torch.int32)


@dataclass
class Layer:
    """One layer's tensors for a number of tokens; ``rows`` are its input sorted by expert."""

    shape: Shape
    x: Tensor
    router: Tensor
    gate_up: Tensor
    down: Tensor
    ids: Tensor
    order: Tensor
    offsets: Tensor
    rows: Tensor

    @property
    def flops(self) -> dict[str, float]:
        s = self.shape
        one = 2.0 * self.ids.numel() * s.hidden * s.intermediate
        return {"gate_up": 2 * one, "down": one, "block": 3 * one}


def make_weights(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Router, gate and up, down."""

    def draw(*sizes: int) -> Tensor:
        bound = (3 / sizes[-1]) ** 0.5
        return torch.empty(sizes, dtype=torch.bfloat16, device="cuda").uniform_(-bound, bound)

    s = shape
    return (
        draw(s.experts, s.hidden),
        draw(s.experts, 2 * s.intermediate, s.hidden),
        draw(s.experts, s.hidden, s.intermediate),
    )


def make_layer(
    shape: Shape, weights: tuple[Tensor, Tensor, Tensor], tokens: int, routing: str
) -> Layer:
    x = torch.randn(tokens, shape.hidden, device="cuda").bfloat16()
    ids = draw_ids(shape, tokens, routing)
    launches, (order, offsets) = sort_by_expert(ids, shape.experts)
    for launch in launches:
        launch.run()
    flat = ids.flatten().long()
    if not torch.equal(order.long(), flat.argsort(stable=True)):
        raise SystemExit(f"{tokens} tokens: the sort is wrong")
    return Layer(shape, x, *weights, ids, order, offsets, x[order.long() // shape.top_k])


def reference(rows: Tensor, weight: Tensor, offsets: Sequence[int], gated: bool) -> Tensor:
    """torch's products of sorted rows, one expert after the other."""
    parts = []
    for expert, (start, end) in enumerate(pairwise(offsets)):
        y = rows[start:end] @ weight[expert].T
        if gated:
            gate, up = y.float().chunk(2, -1)
            y = (F.silu(gate) * up).bfloat16()
        parts.append(y)
    return torch.cat(parts)


def check(work: str, y: Tensor, expected: Tensor) -> int:
    """A sum over all bits of a result that is right; ends the process otherwise."""
    error = float((y.float() - expected.float()).norm() / expected.float().norm())
    if not error < _MOST_ERROR:
        raise SystemExit(f"{work}: relative error {error:.2e}, expected less than {_MOST_ERROR}")
    numbers = y.view(torch.int16).flatten().long()
    places = torch.arange(numbers.numel(), device=y.device) % 8191
    return int((numbers * (places + 1)).sum())


def works(layer: Layer, beside: bool) -> Iterator[tuple[str, Callable[[], Any], int | None]]:
    """Name, call and bits of what is measured; ``beside``: what no library of ours changes too."""
    multiply = torch.ops.fw_cuda.moe_grouped_linear.default
    by_expert, top_k = (layer.order, layer.offsets), layer.shape.top_k
    offsets = layer.offsets.tolist()
    up = partial(multiply, layer.x, layer.gate_up, *by_expert, top_k, "silu", False, True)
    h = up()
    yield "gate_up", up, check("gate_up", h, reference(layer.rows, layer.gate_up, offsets, True))
    down = partial(multiply, h, layer.down, *by_expert, 1, "", True, False)
    y, places = down(), reference(h, layer.down, offsets, False)
    expected = torch.empty_like(y).index_copy_(0, layer.order.long(), places)
    yield "down", down, check("down", y, expected)
    how = (top_k, "softmax", True, 1, 1, 1.0, "silu")
    layers = (layer.router, None, layer.gate_up, layer.down)
    block = BY_NAME["fused_moe"].implementation("cuda").fn
    yield "block", partial(block, layer.x, *layers, *[None] * 4, 0, None, None, *how), None
    if not beside:
        return
    ends = layer.offsets[1:]
    for name, rows, weight in (("gate_up", layer.rows, layer.gate_up), ("down", h, layer.down)):
        cutlass = partial(torch._grouped_mm, rows, weight.transpose(1, 2), offs=ends)
        yield f"{name}, CUTLASS", cutlass, None
    weights = torch.rand(layer.ids.shape, device="cuda")

    def run(plan: Callable[[], tuple[list[Any], Any]]) -> None:
        for launch in plan()[0]:
            launch.run()

    yield "sort", partial(run, partial(sort_by_expert, layer.ids, layer.shape.experts)), None
    yield "sum", partial(run, partial(combine, y, weights, None, None, None)), None


def dense_us() -> float:
    """The machine's own ceiling: an 8192-cubed product."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    return graph_us([partial(torch.mm, a, b)], calls=5, rounds=_ROUNDS)


@torch.inference_mode()
def measure(options: argparse.Namespace) -> Iterator[Row]:
    """One row a work, in this process, with the library of ``options.one``."""
    name, _, path = options.one.partition("=")
    # Loaded in place of this checkout's own.
    _cuda.find_cuda_library = lambda: Path(path).resolve()
    if not _cuda.load_cuda_library():
        raise SystemExit(f"{path}: torch has no CUDA")
    torch.manual_seed(0)
    us = dense_us()
    yield {"library": name, "work": "dense 8192", "us": us, "tflop_s": 2 * 8192**3 / us / 1e6}
    for shape in options.shapes:
        weights = make_weights(SHAPES[shape])
        for tokens in options.tokens:
            layer = make_layer(SHAPES[shape], weights, tokens, options.routing)
            for work, call, bits in works(layer, options.beside):
                us = graph_us([call], calls=_CALLS, rounds=_ROUNDS)
                row: Row = {"library": name, "shape": shape, "tokens": tokens, "work": work}
                row |= {"routing": options.routing, "us": round(us, 2)}
                flops = layer.flops.get(work.partition(",")[0])
                if flops is not None:
                    row["tflop_s"] = round(flops / us / 1e6, 1)
                if bits is not None:
                    row["bits"] = bits
                yield row
        del weights, layer
        torch.cuda.empty_cache()


def differing(rows: Sequence[Row]) -> list[str]:
    """Works of which two libraries made other bits."""
    found: dict[str, set[int]] = {}
    for row in rows:
        if "bits" in row:
            key = f"{row['shape']}, {row['tokens']} tokens, {row['work']}"
            found.setdefault(key, set()).add(row["bits"])
    return [key for key, bits in found.items() if len(bits) > 1]


def run_each(options: argparse.Namespace) -> list[Row]:
    """The rows of every library, printed as they come."""
    rows: list[Row] = []
    command = [sys.executable, "-m", "fusewright.benchmarks.ops.bench_grouped"]
    command += ["--routing", options.routing, "--shapes", *options.shapes]
    command += ["--tokens", *map(str, options.tokens)]
    for place, library in enumerate(options.library):
        given = [*command, "--one", library, *(() if place else ("--beside",))]
        with subprocess.Popen(given, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            end = Timer(options.seconds, process.kill)  # a kernel that never ends
            end.start()
            for line in process.stdout:
                print(line, end="", flush=True)
                rows.append(json.loads(line))
            end.cancel()
        if process.returncode:
            print(f"{library}: ended with exit code {process.returncode}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--routing", choices=("uniform", "power"), default="uniform")
    parser.add_argument("--seconds", type=float, default=75.0, help="most for a library")
    parser.add_argument("--output", type=Path, help="JSON lines")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        for row in measure(options):
            print(json.dumps(row), flush=True)
        return
    rows = run_each(options)
    if options.output:
        options.output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for key in differing(rows):
        print(f"DIFFERENT BITS: {key}")


if __name__ == "__main__":
    main()
