"""Runs a measurement in a process for each rank, over a group that they connect.

A script passes its ``measure`` function to ``main``, which prints and writes what the slowest rank
took.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...bench.environment import environment
from ...engine.worker.peers import RankGroup, meeting_store
from ...engine.worker.place import places

Measure = Callable[[int, int], list[dict[str, Any]]]
"""``measure(world, hidden)`` returns rows, in which numbers of type float are times in us."""


def _rank(rank: int, measure: Measure, world: int, hidden: int, folder: Path) -> None:
    torch.cuda.set_device(rank)
    with torch.inference_mode():
        place = places(world, 1)[rank]
        group = RankGroup(place, lambda: meeting_store(str(folder / "store"), world), "cuda")
        rows = measure(world, hidden)
        group.close()
    (folder / f"rows.{rank}").write_text(json.dumps(rows))


def slowest(of_ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge the rows of all ranks: of each time the largest."""
    return [
        {
            name: max(row[name] for row in same) if isinstance(value, float) else value
            for name, value in same[0].items()
        }
        for same in zip(*of_ranks, strict=True)
    ]


def main(description: str | None, measure: Measure) -> None:
    """Measure as the command line says, print the rows and write them.

    Args:
        description: of the script, for ``--help``.
        measure: a function of a module, since other processes import it.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.multiprocessing.spawn(  # type: ignore[attr-defined,no-untyped-call]
            _rank, (measure, args.ranks, args.hidden, folder), nprocs=args.ranks
        )
        rows = slowest(
            [json.loads((folder / f"rows.{rank}").read_text()) for rank in range(args.ranks)]
        )
    for row in rows:
        print(row, flush=True)
    if args.json:
        result = {"environment": environment(), "ranks": args.ranks, "us": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
