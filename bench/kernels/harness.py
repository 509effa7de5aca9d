"""How every kernel benchmark measures: calls that rotate over cold memory, in one CUDA graph.

A file beside this lists ``KernelWork``s; each is timed as ``-O2`` runs it, and for every library
function that does the same.  Bytes and FLOPs come from the op's own cost.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from ...ops import BY_NAME, Implementation, OpDesc, Variant, choose, variants_of
from ...ops.core.device_table import gpu_of
from ...ops.launches.quant import GROUP

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
OURS = "fusewright"
CUDA, META = torch.device("cuda"), torch.device("meta")

_COLD_BYTES = 256 << 20
_MOST_COPIES = 32
_GRAPH_US, _MOST_CALLS = 400.0, 256
_ROUND_US = 1500.0
_ROUNDS = 7


@dataclass(frozen=True)
class Model:
    """The shapes of one model that kernels see; ``intermediate`` is one expert's for a MoE."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    qk_norm: bool = False

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


MODELS = (
    Model("Llama-3-8B", 4096, 14336, 32, 8, 128, 128256),
    Model("Qwen3-8B", 4096, 12288, 32, 8, 128, 151936, qk_norm=True),
    Model("Qwen3-30B-A3B", 2048, 768, 32, 4, 128, 151936, qk_norm=True),
)


@dataclass(frozen=True)
class Planned:
    """A library that prepares a call on the host, which is not measured: the op's arguments -> a
    function of none."""

    plan: Callable[..., Callable[[], Any]]


@dataclass(frozen=True, eq=False)
class KernelWork:
    """One call to measure.

    Args:
        op: name of the semantic op.
        label: model and sizes, the same from run to run.
        make: arguments of one call, fresh memory at each, on the device that it is given.
        symbols: values of the symbols in the op's cost.
        libraries: what else does the same, by name, on the same arguments.
    """

    op: str
    label: str
    make: Callable[[torch.device], tuple[Any, ...]]
    symbols: Mapping[str, float] = field(default_factory=dict)
    libraries: Mapping[str, Callable[..., Any] | Planned] = field(default_factory=dict)

    def describe(self, sm: int) -> OpDesc:
        """The call on a GPU of compute capability ``sm``, such as 90."""
        described = BY_NAME[self.op].describe(self.make(META), sm=sm)
        return replace(described, device="cuda")

    def implementation(self, sm: int) -> Implementation:
        """The implementation that ``-O2`` runs there."""
        choice = choose(BY_NAME[self.op], self.describe(sm), inline_first=False)
        return choice.kernel  # type: ignore[no-any-return]

    def variants(self, sm: int) -> set[Variant]:
        launches = self.implementation(sm).launches
        return set() if launches is None else variants_of(launches(*self.make(META))[0])


def this_sm() -> int:
    return gpu_of(torch.device("cuda"))[1]


def randn(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random data: zeros would run faster than a model does."""
    return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)


def cases(works: Iterable[KernelWork]) -> Iterator[Any]:
    """A pytest parameter for each work and contender; without a GPU all are skipped."""
    mark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
    for work in works:
        for name in (OURS, *work.libraries):
            yield pytest.param(work, name, id=f"{work.op}-{work.label}-{name}", marks=mark)


def benchmark_of(works: Iterable[KernelWork]) -> Callable[..., None]:
    """The test that measures every contender of these."""

    @pytest.mark.parametrize(("work", "contender"), cases(works))
    def test(benchmark: BenchmarkFixture, work: KernelWork, contender: str) -> None:
        measure(benchmark, work, contender)

    return test


QUANTS = {"": "", "static": "static", "token": "dynamic", "group": "dynamic"}
"""Schemes, and the axis "quantization" of an op that uses them: none, by a static scale, by one a
token, by one for each 128 columns of a token."""


def quant_argument(scheme: str, device: torch.device) -> tuple[Any, ...]:
    if not scheme:
        return ()
    dynamic = {"token": 0, "group": GROUP}
    return (dynamic[scheme] if scheme in dynamic else torch.full((1, 1), 0.02, device=device),)


def device_time() -> float:
    """Seconds, once the device has done all that was asked of it."""
    torch.cuda.synchronize()
    return time.perf_counter()


def measure(benchmark: BenchmarkFixture, work: KernelWork, contender: str) -> None:
    """Time one contender; everything that a report needs goes into ``extra_info``."""
    name, call = contender, work.libraries.get(contender)
    if call is None:
        implementation = work.implementation(this_sm())
        name, call = implementation.name, implementation.fn
    cost = BY_NAME[work.op].cost(work.describe(this_sm()))
    moved, flops = (_number(value, work.symbols) for value in (cost.bytes, cost.flops))
    copies = max(1, min(_MOST_COPIES, -(-_COLD_BYTES // max(int(moved), 1))))
    with torch.inference_mode():
        inputs = _inputs(work, copies)
        plan = call.plan if isinstance(call, Planned) else partial(partial, call)
        replay, calls = _graph([plan(*each) for each in inputs])
    benchmark.group = work.op
    benchmark.extra_info.update(
        op=work.op,
        label=work.label,
        contender=name,
        library=contender != OURS,
        calls=calls,
        bytes=moved,
        flops=flops,
    )
    benchmark._timer = device_time
    benchmark.pedantic(replay, rounds=_ROUNDS, warmup_rounds=1)  # type: ignore[no-untyped-call]


@functools.lru_cache(maxsize=1)
def _inputs(work: KernelWork, copies: int) -> list[tuple[Any, ...]]:
    """Made once for a work, whose contenders are timed one after the other."""
    return [work.make(CUDA) for _ in range(copies)]


def _number(value: Any, symbols: Mapping[str, float]) -> float:
    return float(value.subs(symbols)) if hasattr(value, "subs") else float(value)


def _graph(fns: Sequence[Callable[[], Any]]) -> tuple[Callable[[], None], int]:
    """(replays, calls in them): a millisecond or two of calls, in graphs long enough to hide what
    lies between two."""
    fns[0]()  # compiles; allocates what may not be during a capture
    graph, calls = _capture(fns, len(fns)), len(fns)
    us = min(_seconds(graph.replay) for _ in range(2)) * 1e6 / calls
    enough = min(_MOST_CALLS, int(_GRAPH_US / us))
    if enough > calls:
        graph, calls = _capture(fns, enough), enough
    replays = max(1, int(_ROUND_US / (us * calls)))

    def replay() -> None:
        for _ in range(replays):
            graph.replay()

    return replay, calls * replays


def _seconds(run: Callable[[], None]) -> float:
    start = device_time()
    run()
    return device_time() - start


def _capture(fns: Sequence[Callable[[], Any]], calls: int) -> torch.cuda.CUDAGraph:
    """Capture ``calls`` calls of ``fns`` in turn.  The last result of each keeps its own memory."""
    stream, keeper = _captures()
    with _capturing(stream, keeper.pool()) as graph:
        results = deque[Any](maxlen=len(fns))
        for i in range(calls):
            results.append(fns[i % len(fns)]())
    return graph


@functools.cache
def _captures() -> tuple[torch.cuda.Stream, torch.cuda.CUDAGraph]:
    """The stream of all captures, and a graph that keeps their common memory."""
    stream = torch.cuda.Stream()
    with _capturing(stream, torch.cuda.graph_pool_handle()) as graph:
        torch.zeros(1, device=CUDA)
    return stream, graph


@contextmanager
def _capturing(stream: torch.cuda.Stream, pool: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture as ``torch.cuda.graph`` does, but without its slow emptying of the cache."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool)
        try:
            yield graph
        finally:
            graph.capture_end()
