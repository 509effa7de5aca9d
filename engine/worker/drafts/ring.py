"""``OutputRing`` keeps outputs of requests that have ended, in which drafts of others are found.

It is memory of the device, filled from the host as outputs end.  Each output has a salt, and serves
only slots of the same: as cached prefixes, outputs of one tenant speed up nobody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...messages.step import EndedOutput
from .rows import Send

_END = -1
"""The token behind each output."""


class OutputRing:
    """The ring, and ``ops.propose_suffix`` over it.

    Args:
        capacity: the number of tokens, at least 2.
        num_slots: the number of slots.
    """

    def __init__(self, ops: Any, capacity: int, num_slots: int, device: torch.device) -> None:
        def full(value: int, size: int, dtype: torch.dtype) -> Tensor:
            return torch.full((size,), value, dtype=dtype, device=device)

        self._ops, self._capacity, self._at = ops, capacity, 0
        self._tokens = full(_END, capacity, torch.int32)
        self._owners = full(0, capacity, torch.int64)
        self._head = full(0, 1, torch.int32)
        self._salts = full(0, num_slots, torch.int64)
        self._found = full(0, num_slots, torch.int64)

    def admit(self, slot: int, salt: int) -> None:
        """A request of ``salt`` begins in ``slot``."""
        self._salts[slot].fill_(salt)

    def remember(self, outputs: Sequence[EndedOutput], send: Send) -> None:
        """Put outputs in place of the oldest; of a long one the end stays."""
        for output in outputs:
            tokens = [*output.token_ids[1 - self._capacity :], _END]
            values = send(tokens, torch.int32)
            first = min(len(tokens), self._capacity - self._at)
            for part, at in ((values[:first], self._at), (values[first:], 0)):
                self._tokens[at : at + len(part)].copy_(part)
                self._owners[at : at + len(part)].fill_(output.salt)
            self._at = (self._at + len(tokens)) % self._capacity
        if outputs:
            self._head.fill_(self._at)

    def propose(self, *known: Any, drafts: Tensor, has_drafts: Tensor) -> None:
        """``ops.propose_suffix``; ``known`` is what ``ops.propose_ngrams`` takes before drafts."""
        ring = (self._tokens, self._owners, self._head, self._salts, self._found)
        self._ops("propose_suffix", *known, *ring, drafts, has_drafts)
