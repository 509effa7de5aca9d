"""Every implementation of every op on its conformance cases, with its bytes from the op's cost.

Generated from ``ALL_OPS``.  On a GPU a round is a graph of several calls; its time includes nothing
of Python.  ``make bench`` runs it; results as JSON with ``--benchmark-json FILE``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from ...ops import ALL_OPS, Case, Implementation, SemanticOp

CALLS_A_GRAPH = 20
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32


def runs() -> Iterator[Any]:
    """(op, implementation, case) for the largest case of every op."""
    for op in ALL_OPS:
        dtype = DTYPE if DTYPE in op.dtypes else op.dtypes[0]
        cases = op.cases(dtype, DEVICE, torch.Generator(DEVICE).manual_seed(0))
        case = max(cases, key=lambda c: sum(a.nbytes for a in c.args if torch.is_tensor(a)))
        for impl in op.implementations:
            desc = op.describe(case.args)
            if DEVICE.type in impl.devices and not impl.supports(desc):
                yield pytest.param(op, impl, case, id=f"{op.name}-{impl.name}-{case.label}")


def graph_of(call: Callable[[], Any]) -> Callable[[], None]:
    """Replays ``CALLS_A_GRAPH`` calls and waits for them."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_A_GRAPH):
            call()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


@pytest.mark.parametrize(("op", "impl", "case"), runs())
def test_op(benchmark: BenchmarkFixture, op: SemanticOp, impl: Implementation, case: Case) -> None:
    overload = op.overload(impl.name)

    def call() -> Any:
        return overload(*case.args)

    cost = op.cost(op.describe(case.args))
    benchmark.group = op.name
    benchmark.extra_info["bytes"] = str(cost.bytes)
    benchmark.extra_info["flops"] = str(cost.flops)
    with torch.inference_mode():
        if DEVICE.type == "cpu":
            benchmark(call)
            return
        try:
            replay = graph_of(call)
        except RuntimeError as error:
            pytest.skip(f"cannot be captured: {str(error).splitlines()[0]}")
        benchmark.extra_info["calls_a_round"] = CALLS_A_GRAPH
        benchmark(replay)
