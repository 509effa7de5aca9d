"""With the implementations that ``batch_invariant`` forces, and those it leaves as they are, a row
has the same bits alone, in any batch and in any place."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright import ops
from fusewright.ops.core.float8 import E4M3

INVARIANT = ["invariant", "rowwise"]


def run(op: str, implementation: str, device: torch.device, *args: Any) -> Any:
    """On a CPU "invariant" runs interpreted; "rowwise" is for CPUs alone."""
    if implementation == "rowwise" and device.type == "cuda":
        pytest.skip("rowwise is for CPUs")
    return ops.BY_NAME[op].overload(implementation)(*args)


def batches(device: torch.device, implementation: str) -> list[tuple[int, int]]:
    """(rows of a batch, place of the row that is compared), across every tile.

    Interpreted, a tile's matmul is numpy's, which computes rows by their place: it stays the same
    there.
    """
    if device.type == "cpu" and implementation != "rowwise":
        return [(4, 3), (7, 3), (64, 3), (130, 67)]
    on_gpu = [(8, 5), (33, 32), (257, 256), (1000, 700)] if device.type == "cuda" else []
    return [(1, 0), (7, 3), (64, 3), (64, 63), (65, 64), *on_gpu]


def check_rows(
    x: Tensor,
    device: torch.device,
    compute: Callable[[Tensor], Tensor],
    implementation: str = "triton",
) -> None:
    """``compute`` gives the first row of ``x`` the same bits in every batch."""
    expected = None
    for size, place in batches(device, implementation):
        batch = x[torch.arange(1, size + 1, device=device) % len(x)]
        batch[place] = x[0]
        result = compute(batch)[place]
        expected = result if expected is None else expected
        assert torch.equal(result, expected), f"row {place} of {size}"


@pytest.mark.parametrize("implementation", INVARIANT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear(implementation: str, dtype: torch.dtype, device: torch.device) -> None:
    shapes = [(96, 160)] if device.type == "cpu" else [(96, 160), (2048, 2048), (6144, 4096)]
    for n, k in shapes:
        x = torch.randn(1100, k, device=device).to(dtype)
        weight, bias = torch.randn(n, k, device=device).to(dtype), torch.randn(n, device=device)
        args = weight, bias.to(dtype)

        def compute(rows: Tensor, args: Any = args) -> Tensor:
            return run("linear", implementation, device, rows, *args)  # type: ignore[no-any-return]

        check_rows(x, device, compute, implementation)


@pytest.mark.parametrize("implementation", INVARIANT)
@pytest.mark.parametrize("scheme", ["tensor", "token", "block"])
def test_linear_fp8(implementation: str, scheme: str, device: torch.device) -> None:
    n, k = (96, 256) if device.type == "cpu" else (1536, 2048)
    columns = {"tensor": 1, "token": 1, "block": k // 128}[scheme]
    weight = (50 * torch.randn(n, k, device=device)).clamp(-448, 448).to(E4M3)
    shape = {"tensor": (1, 1), "token": (n, 1), "block": (-(-n // 128), columns)}[scheme]
    weight_scale = torch.rand(shape, device=device)
    # A row's values and its scales, side by side.
    rows = torch.cat((torch.randn(1100, k), torch.rand(1100, columns)), 1).to(device)

    def compute(given: Tensor) -> Tensor:
        x, scale = given[:, :k].to(E4M3), given[:, k:]
        scale = rows[:1, k:] if scheme == "tensor" else scale.t().contiguous().t()
        args = (x, weight, None, scale, weight_scale, torch.bfloat16)
        return run("linear", implementation, device, *args)  # type: ignore[no-any-return]

    check_rows(rows, device, compute, implementation)


@pytest.mark.parametrize("implementation", INVARIANT)
def test_experts(implementation: str, device: torch.device) -> None:
    """Which rows share an expert's tiles follows from all rows; a row's bits do not."""
    if device.type == "cpu" and implementation == "invariant":
        pytest.skip("interpreted, a row's place in a tile decides its bits")
    experts, n, k = (6, 96, 160) if device.type == "cpu" else (64, 1536, 2048)
    weight = torch.randn(experts, n, k, device=device).bfloat16()
    ids = torch.rand(1100, experts).argsort(-1)[:, :2]
    rows = torch.cat((torch.randn(1100, k).bfloat16().float(), ids), 1).to(device)

    def compute(given: Tensor) -> Tensor:
        x, chosen = given[:, :k].bfloat16(), given[:, k:].to(torch.int32).contiguous()
        y: Tensor = run("expert_linear", implementation, device, x, weight, chosen)
        return y.view(len(given), 2 * n)

    check_rows(rows, device, compute, implementation)


@pytest.mark.parametrize("width", [64, 200])
def test_norms_and_quantization(width: int, device: torch.device) -> None:
    x = torch.randn(1100, width, device=device).to(torch.bfloat16)
    weight = torch.rand(width, device=device).to(torch.bfloat16)
    check_rows(x, device, lambda rows: run("rms_norm", "triton", device, rows, weight, 1e-6))

    def quantized(rows: Tensor) -> Tensor:
        q, scale = run("rms_norm_quant_dynamic", "triton", device, rows, weight, 1e-6, 0)
        return torch.cat((q.float(), scale), 1)

    check_rows(x, device, quantized)


@pytest.mark.parametrize("implementation", ["triton", "rowwise"])
def test_logprobs(implementation: str, device: torch.device) -> None:
    vocab = 1500 if device.type == "cpu" else 128256
    logits = 3 * torch.randn(140, vocab, device=device)

    def compute(rows: Tensor) -> Tensor:
        chosen = torch.full((len(rows),), 7, dtype=torch.int32, device=device)
        logprob, rank, top, top_ids = run("token_logprobs", implementation, device, rows, chosen, 5)
        return torch.cat((logprob[:, None], rank[:, None], top, top_ids), 1)

    check_rows(logits, device, compute, implementation)


BLOCK_SIZE, HEADS, KV_HEADS, DIM = 16, 8, 2, 64


class Sequences:
    """Random sequences in a paged cache, their blocks in random order."""

    def __init__(self, lengths: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self.device, self.lengths = device, lengths
        num_blocks = [-(-length // BLOCK_SIZE) for length in lengths]
        order = torch.randperm(sum(num_blocks)).tolist()
        self.blocks = [[order.pop() for _ in range(count)] for count in num_blocks]
        shape = (sum(num_blocks), 2, BLOCK_SIZE, KV_HEADS, DIM)
        self.cache = torch.randn(shape, device=device).to(dtype)
        self.queries = [torch.randn(n, HEADS, DIM, device=device).to(dtype) for n in lengths]

    def attend(
        self, implementation: str, chunks: Sequence[tuple[int, int, int]], window: int
    ) -> list[Tensor]:
        """Results of chunks (sequence, first query, one past the last) as one batch."""

        def ints(values: Any) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        q = torch.cat([self.queries[s][first:stop] for s, first, stop in chunks])
        widest = max(len(blocks) for blocks in self.blocks)
        table = ints([self.blocks[s] + [0] * (widest - len(self.blocks[s])) for s, _, _ in chunks])
        counts = [stop - first for _, first, stop in chunks]
        starts = ints([sum(counts[:i]) for i in range(len(counts) + 1)])
        lens, out = ints([stop for _, _, stop in chunks]), torch.empty_like(q)
        args = (q, self.cache, table, lens, starts, out, DIM**-0.5, window, 0.0)
        if window:  # with all that may change where a query's keys begin
            args += (None, None, torch.arange(HEADS, device=self.device) / 2, 32)
        run("paged_attention", implementation, self.device, *args)
        return list(out.split(counts))


@pytest.mark.product(2)
@pytest.mark.parametrize("implementation", INVARIANT)
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention(
    implementation: str, window: int, dtype: torch.dtype, device: torch.device
) -> None:
    """One sequence's queries run at once, in chunks, one by one, and beside other sequences."""
    lengths = (50, 33, 17) if device.type == "cpu" else (1500, 700, 90, 33, 17, 257)
    made, whole = Sequences(lengths, dtype, device), lengths[0]
    (expected,) = made.attend(implementation, [(0, 0, whole)], window)
    others = [(s, n // 2 if s % 2 else n - 1, n) for s, n in enumerate(lengths)][1:]
    interpreted = device.type == "cpu" and implementation == "invariant"
    # Interpreted, a query keeps its place in the tile, as rows do in ``batches``.
    step = 16 if interpreted else 1
    cuts = [0, 16, 32, 48, whole] if interpreted else [0, 1, 2, 37, whole - 1, whole]
    for batch in ([], others):
        for first, stop in itertools.pairwise(cuts):
            chunk = (0, first, stop)
            given = made.attend(implementation, [*batch, chunk], window)[-1]
            assert torch.equal(given, expected[first:stop]), (chunk, batch)
    decodes = [(0, at, at + 1) for at in range(0, whole, max(1, whole // 12 // step) * step)]
    for result, (_, at, _) in zip(
        made.attend(implementation, decodes, window), decodes, strict=True
    ):
        assert torch.equal(result[0], expected[at]), f"query {at} alone"
