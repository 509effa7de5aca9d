"""Groups of ranks whose GPUs write into each other's memory, as csrc's collectives do.

Each rank of a group owns an inbox, to which the others store what they send, and a window, from
which they copy what it holds (csrc/collective).  A group is connected once, when its ranks meet;
the ops that reduce over it ask ``world_of`` here whether it is, and torch.distributed serves where
it is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from ...config.arch import why_csrc_has_no_code
from ..core.choice import Choice, Kernel, select
from ..core.cuda import why_no_csrc, why_not_built
from ..core.desc import OpDesc
from ..core.device_table import gpu_of, most_rows, on_change
from ..core.target import Target, here

WORLDS = (2, 4, 8)
"""Numbers of ranks that the kernels are compiled for."""
DTYPES = (torch.bfloat16, torch.float16)
MOST_COLUMNS = 16384
PACKET = 8
"""Elements of a packet, the unit of what is sent."""
_INBOX_BYTES = 256 << 20
WINDOW_BYTES = 128 << 20
_HANDLE_BYTES = 64
_members: dict[str, tuple[int, int]] = {}
"""The connected groups -> (this rank, number of ranks)."""


def part_bytes(world: int) -> int:
    """The most bytes that a rank sends at a time."""
    return _INBOX_BYTES // (2 * world)


def world_of(group_name: str, device: torch.device | None = None) -> int:
    """Ranks of a group that is connected over peer memory; 0 for any other.

    Tensors without memory, whose ``device`` says so, stand for a plan, whose group will be.
    """
    if device is not None and device.type == "meta":
        return WORLDS[0]
    return _members.get(group_name, (0, 0))[1]


def rank_in(group_name: str) -> int:
    """This process's rank in a group that is connected."""
    return _members[group_name][0]


def _refuses_sum(way: str, desc: tuple[int, int, int], rows: int, target: Target) -> str:
    world, columns, itemsize = desc
    if not world:
        return "the ranks are not connected over peer memory"
    if rows * columns % PACKET:
        return f"{rows * columns} elements: not a multiple of {PACKET}"
    if rows * columns * itemsize > part_bytes(world):
        return f"{rows * columns * itemsize} bytes: an inbox takes {part_bytes(world)}"
    most = most_rows(f"{way} {world} ranks", columns)
    return "" if rows <= most else f"{rows} rows: fastest up to {most}"


def _ranks(desc: tuple[int, int, int], rows: int, target: Target) -> str:
    return f"{desc[0]} ranks" if desc[0] else ""


LIBRARY = "torch.distributed's sum"
WAYS = (
    Kernel("push", partial(_refuses_sum, "push"), _ranks),
    Kernel("push twice", partial(_refuses_sum, "push twice"), _ranks),
    Kernel(LIBRARY),
)
"""The kernels that sum over ranks.  The first sends a row once, to all ranks; the second twice, to
its owner and as the sum to the others, which is less with more than two ranks."""


@lru_cache(4096)
def choose_over(world: int, columns: int, itemsize: int, rows: int, device: torch.device) -> Choice:
    """The kernel that sums rows over this number of connected ranks, or 0."""
    return select((world, columns, itemsize), rows, here(device), WAYS, "all_reduce")


on_change(choose_over.cache_clear)


def choose_sum(x: Tensor, group_name: str) -> Choice:
    """The kernel that sums the rows of ``x`` over a group."""
    columns, world = x.shape[-1], world_of(group_name, x.device)
    rows = x.numel() // max(columns, 1)
    return choose_over(world, columns, x.element_size(), rows, x.device)


def shots(x: Tensor, group_name: str) -> int:
    """How often the kernels of csrc send a row to sum it; 0 if they do not serve it."""
    return (WAYS.index(choose_sum(x, group_name).kernel) + 1) % len(WAYS)


def aligned_rows(x: Tensor) -> Tensor:
    """x as a matrix of rows that the kernels can read, copied if it must be."""
    rows = x.reshape(-1, x.shape[-1])
    aligned = rows.stride(1) == 1 and rows.stride(0) % PACKET == 0 and rows.data_ptr() % 16 == 0
    return rows if aligned else rows.contiguous()


def refuses(desc: OpDesc) -> str:
    """Why the kernels do not serve a call of any number of rows, or nothing."""
    if reason := why_no_csrc(desc, "peer_all_reduce"):
        return reason
    dtype = desc["x"].dtype
    return "" if dtype in DTYPES else f"x is {dtype}: the kernels take bfloat16 and float16"


def refuses_rows(desc: OpDesc) -> str:
    """Why the kernels do not take rows of this width, or nothing."""
    columns = desc["x"].shape[-1]
    if isinstance(columns, int) and columns % PACKET == 0 and columns <= MOST_COLUMNS:
        return ""
    return f"{columns} columns: not a multiple of {PACKET} up to {MOST_COLUMNS}"


def why_no_peers(devices: Sequence[int]) -> str:
    """Why ranks on these GPUs of one host cannot write to each other's memory, or nothing.  The
    same GPU may stand for several ranks."""
    if len(devices) not in WORLDS:
        return f"{len(devices)} ranks: the kernels serve {', '.join(map(str, WORLDS))}"
    if reason := why_not_built(None, "peer_all_reduce"):
        return reason
    for device in devices:
        if reason := why_csrc_has_no_code(gpu_of(torch.device("cuda", device))[1]):
            return f"csrc is {reason}"
    for device in devices:
        for peer in devices:
            if device != peer and not torch.cuda.can_device_access_peer(device, peer):
                return f"GPU {device} has no access to the memory of GPU {peer}"
    return ""


@contextmanager
def peer_memory(group_name: str, store: Store, rank: int, devices: Sequence[int]) -> Iterator[None]:
    """Connect a group while the block runs; waits for its other ranks.

    Args:
        store: where the ranks of this group alone meet.
        devices: the GPU of each rank, of which ``devices[rank]`` is this process's.
    """
    world = len(devices)
    ops = torch.ops.fw_cuda
    handle = torch.empty((1, _HANDLE_BYTES), dtype=torch.uint8)
    ops.peer_open(handle, group_name, devices[rank], rank, world, part_bytes(world), WINDOW_BYTES)
    try:
        store.set(f"handle {rank}", handle.numpy().tobytes())  # type: ignore[arg-type]
        handles = b"".join(store.get(f"handle {peer}") for peer in range(world))
        table = torch.frombuffer(bytearray(handles), dtype=torch.uint8)
        ops.peer_connect(table.view(world, _HANDLE_BYTES), group_name)
        _members[group_name] = (rank, world)
        yield
    finally:
        _members.pop(group_name, None)
        ops.peer_close(group_name)


def abort(group_name: str) -> None:
    """End the group's kernels that wait for a lost rank.  Any thread may call it."""
    if world_of(group_name):
        torch.ops.fw_cuda.peer_abort(group_name)
