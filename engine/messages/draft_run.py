"""``DraftRun``: what the worker tells the core at the start of its draft model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .step import Batch, Ints

Run = Callable[[Sequence[Batch]], list[Ints]]
"""Runs batches of a draft model one behind the other, waits for them, and returns the tokens of
each; it raises whatever went wrong."""


@dataclass(frozen=True)
class DraftRun:
    """A draft model as the core uses it.

    Attributes:
        group: the target's group of layers whose blocks it uses.
        block_size: tokens a KV block.
        max_model_len: most tokens of a sequence that it can read.
        max_tokens: most tokens of a batch.
        epoch: how often its KV cache has been made anew, with nothing in it.
        share: bytes of its weights by those of the target, which is about what a draft takes.
        failure: why it cannot run any more, or "".
        reads_hidden: it is a head, whose row of a token is at the position of the token before it,
            and reads the hidden state that the target has kept there.
    """

    run: Run
    epoch: Callable[[], int]
    group: int
    block_size: int
    max_model_len: int
    max_tokens: int
    share: float
    failure: Callable[[], str]
    reads_hidden: bool = False
