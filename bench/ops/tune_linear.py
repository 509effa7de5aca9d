"""Finds cuBLASLt's fastest algorithm for each weight and number of rows, and writes the table.

``python -m fusewright.bench.ops.tune_linear [--models M ...] [--operands O ...] [--rows N ...]``.
From the fastest of what the library's heuristic names, of the table, and of what it found for other
shapes, it walks to algorithms that differ in one setting.  Every call reads a weight that is not in
L2.  The last ones are timed in CUDA graphs beside what the op runs without the table, and compared
with a product in float32: the library also accepts settings with which it computes something else.
Entries for other weights stay.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compiler.lowering.tune import graph_us
from ...ops import _cublaslt, load_cuda_library
from ...ops._cublaslt import Product
from ...ops._library_product import TABLE, Algorithm, read_table
from ...ops.linear_fp8 import by_rule
from ..environment import environment

WEIGHTS = {
    "llama3-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)),
    "qwen3-8b": ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096)),
    "llama3.2-1b": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048)),
}
"""[out_features, in_features] of qkv, o, gate_up, down, lm_head."""
ROWS = (16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
LEAST_ROWS = {"bfloat16": 17, "fp8 tensor": 9, "fp8 token": 9}
"""Fewest rows that are tuned, by kind of operands; with fewer, products stream."""
LEAST_GAIN = 0.02
_NARROW = 8  # rows: what is left of a range at whose other end an algorithm loses
_MOST_ERROR = 2.0**-8
_FP8_MOST_FEATURES = 100_000  # lm_head stays in bfloat16
_COLD_BYTES, _MOST_COPIES = 512 << 20, 16
_SCREENED, _FINALISTS, _VERIFIED = 4, 10, 5
_HEAD_START_CYCLES = 200_000  # of the host, which enqueues slower than the GPU runs
_TILE_STEPS = (-8, -4, -3, -2, -1, 1, 2, 3, 4, 8)
_CLUSTERS = (2, 3, 4, 5, 6, 7, 8, 9, 11, 12)
_SPLITS, _REDUCTIONS = range(2, 7), (1, 2, 4)
_OPTIONS = range(12)
_POOL = 5 << 28  # elements: two of the largest weight
Weight = tuple[str, int, int]


@dataclass(frozen=True)
class Problem:
    """A product and the inputs that it takes turns over."""

    operands: str
    rows: int
    product: Product
    x: Tensor
    weights: list[Tensor]
    scales: tuple[Tensor, ...]
    y: Tensor

    def call(self, algorithm: bytes, i: int) -> Tensor:
        weight = self.weights[i % len(self.weights)]
        return self.product.run(self.x, weight, self.y, algorithm, *self.scales)

    def before(self, i: int) -> Tensor:
        """What the op runs without the table."""
        weight = self.weights[i % len(self.weights)]
        if self.operands == "bfloat16":
            return F.linear(self.x, weight)
        return by_rule(self.x, self.scales[0], weight, self.scales[1], None, torch.bfloat16)

    def error(self, algorithm: bytes) -> float:
        """The error of one weight's product relative to its largest element; infinite for NaN."""
        x, weight = self.x.float(), self.weights[0].float()
        if self.scales:
            x, weight = x * self.scales[0], weight * self.scales[1]
        exact = x @ weight.T
        self.y.fill_(torch.nan)
        apart = (self.call(algorithm, 0).float() - exact).abs().max() / exact.abs().max()
        return float(apart.nan_to_num(torch.inf))


def problem(operands: str, rows: int, n: int, k: int, pool: Tensor) -> Problem:
    itemsize = 2 if operands == "bfloat16" else 1
    dtype = torch.bfloat16 if itemsize == 2 else torch.float8_e4m3fn
    copies = min(_MOST_COPIES, max(2, _COLD_BYTES // (n * k * itemsize)))
    weights = list(pool[: copies * n * k].view(copies, n, k).unbind())
    x = torch.randn(rows, k, device="cuda").to(dtype)
    scales: tuple[Tensor, ...] = ()
    if itemsize == 1:
        many = operands == "fp8 token"
        sizes = (rows, n) if many else (1, 1)
        scales = tuple(0.5 + torch.rand(size, 1, device="cuda") for size in sizes)
    y = torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")
    return Problem(operands, rows, Product(operands, 0, rows, n, k), x, weights, scales, y)


def is_right(algorithm: bytes, p: Problem) -> bool:
    return not p.product.refuses(algorithm) and p.error(algorithm) <= _MOST_ERROR


def stream_us(call: Callable[[int], object]) -> float:
    """Mean time of a few calls one after the other, enough to tell slow algorithms from fast."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call(0)
    torch.cuda._sleep(_HEAD_START_CYCLES)
    start.record()
    for i in range(_SCREENED):
        call(i + 1)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / _SCREENED


def neighbours(algorithm: bytes, kind: str) -> Iterator[bytes | None]:
    """Algorithms that differ in one setting, or in two that belong together."""
    if kind == "tile":
        here = _cublaslt.setting(algorithm, "tile")
        for step in _TILE_STEPS:
            if here + step > 0:
                yield _cublaslt.changed(algorithm, tile=here + step)
    elif kind == "cluster":
        for cluster in _CLUSTERS:
            yield _cublaslt.changed(algorithm, cluster=cluster)
    elif kind == "split":
        yield _cublaslt.changed(algorithm, split_k=1, reduction=0)
        for split in _SPLITS:
            for reduction in _REDUCTIONS:
                yield _cublaslt.changed(algorithm, split_k=split, reduction=reduction)
    else:
        for option in _OPTIONS:
            yield _cublaslt.changed(algorithm, option=option)


def screened(p: Problem, seeds: Iterable[bytes]) -> list[bytes]:
    """Algorithms, the fastest first; ``seeds``: known to be good for something."""
    times: dict[bytes, float] = {}

    def take(algorithm: bytes | None) -> None:
        if algorithm and algorithm not in times and not p.product.refuses(algorithm):
            times[algorithm] = stream_us(partial(p.call, algorithm))

    def fastest(most: int) -> list[bytes]:
        return sorted(times, key=times.__getitem__)[:most]

    for algorithm in (*p.product.algorithms(64), *seeds):
        take(algorithm)
    for kind, most in (("tile", 3), ("cluster", 6), ("tile", 3), ("split", 3), ("option", 4)):
        for algorithm in fastest(most):
            for other in neighbours(algorithm, kind):
                take(other)
    return fastest(_FINALISTS)


def graph_time(call: Callable[[int], object], rounds: int) -> float:
    return graph_us([partial(call, i) for i in range(_MOST_COPIES)], calls=16, rounds=rounds)


def tuned(p: Problem, fewest: Problem, seeds: set[bytes]) -> tuple[Algorithm | None, str]:
    """The entry, if one gains enough, and a line about it; the fastest joins the seeds.

    Args:
        p: with the most rows that the entry is for.
        fewest: with the fewest.  Where it loses there, the entry is for fewer numbers of rows.
    """
    before = graph_time(p.before, 5)
    finals = {a: graph_time(partial(p.call, a), 3) for a in screened(p, sorted(seeds))}
    ordered = sorted(finals, key=finals.__getitem__)[:_VERIFIED]
    right = [a for a in ordered if is_right(a, p) and is_right(a, fewest)]
    times = {a: graph_time(partial(p.call, a), 9) for a in right}
    n, k = p.weights[0].shape
    line = f"{p.operands:10s} {n:6d} {k:5d} {p.rows:3d} {before:7.1f}"
    if not times:
        return None, f"{line}: none of {len(finals)} is right"
    best = min(times, key=times.__getitem__)
    seeds.add(best)
    settings = ",".join(str(_cublaslt.setting(best, name)) for name in _cublaslt.SETTINGS)
    us = times[best]
    line += f" {us:7.1f} {us / before - 1:+6.1%}  {settings}  wrong {len(ordered) - len(right)}"
    if us > before * (1 - LEAST_GAIN):
        return None, line
    least = fewest.rows
    with_fewest = [graph_time(call, 5) for call in (partial(fewest.call, best), fewest.before)]
    line += f"  {least} rows {with_fewest[0]:.1f} against {with_fewest[1]:.1f}"
    if with_fewest[0] > with_fewest[1]:
        least = max(least, p.rows - _NARROW + 1)
    entry = Algorithm(p.operands, n, k, least, p.rows, best.hex(), round(us, 2), round(before, 2))
    return entry, line


def search(options: argparse.Namespace) -> tuple[list[Algorithm], set[Weight]]:
    """Entries, and the weights that were searched; prints a line each, stops at the time limit."""
    end = time.monotonic() + options.seconds
    shapes = dict.fromkeys(shape for name in options.models for shape in WEIGHTS[name])
    entries: list[Algorithm] = []
    searched: set[Weight] = set()
    for operands in options.operands:
        pool = torch.empty(_POOL, dtype=torch.bfloat16, device="cuda").uniform_(-0.05, 0.05)
        if operands != "bfloat16":
            pool = (pool * 1000).to(torch.float8_e4m3fn)
        seeds = {
            bytes.fromhex(a.algorithm) for a in known(options.output) if a.operands == operands
        }
        for n, k in shapes:
            if operands != "bfloat16" and n > _FP8_MOST_FEATURES:
                continue
            searched.add((operands, n, k))
            least = LEAST_ROWS[operands]
            for rows in (rows for rows in sorted(options.rows) if rows >= least):
                if time.monotonic() > end:
                    print(f"stopped after {options.seconds} s", flush=True)
                    return entries, searched
                p, fewest = (problem(operands, m, n, k, pool) for m in (rows, least))
                entry, line = tuned(p, fewest, seeds)
                print(line, flush=True)
                entries += [entry] if entry else []
                least = rows + 1
        del pool
    return entries, searched


def known(path: Path) -> tuple[Algorithm, ...]:
    """The table's entries, if it is of this GPU and this cuBLASLt."""
    table = read_table(path) if path.is_file() else None
    here = (torch.cuda.get_device_name(), _cublaslt.version())
    return table.algorithms if table and (table.gpu, table.cublaslt) == here else ()


def write(entries: list[Algorithm], searched: set[Weight], path: Path) -> None:
    """Into the table, in place of those for the same weights."""
    kept = [a for a in known(path) if a.weight not in searched]
    lines = [json.dumps(asdict(a)) for a in sorted((*kept, *entries), key=_order)]
    env = environment()
    head = {"gpu": torch.cuda.get_device_name(), "cublaslt": _cublaslt.version()}
    head |= {name: env[name] for name in ("torch", "commit", "command")}
    body = ",\n  ".join(lines)
    path.write_text(f'{json.dumps(head)[:-1]}, "algorithms": [\n  {body}\n]}}\n')


def _order(a: Algorithm) -> tuple[Weight, int]:
    return a.weight, a.least_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--output", type=Path, default=TABLE, help="the table; default: that in use"
    )
    parser.add_argument("--models", nargs="+", default=list(WEIGHTS), choices=WEIGHTS)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--seconds", type=float, default=600, help="stop then")
    kinds = _cublaslt.OPERANDS
    parser.add_argument("--operands", nargs="+", default=kinds, choices=kinds)
    options = parser.parse_args()
    if not load_cuda_library():
        raise SystemExit("tune_linear: csrc is not built into this installation")
    torch.manual_seed(0)
    with torch.inference_mode():
        entries, searched = search(options)
    write(entries, searched, options.output)
    print(f"{len(entries)} algorithms into {options.output}")


if __name__ == "__main__":
    main()
