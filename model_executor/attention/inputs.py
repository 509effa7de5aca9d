"""The attention metadata of one step: a pytree that traces to ordinary graph inputs."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class CacheInputs(NamedTuple):
    """Where the layers of one group find their sequences' caches.

    Attributes:
        slot_mapping: [num_tokens] int32, where each token of the step is stored: block id *
            block_size + offset, or the block id alone where a block holds a whole sequence; -1
            stores nothing.
        block_table: [num_seqs, max_blocks] int32, KV block ids of every sequence in order; those
            behind the window may belong to others.
    """

    slot_mapping: Tensor
    block_table: Tensor


class AttentionInputs(NamedTuple):
    """Which cached tokens every query token of a step may read, and where the new ones go.

    Attributes:
        groups: one ``CacheInputs`` for each group of layers.
        seq_lens: [num_seqs] int32, context length including this step's tokens; 0 skips the row.
        query_start_loc: [num_seqs + 1] int32, prefix sums of the query lengths.
    """

    groups: tuple[CacheInputs, ...]
    seq_lens: Tensor
    query_start_loc: Tensor
