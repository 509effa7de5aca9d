"""Sampled sequences have the model's distribution with drafts, and the same tokens as without, over
200,000 tokens that ``sample`` draws and ``accept_tokens`` keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from fusewright import ops

from .test_sampling import chi_square, chi_square_limit

SEQUENCES, LENGTH, VOCAB, MOST = 8192, 25, 6, 3
"""Each sequence has LENGTH tokens behind its first: how many steps they took changes nothing."""


def sequences(table: Tensor, most: int, seed: int, *, trust: bool = False) -> Tensor:
    """[SEQUENCES, 1 + LENGTH] tokens of a model whose logits are a row of ``table`` [VOCAB, VOCAB]
    for each last token; its likeliest tokens are drafted, ``most`` in a step.  With ``trust`` a
    draft is right whatever was sampled."""
    device, rows = table.device, SEQUENCES * (1 + most)

    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    last, lengths, likeliest = ints(SEQUENCES), ints(SEQUENCES) + 1, table.argmax(-1).int()
    history, kept = ints(SEQUENCES, 1 + LENGTH), ints(rows)
    slots = torch.arange(SEQUENCES, dtype=torch.int32, device=device).repeat_interleave(1 + most)
    order = torch.arange(1 + most, dtype=torch.int32, device=device).repeat(SEQUENCES)
    seeds = slots.long() + (seed << 32)
    chances = torch.ones(MOST, device=device) if trust else None
    while int(lengths.min()) <= LENGTH:
        inputs = [last.clone()]
        for _ in range(most):
            inputs.append(likeliest[inputs[-1].long()])
        input_ids = torch.stack(inputs, 1).flatten()
        positions = lengths[slots.long()] + order
        warm = torch.ones(rows, device=device)
        drawn = (table[input_ids.long()], warm, None, None, None, seeds, positions)
        token_ids = ops.sample(*drawn)
        state = (last, lengths, history, chances, ints(SEQUENCES))
        ops.accept_tokens(*state, token_ids, input_ids, slots, order, positions, kept, kept.clone())
    return history


def statistic(tokens: Tensor, table: Tensor) -> float:
    """Chi-square of the tokens behind each token, all of whose distributions are known."""
    pairs = torch.stack((tokens[:, :-1], tokens[:, 1:])).flatten(1)
    after = [pairs[1, pairs[0] == token] for token in range(VOCAB)]
    rows = zip(after, torch.softmax(table, -1), strict=True)
    return sum(chi_square(each, row) for each, row in rows)


def test_drafts_keep_tokens_and_distribution(device: torch.device) -> None:
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)).to(device)
    limit = chi_square_limit(VOCAB * (VOCAB - 1))
    plain, drafted = (sequences(table, most, seed=7) for most in (0, MOST))
    assert drafted[:, 1:].numel() > 200_000
    assert torch.equal(plain, drafted)
    assert statistic(drafted, table) < limit
    other = sequences(table, MOST, seed=8)
    assert not torch.equal(other, drafted) and statistic(other, table) < limit


def test_the_statistic_tells_a_draft_that_is_kept_unseen(device: torch.device) -> None:
    """Where drafts are kept whatever the model samples, text behind them does not follow it."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)).to(device)
    trusted = sequences(table, 1, seed=7, trust=True)
    assert statistic(trusted, table) > chi_square_limit(VOCAB * (VOCAB - 1))
