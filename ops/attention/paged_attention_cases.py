"""Makes the calls of ``paged_attention`` that its conformance tests and benchmarks run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.desc import Case
from ..core.float8 import E4M3, E4M3_MAX, to_e4m3
from ..launches.paged_attention import first_seen


def batch(
    dtype: torch.dtype,
    device: torch.device,
    gen: torch.Generator,
    lengths: Sequence[tuple[int, int]],
    heads: tuple[int, int, int],
    block_size: int,
    *,
    window: int = 0,
    chunk: int = 0,
    cap: float = 0.0,
    padding: int = 0,
    fp8: str = "",
    sinks: torch.dtype | None = None,
) -> tuple[Any, ...]:
    """Arguments of one call; ``lengths``: (query, context) a sequence, ``heads``: q, KV, dim.

    ``fp8`` names what of it is FP8: "kv" without scales, "scaled kv", "out", or two of them.
    ``sinks`` is their dtype.
    Every slot that no query may see is NaN or infinite, in FP8 NaN or 448, and unused table
    entries point nowhere.
    """
    num_heads, kv_heads, dim = heads
    num_seqs, num_tokens = len(lengths), sum(n for n, _ in lengths) + padding
    num_blocks = [-(-context // block_size) for _, context in lengths]
    order = torch.randperm(sum(num_blocks) + 2, generator=gen, device=device).int()

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, device=device).to(dtype)

    stored = E4M3 if "kv" in fp8 else dtype
    cache = torch.full((len(order), 2, block_size, kv_heads, dim), float("nan"), dtype=stored)
    cache[::2] = float("inf") if stored == dtype else E4M3_MAX
    cache = cache.to(device)
    kv_scale = out_scale = None
    if "scaled kv" in fp8:
        kv_scale = torch.rand((2, kv_heads), generator=gen, device=device) / 16 + 1 / 64
    if "out" in fp8:
        out_scale = torch.rand((1, 1), generator=gen, device=device) / 2 + 0.25
    table = torch.full((num_seqs, max(num_blocks) + 3), 1 << 30, dtype=torch.int32, device=device)
    taken = 0
    for s, (queries, context) in enumerate(lengths):
        table[s, : num_blocks[s]] = order[taken : taken + num_blocks[s]]
        taken += num_blocks[s]
        first = first_seen(max(0, context - queries), window, chunk)
        slots = torch.arange(first, context, device=device)
        kv = randn(len(slots), 2, kv_heads, dim)
        if stored == E4M3:
            kv = to_e4m3(kv, None if kv_scale is None else kv_scale[:, :, None])
        cache[table[s, slots // block_size].long(), :, slots % block_size] = kv
        table[s, : first // block_size] = 1 << 30
    # One row of a fused QKV projection: q is strided on tokens.
    q = randn(num_tokens, num_heads + 2 * kv_heads, dim)[:, :num_heads]
    starts = [sum(n for n, _ in lengths[:s]) for s in range(num_seqs + 1)]
    out_dtype = dtype if out_scale is None else E4M3
    sink = None
    if sinks is not None:
        sink = (2 * torch.randn(num_heads, generator=gen, device=device)).to(sinks)
        sink[0] = 6.0  # above all logits
    # Left out where they have their defaults, as in a call's node.
    last = () if sink is None and not chunk else (sink, chunk)
    return (
        q,
        cache,
        table,
        torch.tensor([c for _, c in lengths], dtype=torch.int32, device=device),
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.full((num_tokens, num_heads, dim), 7.0, dtype=out_dtype, device=device),
        dim**-0.5,
        window,
        cap,
        kv_scale,
        out_scale,
        *last,
    )


def as_rows(args: tuple[Any, ...], longest: int = 64) -> tuple[Any, ...]:
    """The same call, in which each of up to ``longest`` queries of a sequence is a sequence of its
    own: as a step gets the drafts that it verifies."""
    _, _, table, seq_lens, starts, *_ = args
    query_lens = starts.diff()
    counts = torch.where(query_lens <= longest, query_lens, 1)
    ends = counts.cumsum(0)
    number = torch.arange(int(ends[-1]), device=ends.device)
    index = torch.repeat_interleave(counts)
    behind = ends[index] - 1 - number  # rows of the same sequence behind each
    lens = torch.where(query_lens <= longest, 1, query_lens)[index]
    new_starts = torch.cat((lens.new_zeros(1), lens.cumsum(0))).int()
    new_lens = (seq_lens[index] - behind).int()
    return *args[:2], table[index].contiguous(), new_lens, new_starts, *args[5:]


def cases(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Iterator[Case]:
    mixed = [(1, 40), (23, 23), (1, 1), (5, 150), (1, 0), (2, 64)]
    decode = [(1, 33), (1, 300), (1, 0), (1, 17)]
    prefill, long = [(140, 140)], [(1, 700), (1, 0), (1, 300)]
    both = {"window": 20, "cap": 5.0}
    in_chunks = {"window": 33, "chunk": 48, "cap": 5.0, "sinks": dtype}
    # Their begin crosses tiles that others of the batch see whole.
    wide = {"window": 520, "chunk": 640}
    last_chunk = {"chunk": 350, "sinks": torch.float32}  # it sees 300 positions, in two splits
    fp8_sinks = {"fp8": "scaled kv, out", "sinks": dtype}
    # Few distinct shapes and options: each is a compilation for the sm_90 tests.
    shapes: list[tuple[str, Any, Any, int, dict[str, Any]]] = [
        ("mixed gqa", mixed, (8, 2, 64), 16, {"padding": 3}),
        ("mixed mha", mixed, (2, 2, 16), 8, {}),
        ("mixed mqa, group of 6", mixed, (6, 1, 32), 32, {"padding": 1}),
        ("mixed, head 80", mixed, (4, 2, 80), 16, {}),
        ("mixed, head 256", [(3, 40), (1, 70)], (2, 1, 256), 32, {}),
        ("mixed, window, cap", mixed, (8, 2, 64), 16, both),
        ("prefill", prefill, (8, 2, 128), 16, {}),
        ("prefill chunk, window", [(70, 170)], (8, 2, 64), 16, {"window": 33}),
        ("prefill chunk, window, cap", [(29, 150)], (8, 2, 64), 16, both),
        ("decode", decode, (8, 2, 128), 16, {}),
        ("decode, head 16", decode, (2, 2, 16), 8, {}),
        ("decode, head 256", [(1, 129), (1, 31)], (2, 1, 256), 32, {}),
        ("decode, window", decode, (8, 2, 64), 16, {"window": 150}),
        ("decode, window, cap", decode, (8, 2, 64), 16, both),
        ("one long decode", [(1, 700)], (8, 2, 64), 16, {}),
        ("mixed, fp8 kv, scales", mixed, (8, 2, 64), 16, {"padding": 3, "fp8": "scaled kv"}),
        ("mixed, fp8 kv, window, cap, fp8 out", mixed, (4, 2, 80), 16, both | {"fp8": "kv, out"}),
        ("prefill, fp8 kv, scales, fp8 out", prefill, (8, 2, 128), 16, {"fp8": "scaled kv, out"}),
        ("prefill, fp8 out", prefill, (8, 2, 128), 16, {"fp8": "out"}),
        ("decode, fp8 kv, head 256", decode, (2, 1, 256), 32, {"fp8": "kv"}),
        ("long decodes, fp8 kv, scales, fp8 out", long, (8, 2, 128), 16, {"fp8": "scaled kv, out"}),
        ("mixed, sinks, head 96", mixed, (4, 2, 96), 16, {"sinks": torch.float32}),
        ("mixed, chunks, head 112", mixed, (4, 2, 112), 16, {"chunk": 20}),
        ("mixed, head 512", [(3, 40), (1, 70)], (2, 1, 512), 16, {}),
        ("prefill chunk, window in chunks, sinks", [(70, 170)], (8, 2, 64), 16, in_chunks),
        ("prefill chunk, wide window in chunks", [(70, 700), (9, 600)], (8, 2, 64), 16, wide),
        ("decode, sinks, head 192", decode, (2, 1, 192), 16, {"sinks": dtype}),
        ("one long decode, chunks, sinks", [(1, 1000)], (8, 2, 64), 16, last_chunk),
        ("long decodes, sinks, fp8 kv, scales, fp8 out", long, (8, 2, 64), 16, fp8_sinks),
    ]
    for label, lengths, heads, block_size, options in shapes:
        yield Case(label, batch(dtype, device, gen, lengths, heads, block_size, **options))
    drafts = [(5, 300), (1, 17), (2, 64), (9, 40), (1, 0), (70, 90)]
    some: list[tuple[str, Any, dict[str, Any]]] = [
        ("rows of drafts", (8, 2, 128), {}),
        ("rows of drafts, window, cap", (8, 2, 64), both),
        ("rows of drafts, fp8 kv, scales, fp8 out", (8, 2, 128), {"fp8": "scaled kv, out"}),
        ("rows of drafts, window, sinks", (8, 2, 64), {"window": 38, "sinks": dtype}),
        ("rows of drafts, chunks, sinks", (8, 2, 64), {"chunk": 38, "sinks": torch.float32}),
    ]
    for label, heads, options in some:
        yield Case(
            label, as_rows(batch(dtype, device, gen, drafts, heads, 16, padding=2, **options), 9)
        )
