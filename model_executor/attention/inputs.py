"""The attention metadata of one step: a pytree that traces to ordinary graph inputs."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AttentionInputs(NamedTuple):
    """Which cached tokens every query token of a step may read.

    Attributes:
        block_table: [num_seqs, max_blocks] int32, KV block ids of every sequence in order.
        seq_lens: [num_seqs] int32, context length including this step's tokens; 0 skips the row.
        query_start_loc: [num_seqs + 1] int32, prefix sums of the query lengths.
    """

    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
