"""What the queries of a step see of a paged cache: K and V in tensors, for attention by PyTorch.

A step of decodes has one query in each of many sequences.  They are computed together, up to some
padding: a dozen calls of PyTorch for each sequence would take most of a step's time on a CPU.

Shape suffixes as in ``paged_attention``: S sequences, Q queries of each, K keys, G KV heads, D
head_dim; B blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ..launches.paged_attention import AttentionArgs, first_seen

_MAX_VALUES = 1 << 24
"""Most values of K that several sequences have together, padding included."""


@dataclass(frozen=True)
class SeenGroup:
    """One sequence, or several of one query each.

    Attributes:
        rows: the queries' rows of q and out: of one sequence, or one of each.
        k, v: SKGD, as they are cached; zeros where a sequence has no such key or its only query
            does not see it.
        is_causal: there are as many queries as keys, and each sees all up to its own.
        hides: whether some query does not see some key.
    """

    rows: slice | Tensor
    k: Tensor
    v: Tensor
    is_causal: bool
    hides: bool
    _seen: Callable[[slice], Tensor]

    @property
    def num_queries(self) -> int:
        """Of each sequence."""
        return self.rows.stop - self.rows.start if isinstance(self.rows, slice) else 1

    def visible(self, some: slice = slice(None)) -> Tensor:
        """Whether some of the queries see each key: SQK bool."""
        return self._seen(some)

    def take(self, q: Tensor, some: slice = slice(None)) -> Tensor:
        """Some of the queries: SQND."""
        if isinstance(self.rows, slice):
            return q[self.rows][some][None]
        return q[self.rows][:, None]

    def store(self, out: Tensor, result_SQND: Tensor, some: slice = slice(None)) -> None:
        """Write results of some of the queries, in the dtype of ``out`` or one that it rounds."""
        if isinstance(self.rows, slice):
            out[self.rows][some] = result_SQND[0]
            return
        result = result_SQND[:, 0].to(out.dtype)
        if out.dtype.itemsize == 1:  # PyTorch does not write FP8 by index
            out, result = out.view(torch.uint8), result.view(torch.uint8)
        out[self.rows] = result


@dataclass(frozen=True)
class _Sequence:
    number: int
    first_row: int
    num_queries: int
    context: int
    first_key: int

    @property
    def num_keys(self) -> int:
        return self.context - self.first_key


def seen_groups(call: AttentionArgs) -> Iterator[SeenGroup]:
    """All sequences that have queries, in groups.  Slots that no query may see are not used."""
    sequences = [*_sequences(call)]
    decodes = [sequence for sequence in sequences if sequence.num_queries == 1]
    others = [sequence for sequence in sequences if sequence.num_queries > 1]
    for together in _alike(decodes, call.kv_cache):
        if len(together) > 1:
            yield _of_decodes(call, together)
        else:
            others += together
    for sequence in others:
        yield _of_one(call, sequence)


def _sequences(call: AttentionArgs) -> Iterator[_Sequence]:
    starts = call.query_start_loc.tolist()
    for number, context in enumerate(call.seq_lens.tolist()):
        num_queries = starts[number + 1] - starts[number]
        if context and num_queries:
            first = first_seen(context - num_queries, call.sliding_window, call.chunk)
            yield _Sequence(number, starts[number], num_queries, context, first)


def _alike(decodes: list[_Sequence], kv_cache: Tensor) -> Iterator[list[_Sequence]]:
    """Sequences of similar lengths: the longest of a group has less than twice the keys of the
    shortest, or all have few."""
    _, _, block_size, kv_heads, head_dim = kv_cache.shape
    ordered = sorted(decodes, key=lambda sequence: sequence.num_keys)
    for _, group in groupby(ordered, lambda each: (each.num_keys // (8 * block_size)).bit_length()):
        members = [*group]
        longest = members[-1].num_keys + 2 * block_size
        step = max(1, _MAX_VALUES // (longest * kv_heads * head_dim))
        for begin in range(0, len(members), step):
            yield members[begin : begin + step]


def _of_decodes(call: AttentionArgs, sequences: list[_Sequence]) -> SeenGroup:
    kv_cache, device = call.kv_cache, call.q.device
    block_size = kv_cache.shape[2]
    first_blocks = [sequence.first_key // block_size for sequence in sequences]
    ends = [-(-sequence.context // block_size) for sequence in sequences]
    most = max(end - first for first, end in zip(first_blocks, ends, strict=True))
    columns = [
        (sequence.number, sequence.first_row, sequence.context - 1, first, end)
        for sequence, first, end in zip(sequences, first_blocks, ends, strict=True)
    ]
    numbers, rows, queries, first, end = torch.tensor(columns, device=device).unbind(1)
    blocks_SB = first[:, None] + torch.arange(most, device=device)
    there_SB = blocks_SB < end[:, None]
    ids_SB = call.block_table[numbers[:, None], blocks_SB.where(there_SB, first[:, None])].long()
    keys_SK = (first * block_size)[:, None] + torch.arange(most * block_size, device=device)
    visible_SK = _visible(call, queries[:, None], keys_SK)
    k_SKGD, v_SKGD = (kv_cache[:, i][ids_SB].flatten(1, 2) for i in range(2))
    hides = not bool(visible_SK.all())
    if hides:
        for copied in (k_SKGD, v_SKGD):
            # FP8 has no masked_fill; all bits zero are its zero.
            bits = copied.view(torch.uint8) if copied.dtype.itemsize == 1 else copied
            bits.masked_fill_(~visible_SK[:, :, None, None], 0)
    return SeenGroup(rows, k_SKGD, v_SKGD, False, hides, lambda _: visible_SK[:, None])


def _of_one(call: AttentionArgs, sequence: _Sequence) -> SeenGroup:
    """K and V are exactly the keys that some query sees."""
    kv_cache, device = call.kv_cache, call.q.device
    block_size, context, first_key = kv_cache.shape[2], sequence.context, sequence.first_key
    first_query = context - sequence.num_queries
    first_block = first_key // block_size
    ids = call.block_table[sequence.number, first_block : -(-context // block_size)].long()
    keys = slice(first_key - first_block * block_size, context - first_block * block_size)
    k_SKGD, v_SKGD = (t.flatten(0, 1)[None, keys] for t in kv_cache[ids].unbind(1))
    last_sees = first_seen(context - 1, call.sliding_window, call.chunk)

    def seen(some: slice) -> Tensor:
        queries = torch.arange(first_query, context, device=device)[some, None]
        return _visible(call, queries, torch.arange(first_key, context, device=device))[None]

    several = sequence.num_queries > 1
    return SeenGroup(
        slice(sequence.first_row, sequence.first_row + sequence.num_queries),
        k_SKGD,
        v_SKGD,
        is_causal=several and last_sees <= first_key == first_query,
        hides=several,
        _seen=seen,
    )


def _visible(call: AttentionArgs, query: Tensor, key: Tensor) -> Tensor:
    """Of positions that are broadcast: whether the query sees the key."""
    visible = key <= query
    if call.sliding_window > 0:
        visible &= key > query - call.sliding_window
    if call.chunk > 0:
        visible &= key >= query - query % call.chunk
    return visible
