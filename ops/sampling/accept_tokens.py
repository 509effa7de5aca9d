"""``accept_tokens`` says which rows of drafts are right, and keeps their tokens by slot."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...config.step_fields import NO_DRAFT, NO_SAMPLE, NOT_DRAFTED, REJECTED
from ..core.desc import Case, Cost, Draw, OpDesc, drawn
from ..core.op import Implementation, SemanticOp, dispatched, nothing, triton
from ..launches import tokens
from .noise import chance


@dispatched
def accept_tokens(
    last_tokens: Tensor,
    lengths: Tensor,
    history: Tensor,
    chances: Tensor | None,
    judged: Tensor,
    token_ids: Tensor,
    input_ids: Tensor,
    slots: Tensor,
    order: Tensor,
    seq_lens: Tensor,
    kept: Tensor,
    read: Tensor,
) -> None:
    """Keep the tokens of all rows whose drafts are right, as ``keep_tokens`` does without drafts.

    The rows of a request follow each other, each of one token.  A draft, which is the input of its
    row, is right if the row before sampled it and all drafts before are right.

    Args:
        last_tokens: [max_num_seqs] int32, written: the newest token of each slot.
        lengths: [max_num_seqs] int32, written: the number of tokens of each slot with that one.
        history: [max_num_seqs, width] int32, written: the tokens of each slot by position; those
            that have no place are left out, all where ``width`` is 0.
        chances: [most] float32: a slot's drafts are judged by chance, the probability of each of
            its positions, where ``judged`` says so.  The chance depends on that and the position.
        judged: [max_num_seqs] int32, a seed, or -1.
        token_ids: [num_seqs] int32, as sampled; negative ids are of rows without a token.
        input_ids: [num_seqs] int32; a row's number is that of its token where it has a draft.
        slots: [num_seqs] int32.
        order: [num_seqs] int32, see ``config.ORDER``; rows that sample nothing keep nothing.
        seq_lens: [num_seqs] int32, the position of the token that a row samples.
        kept, read: [num_seqs] int32, written: the tokens; ``REJECTED`` in a row behind a wrong
            draft, ``NOT_DRAFTED`` in one without.  ``read`` may be the host's memory.
    """
    rows = torch.arange(token_ids.shape[0], device=token_ids.device)
    number, before = order.clamp(min=0).long(), (rows - 1).clamp(min=0)
    right = input_ids == token_ids[before]
    if chances is not None:
        seeds = judged[slots]
        is_below = chance(seeds, seq_lens - 1) < chances[(number - 1).clamp(min=0)]
        right = torch.where(seeds < 0, right, is_below)
    wrong = ((number > 0) & ~right).cumsum(0)
    is_kept = (order >= 0) & (wrong == wrong[rows - number])
    after = torch.cat((is_kept[1:] & (number[1:] > 0), is_kept.new_zeros(1)))
    last = is_kept & ~after
    of = slots[last]
    last_tokens[of] = token_ids[last].clamp(min=0)
    lengths[of] = seq_lens[last] + 1
    stored = is_kept & (seq_lens < history.shape[1])
    history[slots[stored], seq_lens[stored]] = token_ids[stored].clamp(min=0)
    result = torch.where(is_kept | (order == NO_SAMPLE), token_ids, REJECTED)
    result = torch.where(order == NO_DRAFT, NOT_DRAFTED, result)
    kept.copy_(result)
    read.copy_(result)


@drawn
def _cases(draw: Draw) -> Iterator[Case]:
    def ints(low: int, high: int, *shape: int) -> Tensor:
        return draw.integers(low, high, *shape).to(torch.int32)

    for groups, most, max_num_seqs, width, kind in [
        (1, 1, 1, 8, ""),
        (5, 4, 8, 33, "history"),
        (40, 5, 50, 20, "chances"),
        (90, 7, 100, 64, "history"),
    ]:
        counts = draw.integers(0, most + 1, groups)
        of = torch.repeat_interleave(torch.arange(groups, device=counts.device), counts + 1)
        firsts = (counts + 1).cumsum(0) - counts - 1
        order = (torch.arange(len(of), device=of.device) - firsts[of]).to(torch.int32)
        ends = draw.integers(0, 4, len(of))
        order[(order == 0) & (counts[of] == 0) & (ends == 0)] = NO_SAMPLE
        has_none = (ends == 0) & (order > 0)
        order[has_none & torch.cat((of[1:] != of[:-1], has_none[:1] | True))] = NO_DRAFT
        slots = draw.permutation(max_num_seqs)[:groups].to(torch.int32)[of]
        tokens = ints(-1, 3, len(of))
        inputs = torch.where(ints(0, 4, len(of)) > 0, tokens.roll(1).clamp(min=0), 1)
        lens = ints(1, width - most + 2, groups)[of] + order.clamp(min=0)
        yield Case(
            f"{len(of)} rows of {groups}, {kind or 'plain'}",
            (
                ints(0, 9, max_num_seqs),
                ints(0, 9, max_num_seqs),
                ints(0, 9, max_num_seqs, width if kind == "history" else 0),
                draw.rand(most) if kind == "chances" else None,
                ints(-1, 5, max_num_seqs),
                tokens,
                inputs.to(torch.int32),
                slots,
                order,
                lens.to(torch.int32),
                ints(0, 9, len(of)),
                ints(0, 9, len(of)),
            ),
        )


def _cost(desc: OpDesc) -> Cost:
    return Cost(bytes=8 * desc["slots"].nbytes, flops=0)


OP = SemanticOp(
    reference=accept_tokens,
    fake=nothing,
    cases=_cases,
    cost=_cost,
    mutates=("last_tokens", "lengths", "history", "kept", "read"),
    dtypes=(torch.int32,),
    implementations=(
        triton(tokens.accept_tokens),
        Implementation("native", accept_tokens),
    ),
)
