"""Times two linear layers with a sum over ranks between them: in turn, and with hidden transfers.

Run as ``python -m fusewright.benchmarks.ops.bench_overlap --ranks 2 --json FILE``: a process a GPU.
Calls are eager, as steps of so many tokens are, since graphs are captured up to 512.  Medians
count, over all ranks the slowest.  Sizes but the hidden one are those of Llama-3-8B.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from ... import ops
from ...model_executor.parallel import GROUP
from ...ops.chain.kernels import OVERLAP, part_at
from ...ops.chain.stages import Call, State
from .on_ranks import main

TOKENS = (2048, 3072, 4096, 8192)
_HEADS, _MLP, _QKV = 4096, 14336, 6144
_LAYERS, _CALLS, _ROUNDS = 4, 8, 7


def _chain(tokens: int, hidden: int, inner: int, then: int, activation: str | None) -> Call:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    weight, next_weight = randn(hidden, inner) * inner**-0.5, randn(then, hidden) * hidden**-0.5
    same = torch.Generator("cuda").manual_seed(tokens)  # the residual is the same on every rank
    residual = torch.randn((tokens, hidden), generator=same, dtype=torch.bfloat16, device="cuda")
    gate = f", activation={activation!r}" if activation else ""
    text = f"linear(weight) > add_norm(weight, eps=1e-05, reduce=True) > linear(weight{gate})"
    operands = [weight, torch.ones_like(weight[:, 0]), next_weight]
    return Call.of((randn(tokens, inner), residual, operands, text, GROUP))


def _median_us(call: Callable[[Call], Any], chains: list[Call]) -> float:
    times = list[float]()
    for _ in range(_ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for index in range(_CALLS):
            call(chains[index % len(chains)])
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / _CALLS)
    return round(statistics.median(times), 1)


def measure(world: int, hidden: int) -> list[dict[str, Any]]:
    """Time both pairs of layers for every number of tokens on this rank."""
    names = {"linear": "skinny", "all_reduce_add_rms_norm": "cuda"}

    def visit(op: ops.SemanticOp, *args: Any) -> Any:
        return op.implementation(names[op.name]).fn(*args)

    def whole(call: Call) -> Any:
        return call.fold(visit)

    def layers(call: Call) -> Any:
        state = State(call.x, call.residual)
        for at in (0, 2):
            state = call.chain.stages[at].run(state, call.operands[at], visit)
        return state.x

    def overlapped(call: Call) -> Any:
        made = OVERLAP.run(part_at(call, 0, 3, call.state))
        assert made is not None
        return made.x, made.total

    rows = []
    for tokens in TOKENS:
        for name, inner, then, activation in (
            ("o to gate_up", _HEADS // world, 2 * _MLP // world, "silu"),
            ("down to qkv", _MLP // world, _QKV // world, None),
        ):
            chains = [_chain(tokens, hidden, inner, then, activation) for _ in range(_LAYERS)]
            for expected, found in zip(whole(chains[0]), overlapped(chains[0]), strict=True):
                torch.testing.assert_close(found, expected, atol=6e-2, rtol=5e-2)
            rows.append(
                {
                    "tokens": tokens,
                    "layers": name,
                    "without a sum": _median_us(layers, chains),
                    "in turn": _median_us(whole, chains),
                    "overlapped": _median_us(overlapped, chains),
                }
            )
    return rows


if __name__ == "__main__":
    main(__doc__, measure)
