"""``argmax`` and ``sample`` over the vocabularies; the logits are as lm_head leaves them, in L2."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .harness import MODELS, KernelWork, benchmark_of, randn

BATCHES = (1, 8, 64, 256)


def logits(rows: int, vocab: int, device: torch.device) -> tuple[Any, ...]:
    return (3 * randn(rows, vocab, device=device),)


def make_sample(
    rows: int, vocab: int, top_k: int | None, top_p: float | None, device: torch.device
) -> tuple[Any, ...]:
    def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    k = None if top_k is None else column(top_k, torch.int32)
    p = None if top_p is None else column(top_p)
    state = (column(1, torch.int64), column(7, torch.int32))
    return (*logits(rows, vocab, device), column(0.8), k, p, None, *state)


def sample_by_torch(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, *_: Any
) -> Tensor:
    """As it is usually written: sort, cut, and the winner of an exponential race."""
    scaled = logits.float() / temperature[:, None]
    index = None
    if top_k is not None or top_p is not None:
        scaled, index = scaled.sort(dim=-1, descending=True)
    if top_k is not None:
        kth = scaled.gather(-1, top_k[:, None].long() - 1)
        scaled = scaled.masked_fill(scaled < kth, -torch.inf)
    probabilities = scaled.softmax(-1)
    if top_p is not None:
        above = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill(above >= top_p[:, None], 0.0)
    race = probabilities / torch.empty_like(probabilities).exponential_()
    winner = race.argmax(-1, keepdim=True)
    return winner if index is None else index.gather(-1, winner)


def works() -> Iterator[KernelWork]:
    for vocab in sorted({model.vocab for model in MODELS}):
        for rows in BATCHES:
            label = f"{rows} x {vocab}"
            libraries = {"torch": partial(torch.argmax, dim=-1)}
            yield KernelWork("argmax", label, partial(logits, rows, vocab), libraries=libraries)
            for top_k, top_p in ((None, None), (50, None), (None, 0.9), (50, 0.9)):
                how = f"top_k={top_k} top_p={top_p}" if top_k or top_p else "temperature"
                make_args = partial(make_sample, rows, vocab, top_k, top_p)
                rivals = {"torch": sample_by_torch}
                yield KernelWork("sample", f"{label}, {how}", make_args, libraries=rivals)


test_sampling = benchmark_of(works())
