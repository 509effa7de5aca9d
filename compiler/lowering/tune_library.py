"""Measures algorithms of cuBLASLt for weights and ranges of rows.

``fill()`` searches for what a model's shapes need and no table has; ``LibraryMeasure`` times on the
GPU.  From the fastest of what the library's heuristic names, and of what it found for other shapes,
it walks to algorithms that differ in one setting.  Every call reads a weight that is not in L2.
The last ones are timed in CUDA graphs beside what the op runs without the table, and compared with
a matmul in float32: the library also accepts settings with which it computes something else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from ... import ops
from ...config.device_table import OPERANDS, Algorithm, DeviceTable, Weight
from ...ops.chain.stages import Call, Linear
from ...ops.core import cublaslt as _cublaslt
from ...ops.core.cublaslt import GemmPlan
from ...ops.core.cuda import load_cuda_library
from ...ops.core.device_table import serving
from ...ops.linear.csrc import cluster_rows
from ...ops.linear.desc import WEIGHT_FORMATS, LinearArgs, LinearDesc
from ...ops.linear.kernels import UNMEASURED, runner
from ...passes import fake_value
from .search import Found, Times, graph_us, search, winner

ROWS = (24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
LEAST_ROWS = {"bfloat16": 17, "fp8 tensor": 9, "fp8 token": 9}
"""Fewest rows that are tuned, by kind of operands; with fewer, linears stream."""
_unmeasured = runner(UNMEASURED)
_log = logging.getLogger(__name__)
_NARROW = 8  # rows: what is left of a range at whose other end an algorithm loses
_MOST_ERROR = 2.0**-8
_COLD_BYTES, _MOST_COPIES = 512 << 20, 16
_SCREENED, _FINALISTS, _VERIFIED = 4, 10, 5
_HEAD_START_CYCLES = 200_000  # of the host, which enqueues slower than the GPU runs
_TILE_STEPS = (-8, -4, -3, -2, -1, 1, 2, 3, 4, 8)
_CLUSTERS = (2, 3, 4, 5, 6, 7, 8, 9, 11, 12)
_SPLITS, _REDUCTIONS = range(2, 7), (1, 2, 4)
_OPTIONS = range(12)


@dataclass(frozen=True)
class Range:
    """Rows of x for which one algorithm is looked for."""

    weight: Weight
    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.weight[0]} {list(self.weight[1:])} rows {self.least} to {self.most}"


Measure: TypeAlias = Callable[[Range], Times[Algorithm | None] | None]
"""Times without a table, and with an entry for one, if one is worth it."""


def fill(
    weights: Iterable[Weight],
    tables: Sequence[DeviceTable],
    measure: Measure,
    *,
    rows: Sequence[int] = ROWS,
    served: Callable[[Weight], int] = lambda weight: 0,
    **how: Any,
) -> Found[Range, Algorithm | None]:
    """Measure the ranges of rows for which the tables have no entry.

    A weight of which a table has any entry was measured when the table was written, and where
    nothing gained there is none: it is known as a whole.

    Args:
        served: the most rows for which csrc's kernel of clusters runs; tuning begins above.
        how: as of ``search``.
    """
    known, seen = 0, {a.weight for table in tables for a in table.algorithms}
    pending: list[Range] = []
    for weight in dict.fromkeys(weights):
        least = max(LEAST_ROWS[weight[0]], served(weight) + 1)
        ranges = [most for most in sorted(rows) if most >= least]
        if weight in seen:
            known += len(ranges)
            continue
        for most in ranges:
            pending.append(Range(weight, least, most))
            least = most + 1
    # Every weight at one range before any at the next: what time leaves out is the same for all.
    pending.sort(key=lambda each: each.most)
    outcome = search(pending, [measure], **how)
    outcome.known = known
    return outcome


def algorithms_of(outcome: Found[Range, Algorithm | None]) -> tuple[Algorithm, ...]:
    """The entries that gained."""
    return tuple(entry for entry in outcome.winners().values() if entry is not None)


def weights_of(graph: fx.Graph) -> list[Weight]:
    """The weights of unlowered linear layers that a library GEMM can serve, each once."""
    weights: dict[Weight, None] = {}
    for node in graph.nodes:
        namespace, _, name = getattr(node.target, "_name", "").partition("::")
        if namespace != ops.NAMESPACE:
            continue
        args: Any = fx.node.map_arg(node.args, fake_value)
        for weight, scale in _layers_of(name, args):
            # x's scales have the shape that goes with the weight's, whatever it is.
            if (operands := _operands(weight.dtype, scale, weight.shape)) in OPERANDS:
                weights[operands, *map(int, weight.shape)] = None  # type: ignore[index]
    return list(weights)


def _layers_of(name: str, args: Any) -> list[tuple[Any, Any]]:
    """The weights of a call's dense layers, each with its scale or None."""
    if name == "linear":
        layer = LinearArgs(*args)
        return [(layer.weight, layer.weight_scale)]
    if not name.startswith("chain"):
        return []
    call = Call.of(args)
    pairs = zip(call.chain.stages, call.operands, strict=True)
    return [(o["weight"], o.get("weight_scale")) for s, o in pairs if isinstance(s, Linear)]


def _operands(dtype: torch.dtype, scale: Any, shape: Sequence[int]) -> str:
    """The name of the weight format with this dtype and shape of scale; "" if none has them."""
    for form in WEIGHT_FORMATS.values():
        if form.dtype != dtype or bool(form.x_scale) != (scale is not None):
            continue
        if scale is None or form.scale_shapes(1, *shape)[1] == tuple(scale.shape):
            return form.name
    return ""


def tune_weights(weights: Sequence[Weight], **how: Any) -> Found[Range, Algorithm | None]:
    """Measure GEMMs of a model's weights on this GPU; ``how``: as of ``search``."""
    device = torch.device("cuda", torch.cuda.current_device())
    measure = LibraryMeasure(weights)
    with torch.inference_mode():
        filled = fill(weights, serving(device), measure, served=_served_by_clusters, **how)
    measure.free()
    return filled


def _served_by_clusters(weight: Weight) -> int:
    operands, out_features, in_features = weight
    if not load_cuda_library():
        return 0
    return cluster_rows(LinearDesc(operands, torch.bfloat16, out_features, in_features))


class LibraryMeasure:
    """Measures on the GPU; what was fastest for one shape is where it starts for the next.

    Args:
        weights: all that will be asked for: one pool of memory serves them.
        seeds: algorithms known to be good for something.
        say: called with a line about every range.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        seeds: Iterable[Algorithm] = (),
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._seeds: dict[str, set[bytes]] = {operands: set() for operands in OPERANDS}
        for a in seeds:
            self._seeds[a.operands].add(bytes.fromhex(a.algorithm))
        self._say = say
        self._nbytes = max((_copies(w) * _nbytes(w) for w in weights), default=0)
        self._pools: dict[torch.dtype, Tensor] = {}

    def __call__(self, point: Range) -> Times[Algorithm | None] | None:
        torch.manual_seed(0)
        weight = point.weight
        try:
            pool = self._pool(_dtype(weight[0]))
            p, fewest = (problem(weight, rows, pool) for rows in (point.most, point.least))
            times, line = tuned(p, fewest, self._seeds[weight[0]])
        except torch.OutOfMemoryError:
            _log.warning("%s %s: no memory to measure its algorithms", weight[0], weight[1:])
            return None
        self._say(line)
        return times

    def free(self) -> None:
        """Give the memory of the weights back."""
        self._pools.clear()
        torch.cuda.empty_cache()

    def _pool(self, dtype: torch.dtype) -> Tensor:
        """Random weights; those of one dtype are held at a time."""
        if dtype not in self._pools:
            self._pools.clear()
            pool = torch.empty(self._nbytes // 2, dtype=torch.bfloat16, device="cuda")
            pool.uniform_(-0.05, 0.05)
            if dtype != torch.bfloat16:
                pool = torch.cat([(half * 1000).to(dtype) for half in pool.chunk(2)]).repeat(2)
            self._pools[dtype] = pool
        return self._pools[dtype]


def _dtype(operands: str) -> torch.dtype:
    return torch.bfloat16 if operands == "bfloat16" else torch.float8_e4m3fn


def _nbytes(weight: Weight) -> int:
    return weight[1] * weight[2] * _dtype(weight[0]).itemsize


def _copies(weight: Weight) -> int:
    """Copies of a weight that take turns, so that none is in L2."""
    return min(_MOST_COPIES, max(2, _COLD_BYTES // _nbytes(weight)))


@dataclass(frozen=True)
class TuningProblem:
    """A GEMM and the inputs that it takes turns over."""

    operands: str
    rows: int
    plan: GemmPlan
    x: Tensor
    weights: list[Tensor]
    scales: tuple[Tensor, ...]
    y: Tensor

    def call(self, algorithm: bytes, i: int) -> Tensor:
        weight = self.weights[i % len(self.weights)]
        return self.plan.run(self.x, weight, self.y, algorithm, *self.scales)

    def before(self, i: int) -> Tensor:
        """Run what the op runs without the table."""
        weight = self.weights[i % len(self.weights)]
        x_scale, weight_scale = self.scales or (None, None)
        return _unmeasured(self.x, weight, None, x_scale, weight_scale, torch.bfloat16, None, None)

    def error(self, algorithm: bytes) -> float:
        """The error of one weight's result relative to its largest element; infinite for NaN."""
        x, weight = self.x.float(), self.weights[0].float()
        if self.scales:
            x, weight = x * self.scales[0], weight * self.scales[1]
        exact = x @ weight.T
        self.y.fill_(torch.nan)
        apart = (self.call(algorithm, 0).float() - exact).abs().max() / exact.abs().max()
        return float(apart.nan_to_num(torch.inf))


def problem(weight: Weight, rows: int, pool: Tensor) -> TuningProblem:
    operands, n, k = weight
    copies = _copies(weight)
    weights = list(pool[: copies * n * k].view(copies, n, k).unbind())
    x = torch.randn(rows, k, device=pool.device).to(pool.dtype)
    scales: tuple[Tensor, ...] = ()
    if operands != "bfloat16":
        many = operands == "fp8 token"
        sizes = (rows, n) if many else (1, 1)
        scales = tuple(0.5 + torch.rand(size, 1, device=pool.device) for size in sizes)
    y = torch.empty(rows, n, dtype=torch.bfloat16, device=pool.device)
    plan = GemmPlan(operands, pool.get_device(), rows, n, k)
    return TuningProblem(operands, rows, plan, x, weights, scales, y)


def is_right(algorithm: bytes, p: TuningProblem) -> bool:
    return not p.plan.refuses(algorithm) and p.error(algorithm) <= _MOST_ERROR


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


def screened(p: TuningProblem, seeds: Iterable[bytes]) -> list[bytes]:
    """Algorithms, the fastest first; ``seeds``: known to be good for something."""
    times: dict[bytes, float] = {}

    def take(algorithm: bytes | None) -> None:
        if algorithm and algorithm not in times and not p.plan.refuses(algorithm):
            times[algorithm] = stream_us(partial(p.call, algorithm))

    def fastest(most: int) -> list[bytes]:
        return sorted(times, key=times.__getitem__)[:most]

    for algorithm in (*p.plan.algorithms(64), *seeds):
        take(algorithm)
    for kind, most in (("tile", 3), ("cluster", 6), ("tile", 3), ("split", 3), ("option", 4)):
        for algorithm in fastest(most):
            for other in neighbours(algorithm, kind):
                take(other)
    return fastest(_FINALISTS)


def graph_time(call: Callable[[int], object], rounds: int) -> float:
    return graph_us([partial(call, i) for i in range(_MOST_COPIES)], calls=16, rounds=rounds)


def tuned(
    p: TuningProblem, fewest: TuningProblem, seeds: set[bytes]
) -> tuple[Times[Algorithm | None], str]:
    """The time without a table, and that of an entry if one gains enough, and a line about them;
    the fastest joins the seeds.

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
        return {None: before}, f"{line}: none of {len(finals)} is right"
    best = min(times, key=times.__getitem__)
    seeds.add(best)
    settings = ",".join(str(_cublaslt.setting(best, name)) for name in _cublaslt.SETTINGS)
    us = times[best]
    line += f" {us:7.1f} {us / before - 1:+6.1%}  {settings}  wrong {len(ordered) - len(right)}"
    if winner({None: before, best: us}) is None:
        return {None: before}, line
    least = fewest.rows
    with_fewest = [graph_time(call, 5) for call in (partial(fewest.call, best), fewest.before)]
    line += f"  {least} rows {with_fewest[0]:.1f} against {with_fewest[1]:.1f}"
    if with_fewest[0] > with_fewest[1]:
        least = max(least, p.rows - _NARROW + 1)
    entry = Algorithm(p.operands, n, k, least, p.rows, best.hex(), round(us, 2), round(before, 2))
    return {None: before, entry: us}, line
