"""Computes row by row on a CPU, where libraries choose the order of a sum by the number of rows.

These are the implementations "rowwise", for ``batch_invariant``, of the ops whose result for a row
would otherwise depend on the other rows.  They are slow: they serve tests, and comparisons with
that mode on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` of each row by itself."""
    rows = x.reshape(-1, x.shape[-1])
    out = x.new_empty((rows.shape[0], weight.shape[0]))
    for row in range(rows.shape[0]):
        # Copied: libraries also look at alignment.
        out[row] = F.linear(rows[row : row + 1].clone(), weight, bias)[0]
    return out.view(*x.shape[:-1], weight.shape[0])


def each_query(attend: Callable[..., None]) -> Callable[..., None]:
    """``attend``, an implementation of ``paged_attention``, for one query at a time: what it
    computes follows from the query's own position."""

    def run(*args: Any) -> None:
        q, kv_cache, block_table, seq_lens, query_start_loc, out, *rest = args
        alone = torch.tensor([0, 1], dtype=torch.int32)
        starts = query_start_loc.tolist()
        for sequence, context in enumerate(seq_lens.tolist()):
            first, stop = starts[sequence : sequence + 2] if context else (0, 0)
            table = block_table[sequence : sequence + 1]
            for row in range(first, stop):
                length = torch.tensor([context - (stop - row) + 1], dtype=torch.int32)
                one, result = q[row : row + 1].clone(), out[row : row + 1]
                attend(one, kv_cache, table, length, alone, result, *rest)

    return run


def each_row(reference: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """``reference`` for one row of its tensors at a time, the results put together again."""

    def run(*args: Any) -> tuple[Tensor, ...]:
        num_rows = args[0].shape[0]
        if num_rows < 2:
            return reference(*args)
        rows = [
            reference(*(a[i : i + 1].clone() if isinstance(a, Tensor) else a for a in args))
            for i in range(num_rows)
        ]
        return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))

    return run
