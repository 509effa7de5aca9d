"""Times two linear layers with a sum over ranks between them: in turn, and with hidden transfers.

Run as ``python -m fusewright.bench.ops.bench_overlap --ranks 2 --json FILE``: a process a GPU.
Shapes are those of Llama-3-8B.  Calls are eager, as steps of so many tokens are; medians count,
over all ranks the slowest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ... import ops
from ...engine.worker.peers import RankGroup, meeting_store
from ...engine.worker.place import places
from ...model_executor.parallel import GROUP
from ...ops._overlap import linear_sum_norm_linear
from ...ops.linear_add_norm_linear import Chain, in_turn
from ..environment import environment

TOKENS = (2048, 3072, 4096, 8192)
_HIDDEN, _HEADS, _MLP, _QKV = 4096, 4096, 14336, 6144
_TIMED = ("without a sum", "in turn", "overlapped")
_LAYERS, _CALLS, _ROUNDS = 4, 8, 7


def _chain(tokens: int, inner: int, then: int, activation: str | None) -> Chain:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    weight, next_weight = randn(_HIDDEN, inner) * inner**-0.5, randn(then, _HIDDEN) * _HIDDEN**-0.5
    same = torch.Generator("cuda").manual_seed(tokens)  # the residual is the same on every rank
    residual = torch.randn((tokens, _HIDDEN), generator=same, dtype=torch.bfloat16, device="cuda")
    between = (residual, torch.ones_like(weight[:, 0]), 1e-5)
    return Chain(randn(tokens, inner), weight, None, *between, next_weight, None, activation)


def _median_us(call: Callable[[Chain], Any], chains: list[Chain]) -> float:
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


def _measure(world: int) -> list[dict[str, Any]]:
    layer = ops.BY_NAME["linear"].implementation("skinny").fn
    norm = ops.BY_NAME["all_reduce_add_rms_norm"].implementation("cuda").fn

    def whole(call: Chain) -> Any:
        return in_turn(call, layer, lambda *args: norm(*args, None, GROUP))

    def layers(call: Chain) -> Any:
        return layer(*call.second(layer(*call.first)))

    def overlapped(call: Chain) -> Any:
        return linear_sum_norm_linear(*call, GROUP)

    rows = []
    for tokens in TOKENS:
        for name, inner, then, activation in (
            ("o to gate_up", _HEADS // world, 2 * _MLP // world, "silu"),
            ("down to qkv", _MLP // world, _QKV // world, None),
        ):
            chains = [_chain(tokens, inner, then, activation) for _ in range(_LAYERS)]
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


def _rank(rank: int, world: int, store: Path, to: Path) -> None:
    torch.cuda.set_device(rank)
    with torch.inference_mode():
        place = places(world, 1)[rank]
        group = RankGroup(place, lambda: meeting_store(str(store), world), "cuda")
        rows = _measure(world)
        group.close()
    to.with_suffix(f".{rank}").write_text(json.dumps(rows))


def main() -> None:
    """Measure, print a table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder, "times")
        torch.multiprocessing.spawn(  # type: ignore[attr-defined,no-untyped-call]
            _rank, (args.ranks, Path(folder, "store"), to), nprocs=args.ranks
        )
        of_ranks = [
            json.loads(to.with_suffix(f".{rank}").read_text()) for rank in range(args.ranks)
        ]
    rows = []
    for same in zip(*of_ranks, strict=True):
        times = {name: max(row[name] for row in same) for name in _TIMED}
        rows.append({**same[0], **times})
        print(rows[-1], flush=True)
    if args.json:
        result = {"environment": environment(), "ranks": args.ranks, "us": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
