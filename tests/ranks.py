"""Runs a function of a test module in several processes, which are the ranks of a gloo group.

As a script: ``ranks.py FILE FUNCTION WORLD FOLDER``.  It imports FILE, calls its ``prepare(WORLD)``
if there is one, and forks the ranks, so that torch is imported, and a model traced, once.  Ranks
meet through a file in FOLDER: there are no ports to collide.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 500


def in_ranks(function: Callable[[int, int], Any], world: int, folder: Path) -> list[Any]:
    """``[function(rank, world) for each rank]``, each in a process of its own.

    Args:
        function: of a module's top level; what it returns is saved by torch.
        folder: empty.

    Raises:
        AssertionError: a rank failed; has its traceback.
    """
    from tests.warm import warm_starts  # which this file does not find as a script

    file = sys.modules[function.__module__].__file__
    command = [sys.executable, "-P", __file__, str(file), function.__name__, str(world), folder]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    with warm_starts():
        done = subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
            env=environment,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def name_world(name: str) -> None:
    """Give the group of all ranks one more name."""
    world = dist.group.WORLD
    assert world is not None
    _register_process_group(name, world)


def _main(file: str, function: str, world: int, folder: Path) -> int:
    sys.path.append(str(ROOT))  # at the end: it has folders called ops and config
    spec = importlib.util.spec_from_file_location("ranks_task", file)
    assert spec and spec.loader
    module = sys.modules["ranks_task"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    getattr(module, "prepare", lambda world: None)(world)
    ranks = []
    for rank in range(world):
        if (pid := os.fork()) == 0:
            os._exit(_rank(getattr(module, function), rank, world, folder))
        ranks.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in ranks)


def _rank(task: Callable[[int, int], Any], rank: int, world: int, folder: Path) -> int:
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'store'}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        torch.save(task(rank, world), folder / f"{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])))
