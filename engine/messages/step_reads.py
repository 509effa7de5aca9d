"""``StepReads``: what the worker tells the core of the bytes that a step cannot avoid to read."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from .step import Ints


class CacheReads(Struct, frozen=True):
    """What the layers of one cache group read of a sequence.

    Attributes:
        token_bytes: bytes of each position that a query sees, or of the whole sequence if
            ``per_sequence``.
        window: tokens that a query sees, itself included; 0: all.
        per_sequence: the layers keep a state of fixed size for a sequence.
    """

    token_bytes: float
    window: int = 0
    per_sequence: bool = False

    def count(self, starts: Ints, query_lens: Ints) -> float:
        """Bytes of all sequences of a step; arguments as of ``StepReads.count``."""
        if self.per_sequence:
            return self.token_bytes * len(starts)
        seen = starts + query_lens
        if self.window:
            np.minimum(seen, query_lens + (self.window - 1), out=seen)
        return self.token_bytes * int(seen.sum(dtype=np.int64))


class StepReads(Struct, frozen=True):
    """Bytes of device memory that one rank has to read for a step: the least that any kernels could
    do with.  Activations, what is written, and rows that are gathered are not counted.

    Of experts, those count that the tokens of a step choose on average if every expert is equally
    likely.  Real routers prefer some, so that they read less than that, and never more on average.
    A cached block that several sequences share counts for each of them, since each reads it.

    Attributes:
        weights: bytes that every step reads.
        experts: bytes of all routed experts that the rank holds.
        expert_share: the share of all experts that one token chooses.
        caches: a group of layers each.
    """

    weights: int = 0
    experts: int = 0
    expert_share: float = 0.0
    caches: tuple[CacheReads, ...] = ()

    def count(self, starts: Ints, query_lens: Ints) -> float:
        """Bytes of a step.

        Args:
            starts: [num_seqs] position of each sequence's first query token.
            query_lens: [num_seqs] number of its query tokens.
        """
        total: float = self.weights
        if self.experts:
            missed = (1.0 - self.expert_share) ** int(query_lens.sum())
            total += self.experts * (1.0 - missed)
        for cache in self.caches:
            total += cache.count(starts, query_lens)
        return total
