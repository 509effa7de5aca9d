"""``all_reduce`` sums a tensor over the ranks of a process group of torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

from ..core.choice import Choice
from ..core.desc import TOLERANCES, Case, Cost, OpDesc, TensorDesc
from ..core.op import Implementation, SemanticOp, on_gpu
from . import peer_memory as _peer_memory

CASES_GROUP = "fusewright-cases"
"""The process group of the cases; whoever runs them makes it."""


def all_reduce(x: Tensor, group_name: str) -> Tensor:
    """Sum over the ranks of a process group; all of them must call it, in the same order.

    Args:
        x: any shape, the same on every rank; float32, bfloat16 or float16.
        group_name: a process group of two ranks or more, as ``group.group_name`` gives it.

    Returns:
        Like ``x``, contiguous, in fresh memory: the same bits on every rank.  The order of the sum
        and its roundings to x's dtype are the backend's (gloo, NCCL).

    Raises:
        ValueError: no such group, a group of one rank, or another dtype.
    """
    return torch.ops.fw.all_reduce.default(x, group_name)  # type: ignore[no-any-return]


def sum_over_ranks(x: Tensor, group_name: str) -> Tensor:
    """The definition; the fused ops share it."""
    check(x, group_name)
    resolve_group("all_reduce", group_name)
    total = torch.ops._c10d_functional.all_reduce.default(x, "sum", group_name)
    return torch.ops._c10d_functional.wait_tensor.default(total)  # type: ignore[no-any-return]


def _push(x: Tensor, group_name: str) -> Tensor:
    """By csrc's kernel over peer memory, or torch.distributed's for what is too large for it."""
    check(x, group_name)
    shots = _peer_memory.shots(x, group_name)
    if not shots:
        return sum_over_ranks(x, group_name)
    run = torch.ops.fw_cuda.peer_all_reduce.default
    return run(x.contiguous(), group_name, shots == 2)  # type: ignore[no-any-return]


def _choices(x: Tensor, group_name: str) -> tuple[Choice, ...]:
    return (_peer_memory.choose_sum(x, group_name),)


def resolve_group(op: str, group_name: str) -> int:
    """The number of ranks of a process group that ``op`` runs over.

    Raises:
        ValueError: this process is in no such group, or alone in it.
    """
    try:
        ranks = _resolve_process_group(group_name).size()  # type: ignore[arg-type]
    except RuntimeError as error:
        raise ValueError(
            f"{op}: this process has no process group {group_name!r}; call "
            "torch.distributed.init_process_group on every rank and pass the group_name of the "
            "group (of dist.group.WORLD, or of dist.new_group(...)); one rank alone needs no "
            f"{op}"
        ) from error
    if ranks < 2:
        raise ValueError(
            f"{op}: process group {group_name!r} has {ranks} rank, expected 2 or more; on "
            "one rank the result is x itself: leave the call out of the model"
        )
    return ranks


def check(x: Tensor, group_name: str) -> None:
    """Refuse what cannot be summed.

    Raises:
        ValueError: names dtype and group.
    """
    if x.dtype not in TOLERANCES:
        names = ", ".join(str(dtype) for dtype in TOLERANCES)
        raise ValueError(
            f"all_reduce over {group_name!r}: x is {x.dtype}, expected one of {names}; reduce "
            "before quantizing"
        )


def wire_bytes(x: TensorDesc) -> Any:
    """Bytes that a rank sends, in the symbol ``world_size``: each part of x once to be summed and
    once as the sum (Patarasuk and Yuan, 2009: no all-reduce needs less)."""
    return 2 * x.nbytes * _others_share()


def sum_flops(x: TensorDesc) -> Any:
    """Additions of a rank when each sums an equal part of x."""
    return x.numel * _others_share()


def _others_share() -> Any:
    import sympy

    world_size = sympy.Symbol("world_size")
    return (world_size - 1) / world_size


def _fake(x: Tensor, group_name: str) -> Tensor:
    check(x, group_name)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _cases(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Iterator[Case]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, device=device).to(dtype)

    for shape in [(1, 64), (7, 256), (5, 4, 128), (33,)]:
        yield Case(f"{list(shape)}", (randn(*shape), CASES_GROUP))
    yield Case("slice of [6, 640]", (randn(6, 640)[:, 128:512], CASES_GROUP))
    yield Case("transposed", (randn(96, 5).t(), CASES_GROUP))
    yield Case("no rows", (randn(0, 64), CASES_GROUP))


def _cost(desc: OpDesc) -> Cost:
    x = desc["x"]
    return Cost(bytes=2 * x.nbytes + wire_bytes(x), flops=sum_flops(x))


OP = SemanticOp(
    name="all_reduce",
    reference=sum_over_ranks,
    fake=_fake,
    cases=_cases,
    cost=_cost,
    implementations=(
        on_gpu("cuda", _push, _peer_memory.refuses, selects=_choices),
        Implementation("native", sum_over_ranks, runs=lambda *args: (_peer_memory.LIBRARY,)),
    ),
)
