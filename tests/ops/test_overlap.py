"""Hidden transfers of a sum over ranks, with threads as ranks and one process's memory as windows.

What the kernels of csrc do is done here by torch, in the order in which a rank enqueues it: slots,
posts, waits and copies are those of the real thing.  ``test_peer_memory.py`` runs them on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Lock, Semaphore
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright import ops
from fusewright.ops.chain import kernels as chain_kernels, overlap as _overlap
from fusewright.ops.chain.kernels import OVERLAP, part_at
from fusewright.ops.chain.stages import Call
from fusewright.ops.collective import peer_memory as _peer_memory

_WAIT_S = 300.0
Op = Callable[..., Any]


class Peers:
    """The ops ``fw_cuda::peer_*`` of all ranks; a rank's group has its number for a name."""

    def __init__(self, world: int) -> None:
        self.world = world
        size = _peer_memory.WINDOW_BYTES // 16
        self.windows = [torch.full((size,), torch.nan) for _ in range(world)]
        self.posts = {(a, b): Semaphore(0) for a in range(world) for b in range(world)}

    def _at(self, rank: int, rows: int, columns: int, offset: int) -> Tensor:
        start = offset // self.windows[rank].element_size()
        return self.windows[rank][start : start + rows * columns].view(rows, columns)

    def peer_window(self, x: Tensor, rows: int, columns: int, offset: int, group: str) -> Tensor:
        return self._at(int(group), rows, columns, offset)

    def peer_post(self, x: Tensor, to: int, group: str) -> None:
        self.posts[int(group), to].release()

    def peer_wait(self, x: Tensor, source: int, group: str) -> None:
        assert self.posts[source, int(group)].acquire(timeout=_WAIT_S), "nothing was posted"

    def peer_fetch(self, to: Tensor, source: int, offset: int, group: str) -> None:
        assert to.is_contiguous() and source != int(group)
        to.copy_(self._at(source, *to.shape, offset))  # type: ignore[arg-type]

    def peer_sum_parts_norm(
        self,
        parts: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        y: Tensor,
        total: Tensor,
        total_copy: Tensor,
        group: str,
    ) -> None:
        made, summed = ops.BY_NAME["add_rms_norm"].reference(parts.sum(0), residual, weight, eps)
        y.copy_(made)
        total.copy_(summed)
        total_copy.copy_(summed)


class Stream:
    """A rank enqueues everything in an order that a single stream could run."""

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> None: ...


def calls(world: int, rows: int, activation: str | None, bias: bool) -> list[Call]:
    """A call of each rank, whose group has its number for a name; the residual and the norm's
    weight are the same on all."""
    k, hidden, n = 24, 40, 32
    residual, norm_weight = torch.randn(rows, hidden), 1 + torch.randn(hidden) / 4
    weights = "weight, bias" if bias else "weight"
    gate = f", activation={activation!r}" if activation else ""
    norm = "add_norm(weight, eps=1e-05, reduce=True)"
    text = f"linear({weights}) > {norm} > linear({weights}{gate})"
    of_ranks = []
    for rank in range(world):
        biases = [[torch.randn(size)] if bias else [] for size in (hidden, n)]
        weight, then = torch.randn(hidden, k) / k**0.5, torch.randn(n, hidden) / hidden**0.5
        operands = [weight, *biases[0], norm_weight, then, *biases[1]]
        of_ranks.append(Call.of((torch.randn(rows, k), residual, operands, text, str(rank))))
    return of_ranks


@pytest.mark.product
@pytest.mark.parametrize(
    ("world", "rows", "activation", "bias"),
    [
        (2, 257, "silu", False),
        (2, 300, None, True),
        (4, 385, "gelu_tanh", True),
        (4, 500, None, False),
    ],
)
def test_every_rank_has_what_the_ops_in_turn_give(
    world: int, rows: int, activation: str | None, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three calls in a row, so that slots are used again."""
    peers = Peers(world)
    members = {str(rank): (rank, world) for rank in range(world)}
    monkeypatch.setattr(_peer_memory, "_members", members)
    cuda = SimpleNamespace(
        current_stream=lambda device: Stream(), stream=lambda stream: nullcontext()
    )
    names = ("mm", "addmm", "empty_like")
    fake = SimpleNamespace(
        cuda=cuda,
        ops=SimpleNamespace(fw_cuda=peers),
        **{name: getattr(torch, name) for name in names},
    )
    monkeypatch.setattr(_overlap, "torch", fake)
    monkeypatch.setattr(_overlap, "_copies", lambda device: Stream())
    activate, lock = chain_kernels._activate, Lock()

    def one_at_a_time(*args: Any) -> Any:
        with lock:  # Triton's interpreter serves one thread
            return activate(*args)

    monkeypatch.setattr(chain_kernels, "_activate", one_at_a_time)
    turns = [calls(world, rows, activation, bias) for _ in range(3)]

    def run(rank: int) -> list[Any]:
        parts = [part_at(turn[rank], 0, 3, turn[rank].state) for turn in turns]
        return [OVERLAP.run(part) for part in parts]

    with ThreadPoolExecutor(world) as pool:
        found = list(pool.map(run, range(world)))
    for number, turn in enumerate(turns):
        linear = ops.BY_NAME["linear"].reference
        parts = [linear(c.x, c.operands[0]["weight"], c.operands[0].get("bias")) for c in turn]
        summed = torch.stack(parts).sum(0)
        for rank, call in enumerate(turn):

            def visit(op: ops.SemanticOp, *args: Any, summed: Tensor = summed) -> Any:
                if op.collective:
                    return ops.BY_NAME["add_rms_norm"].reference(summed, *args[1:5])
                return op.reference(*args)

            state, wanted = found[rank][number], call.fold(visit)
            for got, want in ((state.x, wanted.x), (state.total, wanted.total)):
                torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert all(not post.acquire(blocking=False) for post in peers.posts.values())
