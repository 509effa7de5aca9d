"""Times the sum over ranks with add and norm: one kernel over peer memory, and NCCL with a kernel.

Run as ``python -m fusewright.bench.ops.bench_collectives --ranks 2 --json FILE``: a process a GPU.
A graph holds the op many times over rotating inputs, and medians of its replays count, over all
ranks the slowest.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ...compiler.lowering.tune import graph_us
from ...engine.worker.peers import RankGroup, meeting_store
from ...engine.worker.place import places
from ...model_executor.parallel import GROUP
from ...ops import _peer_memory
from ...ops.all_reduce import sum_over_ranks
from ..environment import environment

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_CALLS, _ROUNDS = 40, 15


def _measure(hidden: int) -> list[dict[str, Any]]:
    weight = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
    fused = ops.BY_NAME["all_reduce_add_rms_norm"].implementation("cuda").fn
    norm = ops.BY_NAME["add_rms_norm"].implementation("triton").fn
    bare = ops.BY_NAME["all_reduce"].implementation("cuda").fn
    rows = []
    for tokens in TOKENS:
        xs = [torch.randn((tokens, hidden), dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        residual = torch.randn_like(xs[0])

        def unfused(x: Tensor, residual: Tensor = residual) -> Any:
            return norm(sum_over_ranks(x, GROUP), residual, weight, 1e-5)

        def joined(x: Tensor, residual: Tensor = residual) -> Any:
            return fused(x, residual, weight, 1e-5, None, GROUP)

        row: dict[str, Any] = {
            "tokens": tokens,
            "hidden": hidden,
            "pushed": _peer_memory.pushes(xs[0], GROUP),
        }
        for name, call in {
            "push, add, norm": joined,
            "NCCL, then add, norm": unfused,
            "push": lambda x: bare(x, GROUP),
            "NCCL": lambda x: sum_over_ranks(x, GROUP),
        }.items():
            us = graph_us([partial(call, x) for x in xs], calls=_CALLS, rounds=_ROUNDS)
            row[name] = round(us, 2)
        rows.append(row)
    return rows


def _rank(rank: int, world: int, store: Path, hidden: int, to: Path) -> None:
    torch.cuda.set_device(rank)
    with torch.inference_mode():
        place = places(world, 1)[rank]
        group = RankGroup(place, lambda: meeting_store(str(store), world), "cuda")
        rows = _measure(hidden)
        group.close()
    to.with_suffix(f".{rank}").write_text(json.dumps(rows))


def main() -> None:
    """Measure, print a table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder, "times")
        torch.multiprocessing.spawn(  # type: ignore[attr-defined,no-untyped-call]
            _rank, (args.ranks, Path(folder, "store"), args.hidden, to), nprocs=args.ranks
        )
        of_ranks = [
            json.loads(to.with_suffix(f".{rank}").read_text()) for rank in range(args.ranks)
        ]
    rows = []
    for same in zip(*of_ranks, strict=True):
        timed = {name for name in same[0] if name not in ("tokens", "hidden", "pushed")}
        rows.append({**same[0], **{name: max(row[name] for row in same) for name in timed}})
        print(rows[-1], flush=True)
    if args.json:
        result = {"environment": environment(), "ranks": args.ranks, "us": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
