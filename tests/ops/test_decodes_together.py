"""Decodes of many sequences are attended in groups on a CPU, each as if it were alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusewright.ops import BY_NAME
from fusewright.ops.attention import seen
from fusewright.ops.launches.paged_attention import AttentionArgs

OP = BY_NAME["paged_attention"]
LENGTHS = [1, 300, 0, 17, 16, 5, 33, 299, 64, 2]
BLOCK, HEADS, KV_HEADS, DIM = 16, 4, 2, 32
NO_BLOCK = -7
"""What tables hold behind a sequence's last block: nobody may look there."""


def step(window: int, chunk: int, fp8: bool) -> tuple[Any, ...]:
    """A decode of each length, over a cache that is NaN wherever no query sees it."""
    counts = [-(-length // BLOCK) for length in LENGTHS]
    cache = torch.full((sum(counts) + 1, 2, BLOCK, KV_HEADS, DIM), torch.nan)
    table = torch.full((len(LENGTHS), max(counts) + 1), NO_BLOCK, dtype=torch.int32)
    ids = iter(torch.randperm(sum(counts)).tolist())
    for row, (length, count) in enumerate(zip(LENGTHS, counts, strict=True)):
        table[row, :count] = torch.tensor([next(ids) for _ in range(count)])
        for place in range(length - window if window else 0, length):
            if place >= 0 and (not chunk or place >= (length - 1) // chunk * chunk):
                cache[table[row, place // BLOCK], :, place % BLOCK] = torch.randn(2, KV_HEADS, DIM)
    q = torch.randn(len(LENGTHS), HEADS, DIM)
    starts = torch.arange(len(LENGTHS) + 1, dtype=torch.int32)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    scales = torch.rand(2, KV_HEADS) + 0.5 if fp8 else None
    cache = cache.to(torch.float8_e4m3fn) if fp8 else cache
    out = torch.full_like(q, 7.0)
    return q, cache, table, lengths, starts, out, 0.2, window, 0.0, scales, None, None, chunk


@pytest.mark.parametrize("name", ["reference", "native"])
@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize(("window", "chunk"), [(0, 0), (20, 0), (0, 48)])
def test_a_decode_among_others_is_as_it_is_alone(
    name: str, fp8: bool, window: int, chunk: int
) -> None:
    run = OP.reference if name == "reference" else OP.overload("native")
    args = step(window, chunk, fp8)
    run(*args)
    q, cache, table, lengths, _, out, *rest = args
    assert out[2].eq(7.0).all(), "there is no such sequence"
    for row, length in enumerate(LENGTHS):
        if length:
            alone, one = torch.empty(1, HEADS, DIM), torch.tensor([0, 1], dtype=torch.int32)
            own = table[row : row + 1], lengths[row : row + 1], one
            run(q[row : row + 1], cache, *own, alone, *rest)
            assert alone.isfinite().all()
            torch.testing.assert_close(out[row : row + 1], alone)


def test_groups_are_few_and_of_similar_lengths() -> None:
    groups = [*seen.seen_groups(AttentionArgs(*step(0, 0, False)))]
    rows = [len(group.rows) for group in groups if not isinstance(group.rows, slice)]
    assert sum(rows) == len(LENGTHS) - 1 and len(rows) == 2
    assert sorted(group.k.shape[1] for group in groups) == [64, 304]


def test_a_group_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what its keys would take; the rest is another group."""
    args = step(0, 0, False)
    OP.reference(*args)
    monkeypatch.setattr(seen, "_MAX_VALUES", 350 * KV_HEADS * DIM)
    again = (*args[:5], torch.full_like(args[5], 7.0), *args[6:])
    OP.reference(*again)
    assert len([*seen.seen_groups(AttentionArgs(*args))]) > 2
    torch.testing.assert_close(again[5], args[5])
