"""``propose_ngrams`` guesses that a sequence goes on as it did behind the same tokens before."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...config.step_fields import MOST_LOOKS
from ..core.desc import Case, Cost, Draw, OpDesc, drawn
from ..core.op import Implementation, SemanticOp, dispatched, nothing, triton
from ..launches import tokens


@dispatched
def propose_ngrams(
    history: Tensor,
    lengths: Tensor,
    slots: Tensor,
    order: Tensor,
    shortest: int,
    longest: int,
    drafts: Tensor,
    has_drafts: Tensor,
) -> None:
    """Write the drafts of every slot that is in a row of ``order`` 0: prompt lookup decoding
    (Saxena, 2023), as ``engine/core/ngram.py`` does on the host.

    Of the last ``MOST_LOOKS`` earlier places of the last ``shortest`` tokens, it takes the one
    before which most tokens are the same as at the end, up to ``longest``, and the latest of these.
    What followed there is drafted, again and again.

    Args:
        history: [max_num_seqs, width] int32, the tokens of each slot by position.
        lengths: [max_num_seqs] int32, how many there are.
        slots, order: [num_seqs] int32.
        drafts: [most, max_num_seqs] int32, written; -1 where there is no such place.
        has_drafts: [num_seqs] int32, written: 1 in a row whose slot has drafts, else 0; it may be
            the host's memory.
    """
    most = drafts.shape[0]
    has_drafts.zero_()
    for row in (order == 0).nonzero().flatten().tolist():
        slot = int(slots[row])
        length = min(int(lengths[slot]), history.shape[1])
        known = history[slot, :length]
        count, first = own_place(known, shortest, longest)
        drafts[:, slot] = -1
        if count:
            behind = torch.arange(most, device=history.device) % (length - first)
            drafts[:, slot], has_drafts[row] = known[first + behind], 1


def own_place(known: Tensor, shortest: int, longest: int) -> tuple[int, int]:
    """(how many tokens are the same, the position behind them) of the place of the last tokens of
    ``known`` [length] that is taken; (0, 0) if there is none."""
    length = known.shape[0]
    at = torch.arange(shortest, max(length, shortest), device=known.device)
    alike, count = torch.ones_like(at, dtype=torch.bool), torch.zeros_like(at)
    for back in range(1, longest + 1):
        alike = alike & (at >= back) & (known[(at - back).clamp(min=0)] == known[-back:][:1])
        count += alike
    latest = (count >= shortest).nonzero().flatten()[-MOST_LOOKS:]
    if not latest.numel():
        return 0, 0
    best = latest[(count[latest] * (length + 1) + at[latest]).argmax()]
    return int(count[best]), int(at[best])


@drawn
def _cases(draw: Draw) -> Iterator[Case]:
    def ints(low: int, high: int, *shape: int) -> Tensor:
        return draw.integers(low, high, *shape).to(torch.int32)

    for num_seqs, width, most, shortest, longest, alphabet in [
        (1, 9, 1, 1, 1, 2),
        (6, 40, 4, 1, 3, 4),
        (5, 1500, 6, 2, 5, 7),
        (5, 2500, 3, 3, 8, 2),
        (4, 1300, 2, 5, 5, 30),
        (12, 90, 4, 1, 4, 2),
    ]:
        max_num_seqs = num_seqs + 2
        history = ints(0, alphabet, max_num_seqs, width)
        lengths = ints(1, width + 1, max_num_seqs)
        lengths[0] = width
        order = ints(-1, 2, num_seqs)
        order[0] = 0
        slots = draw.permutation(num_seqs).to(torch.int32)
        slots[0], slots[slots == 0] = 0, slots[0].clone()
        drafts = ints(0, 9, most, max_num_seqs)
        label = f"{num_seqs} of up to {width}, {shortest} to {longest} of {alphabet}"
        rows = (history, lengths, slots, order, shortest, longest, drafts, ints(0, 9, num_seqs))
        yield Case(label, rows)


def _cost(desc: OpDesc) -> Cost:
    return Cost(bytes=desc["history"].nbytes, flops=0)


OP = SemanticOp(
    reference=propose_ngrams,
    fake=nothing,
    cases=_cases,
    cost=_cost,
    mutates=("drafts", "has_drafts"),
    dtypes=(torch.int32,),
    implementations=(
        triton(tokens.propose_ngrams),
        Implementation("native", propose_ngrams),
    ),
)
