"""How every kernel benchmark measures: calls that rotate over cold inputs, in one CUDA graph.

A file beside this lists ``Work``s; each is timed for every implementation of its op and for every
library function that does the same.  Bytes and FLOPs come from the op's own cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from ...ops import BY_NAME

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)

_COLD_BYTES = 256 << 20
_MOST_COPIES = 64
_GRAPH_US = 1500.0
_MOST_CALLS = 400
_ROUNDS = 15


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
class Work:
    """One call to measure.

    Args:
        op: name of the semantic op.
        label: model and sizes, the same from run to run.
        make: arguments of one call, fresh memory at each.
        symbols: values of the symbols in the op's cost.
        libraries: what else does the same, by name, on the same arguments.
    """

    op: str
    label: str
    make: Callable[[], tuple[Any, ...]]
    symbols: Mapping[str, float] = field(default_factory=dict)
    libraries: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random data on the GPU: zeros would run faster than a model does."""
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


def cases(works: Iterable[Work]) -> Iterator[Any]:
    """A pytest parameter for each work and contender; without a GPU all are skipped."""
    mark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
    for work in works:
        implementations = [i.name for i in BY_NAME[work.op].implementations]
        for name in [*implementations, *work.libraries]:
            yield pytest.param(work, name, id=f"{work.op}-{work.label}-{name}", marks=mark)


QUANTS = ("", "_quant_static", "_quant_dynamic")
"""Endings of an op's name: not quantized, by a static scale, by one a token."""


def quant_argument(quant: str) -> tuple[Any, ...]:
    """The last argument of an op with one of ``QUANTS``."""
    if not quant:
        return ()
    return (torch.full((1, 1), 0.02, device="cuda") if quant == QUANTS[1] else 0,)


def inductor(op: str) -> Callable[..., Any]:
    """Inductor's fusion of the op's reference, compiled once for all sizes."""
    return torch.compile(BY_NAME[op].reference, dynamic=True)


def device_time() -> float:
    """Seconds, once the device has done all that was asked of it."""
    torch.cuda.synchronize()
    return time.perf_counter()


def measure(benchmark: BenchmarkFixture, work: Work, contender: str) -> None:
    """Time one contender; everything that a report needs goes into ``extra_info``."""
    op = BY_NAME[work.op]
    args = work.make()
    major, minor = torch.cuda.get_device_capability()
    desc = op.describe(args, sm=10 * major + minor)
    if contender in work.libraries:
        call = work.libraries[contender]
    else:
        reason = op.implementation(contender).supports(desc)
        if reason:
            pytest.skip(reason)
        call = op.overload(contender)
    cost = op.cost(desc)
    moved, flops = (_number(value, work.symbols) for value in (cost.bytes, cost.flops))
    copies = max(1, min(_MOST_COPIES, -(-_COLD_BYTES // max(int(moved), 1))))
    inputs = [args, *(work.make() for _ in range(copies - 1))]
    with torch.inference_mode():
        replay, calls = _graph([partial(call, *each) for each in inputs])
    benchmark.group = work.op
    benchmark.extra_info.update(
        op=work.op,
        label=work.label,
        contender=contender,
        library=contender in work.libraries,
        calls=calls,
        bytes=moved,
        flops=flops,
    )
    benchmark._timer = device_time
    benchmark.pedantic(replay, rounds=_ROUNDS, warmup_rounds=2)  # type: ignore[no-untyped-call]


def _number(value: Any, symbols: Mapping[str, float]) -> float:
    return float(value.subs(symbols)) if hasattr(value, "subs") else float(value)


def _graph(fns: list[Callable[[], Any]]) -> tuple[Callable[[], None], int]:
    """(replay, calls in it): enough calls for a replay of a millisecond or two."""
    for fn in (fns[0], fns[-1]):
        fn()
    start = device_time()
    for fn in fns:
        fn()
    us = (device_time() - start) * 1e6 / len(fns)
    calls = max(len(fns), min(_MOST_CALLS, int(_GRAPH_US / max(us / 4, 1.0))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            fns[i % len(fns)]()
    return graph.replay, calls
