"""Times the sum over ranks with add and norm: one kernel over peer memory, and NCCL with a kernel.

``python -m fusewright.benchmarks.ops.bench_collectives --ranks 2 --json FILE``: a process a GPU.
A graph holds the op many times over rotating inputs, and medians of its replays count, over all
ranks the slowest.  Ranks do not begin a replay at the same time; in a graph of few calls that would
count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ...compiler.lowering.search import graph_us
from ...model_executor.parallel import GROUP
from ...ops.collective import peer_memory as _peer_memory
from ...ops.collective.all_reduce import sum_over_ranks
from .on_ranks import main

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_CALLS, _ROUNDS = 400, 15


def measure(world: int, hidden: int) -> list[dict[str, Any]]:
    """Time every number of tokens on this rank."""
    weight = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
    norm = ops.BY_NAME["add_rms_norm"].implementation("triton").fn
    bare = ops.BY_NAME["all_reduce"].implementation("cuda").fn
    rows = []
    for tokens in TOKENS:
        xs = [torch.randn((tokens, hidden), dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        residual = torch.randn_like(xs[0])

        def unfused(x: Tensor, residual: Tensor = residual) -> Any:
            return norm(sum_over_ranks(x, GROUP), residual, weight, 1e-5)

        def joined(x: Tensor, residual: Tensor = residual, two_shots: bool = False) -> Any:
            run = torch.ops.fw_cuda.peer_all_reduce_norm.default
            return run(x, residual, weight, 1e-5, None, None, -1, GROUP, two_shots)

        row: dict[str, Any] = {
            "tokens": tokens,
            "hidden": hidden,
            "shots": _peer_memory.shots(xs[0], GROUP),
        }
        calls: dict[str, Callable[[Tensor], Any]] = {
            "push, add, norm": joined,
            "push twice, add, norm": partial(joined, two_shots=True),
            "NCCL, then add, norm": unfused,
            "push": lambda x: bare(x, GROUP),
            "NCCL": lambda x: sum_over_ranks(x, GROUP),
        }
        for name, call in calls.items():
            us = graph_us([partial(call, x) for x in xs], calls=_CALLS, rounds=_ROUNDS)
            row[name] = round(us, 2)
        rows.append(row)
    return rows


if __name__ == "__main__":
    main(__doc__, measure)
