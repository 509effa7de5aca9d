"""``all_gather`` puts the columns that the ranks of a process group hold side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..core.choice import Choice, Kernel
from ..core.desc import EXACT, TOLERANCES, Case, Cost, OpDesc
from ..core.op import Implementation, SemanticOp, on_gpu
from . import peer_memory as _peer_memory
from .all_reduce import CASES_GROUP, resolve_group

LIBRARY = "torch.distributed's gather"


def all_gather(x: Tensor, world_size: int, group_name: str) -> Tensor:
    """The columns of all ranks, in the order of the ranks; all of them must call it, in the same
    order.

    Args:
        x: [n, k], the same shape and dtype on every rank; float32, bfloat16 or float16.
        world_size: ranks of the group, which a trace knows without one.
        group_name: a process group of two ranks or more, as ``group.group_name`` gives it.

    Returns:
        [n, k * world_size], contiguous: the same bits on every rank.  Over peer memory a negative
        zero becomes a positive one.

    Raises:
        ValueError: no such group, one of another size, or another dtype.
    """
    return torch.ops.fw.all_gather.default(x, world_size, group_name)  # type: ignore[no-any-return]


def gather_over_ranks(x: Tensor, world_size: int, group_name: str) -> Tensor:
    """The definition."""
    check(x, group_name)
    ranks = resolve_group("all_gather", group_name)
    if ranks != world_size:
        raise ValueError(
            f"all_gather: process group {group_name!r} has {ranks} ranks, expected world_size="
            f"{world_size}; start as many ranks as the model was made for"
        )
    rows, columns = x.shape
    gathered = torch.ops._c10d_functional.all_gather_into_tensor.default(
        x.contiguous(), world_size, group_name
    )
    gathered = torch.ops._c10d_functional.wait_tensor.default(gathered)
    by_rank: Tensor = gathered.view(world_size, rows, columns)
    return by_rank.transpose(0, 1).contiguous().view(rows, world_size * columns)


def _push(x: Tensor, world_size: int, group_name: str) -> Tensor:
    """By csrc's kernel over peer memory, or torch.distributed's for what is too large for it."""
    check(x, group_name)
    if world_size != _peer_memory.world_of(group_name) or not _serves(x, group_name):
        return gather_over_ranks(x, world_size, group_name)
    x = x.contiguous()
    return torch.ops.fw_cuda.peer_all_gather.default(x, group_name)  # type: ignore[no-any-return]


def _serves(x: Tensor, group_name: str) -> bool:
    return x.shape[1] % _peer_memory.PACKET == 0 and _peer_memory.shots(x, group_name) > 0


def _choices(x: Tensor, world_size: int, group_name: str) -> tuple[Choice, ...]:
    found = _peer_memory.choose_sum(x, group_name)
    name, refused = ("push", ()) if _serves(x, group_name) else (LIBRARY, found.refused)
    return (replace(found, of="all_gather", kernel=Kernel(name), refused=refused),)


def check(x: Tensor, group_name: str) -> None:
    """Refuse what cannot be gathered.

    Raises:
        ValueError: names dtype and group.
    """
    if x.dtype not in TOLERANCES:
        names = ", ".join(str(dtype) for dtype in TOLERANCES)
        raise ValueError(f"all_gather over {group_name!r}: x is {x.dtype}, expected one of {names}")


def _fake(x: Tensor, world_size: int, group_name: str) -> Tensor:
    check(x, group_name)
    return x.new_empty((x.shape[0], x.shape[1] * world_size))


def _cases(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Iterator[Case]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, device=device).to(dtype)

    for shape in [(1, 64), (7, 256), (33, 5), (3, 1)]:
        yield Case(f"{list(shape)}", (randn(*shape), 2, CASES_GROUP))
    yield Case("slice of [6, 640]", (randn(6, 640)[:, 128:512], 2, CASES_GROUP))
    yield Case("no rows", (randn(0, 64), 2, CASES_GROUP))


def _cost(desc: OpDesc) -> Cost:
    """Each rank's part is written by all and crosses the wire to each of the others."""
    x, world_size = desc["x"], desc["world_size"]
    return Cost(bytes=x.nbytes * (2 * world_size + 1), flops=0)


OP = SemanticOp(
    name="all_gather",
    reference=gather_over_ranks,
    fake=_fake,
    cases=_cases,
    cost=_cost,
    implementations=(
        on_gpu("cuda", _push, _peer_memory.refuses, selects=_choices),
        Implementation("native", gather_over_ranks, runs=lambda *args: (LIBRARY,)),
    ),
    tolerances=EXACT,
)
