"""Makes process groups by name, apart from torch.distributed's default group, which is the user's.

gloo speaks over the address that it is given, NCCL as it finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread

import torch
from torch._C._distributed_c10d import (
    ProcessGroup,
    ProcessGroupGloo,
    Store,
    _register_process_group,
    _unregister_process_group,
)

_LEAVE_S = 3.0
"""Longest time that leaving a group over NCCL may take, in seconds."""


@contextmanager
def process_group(
    name: str,
    store: Store,
    rank: int,
    world: int,
    *,
    timeout: timedelta,
    on_gpus: bool,
    address: str = "127.0.0.1",
) -> Iterator[ProcessGroup]:
    """A group under ``name`` while the block runs; waits for the other ranks.

    Args:
        store: where the ranks of this group alone meet.
        timeout: of each collective.
        on_gpus: each rank has a GPU of its own, whose tensors go over NCCL; else all go over gloo.
        address: of this host, at which the other ranks reach gloo.
    """
    group = ProcessGroup(store, rank, world)
    if on_gpus:
        _add_nccl(group, store, rank, world, timeout)
    else:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timeout
        gloo = ProcessGroupGloo(store, rank, world, options)
        for device in ("cpu", "cuda"):
            group._register_backend(torch.device(device), ProcessGroup.BackendType.GLOO, gloo)
    group._set_group_name(name)  # type: ignore[arg-type]
    _register_process_group(name, group)  # type: ignore[arg-type]
    try:
        yield group
    finally:
        _unregister_process_group(name)  # type: ignore[arg-type]
        if on_gpus:
            # NCCL may wait for a rank that is lost; then its memory goes with the process.
            leaving = Thread(target=group.shutdown, name=f"leaving {name}", daemon=True)
            leaving.start()
            leaving.join(_LEAVE_S)


def _add_nccl(group: ProcessGroup, store: Store, rank: int, world: int, timeout: timedelta) -> None:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # builds for a CPU have none

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    nccl = ProcessGroupNCCL(store, rank, world, options)
    group._set_default_backend(ProcessGroup.BackendType.NCCL)
    group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, nccl)
