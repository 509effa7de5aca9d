"""Runs two linear layers with a sum over ranks between them, and hides the sum's transfers.

A rank sums, adds and normalizes only its own part of the rows, so the sum is a reduce-scatter and
an all-gather.  Both travel by copy engines while a GEMM runs, which takes the rows of the others
first before the sum and its own rows first behind it:

    this stream:  first layer of others' rows | of own rows | sum, add, norm | second layer of own
                  rows | of others' rows
    copies:       partial sums of own rows while the first layer runs, norms of others' rows and
                  then their sums while the second does

This is sequence parallelism with asynchronous tensor parallelism (Korthikanti et al., 2022; Wang et
al., 2022, ASPLOS).  Every rank ends with all rows of both results, as without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..collective import peer_memory
from ..core.device_table import most_rows

_TILE = 128
"""Parts of the rows begin at multiples of a GEMM's tile."""


def part_rows(rows: int, world: int) -> int:
    """The rows of a part; the last rank's may have fewer."""
    return -(-rows // (world * _TILE)) * _TILE


def overlaps(rows: int, next_features: int, hidden: int, world: int) -> bool:
    """Whether there are enough rows for a gain in front of a layer of so many features, and few
    enough for the window.  There are not where no device table knows of a gain."""
    in_turn = most_rows(f"in turn {world} ranks", next_features) if world else 0
    if not 0 < in_turn < rows:
        return False
    part = part_rows(rows, world)
    fits = (world + 1) * part * hidden * 2 <= peer_memory.WINDOW_BYTES
    return fits and (world - 1) * part < rows and not hidden % peer_memory.PACKET


@lru_cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    """The stream of the copies.  It has priority, so that the kernel that waits for a peer need not
    queue behind the tiles of a GEMM."""
    return torch.cuda.Stream(device, priority=-1)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def linear_sum_norm_linear(
    x: Tensor,
    residual: Tensor,
    first: Mapping[str, Any],
    norm_weight: Tensor,
    eps: float,
    second: Mapping[str, Any],
    group_name: str,
) -> tuple[Tensor, Tensor]:
    """Compute the layers ``first`` and ``second``, each a weight and perhaps a bias by name, with
    the sum over ranks, the add and the norm between them, where ``overlaps`` says so.  x and the
    residual are matrices.

    Returns:
        (y, the sum of the residual stream).
    """
    ops, (weight, bias) = torch.ops.fw_cuda, (first["weight"], first.get("bias"))
    rank, world = peer_memory.rank_in(group_name), peer_memory.world_of(group_name)
    rows, hidden = residual.shape
    then, then_bias = second["weight"], second.get("bias")
    part = part_rows(rows, world)
    spans = [slice(each * part, min(rows, each * part + part)) for each in range(world)]
    others = [(rank + step) % world for step in range(1, world)]
    own, num_own = spans[rank], spans[rank].stop - spans[rank].start
    slot_bytes = part * hidden * x.element_size()

    def slot(index: int, num_rows: int) -> Tensor:
        """Return one matrix of this rank's window.  Slot i holds the partial sums for rank i.  The
        rank's own slot holds the finished sums, and the last slot holds their norms."""
        return ops.peer_window(x, num_rows, hidden, index * slot_bytes, group_name)  # type: ignore[no-any-return]

    parts = x.new_empty((world, num_own, hidden))
    total = torch.empty_like(residual)
    normed = torch.empty_like(residual)
    sums = x.new_empty((rows, then.shape[0]))
    stream, copies = torch.cuda.current_stream(x.device), _copies(x.device)
    copies.wait_stream(stream)  # their memory may still be in use there

    for other in others:
        span = spans[other]
        _multiply(x[span], weight, bias, slot(other, span.stop - span.start))
        ops.peer_post(x, other, group_name)
    with torch.cuda.stream(copies):
        for other in others:
            ops.peer_wait(x, other, group_name)
            ops.peer_fetch(parts[other], other, rank * slot_bytes, group_name)
    _multiply(x[own], weight, bias, parts[rank])
    stream.wait_stream(copies)

    norms = slot(world, num_own)
    totals = slot(rank, num_own)  # of the slots for sums, a rank's own is free
    ops.peer_sum_parts_norm(
        parts, residual[own], norm_weight, eps, norms, totals, total[own], group_name
    )
    for other in others:
        ops.peer_post(x, other, group_name)
    arrived = []
    with torch.cuda.stream(copies):
        for other in others:
            ops.peer_wait(x, other, group_name)
            ops.peer_fetch(normed[spans[other]], other, world * slot_bytes, group_name)
            arrived.append(copies.record_event())
        for other in others:
            ops.peer_fetch(total[spans[other]], other, other * slot_bytes, group_name)
    _multiply(norms, then, then_bias, sums[own])
    for other, event in zip(others, arrived, strict=True):
        stream.wait_event(event)
        _multiply(normed[spans[other]], then, then_bias, sums[spans[other]])
    stream.wait_stream(copies)
    return sums, total
