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
        hidden_caches: one for each place whose hidden states are kept, [num_blocks, 2, block_size,
            pieces, width]; written.
    """

    groups: tuple[CacheInputs, ...]
    seq_lens: Tensor
    query_start_loc: Tensor
    hidden_caches: tuple[Tensor, ...] = ()


class HeadInputs(NamedTuple):
    """What a draft head reads and writes beside what any model does.

    Attributes:
        hidden: [num_tokens, hidden_size], the hidden state that each token follows.
        slots: [num_seqs + 1] int32, the row of ``fed`` of each sequence, and one more; -1 stores
            nothing.
        fed: [max_num_seqs, 2, 1, pieces, width], the head's own last hidden state of each sequence,
            which its next draft follows; written.
    """

    hidden: Tensor
    slots: Tensor
    fed: Tensor
