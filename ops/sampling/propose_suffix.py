"""``propose_suffix`` guesses that a sequence goes on as it did, or as an earlier output did."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..core.desc import Case, Cost, Draw, OpDesc, drawn
from ..core.op import Implementation, SemanticOp, dispatched, nothing, triton
from ..launches import tokens
from .propose_ngrams import own_place


@dispatched
def propose_suffix(
    history: Tensor,
    lengths: Tensor,
    slots: Tensor,
    order: Tensor,
    shortest: int,
    longest: int,
    ring: Tensor,
    owners: Tensor,
    head: Tensor,
    salts: Tensor,
    found: Tensor,
    drafts: Tensor,
    has_drafts: Tensor,
) -> None:
    """Write the drafts of every slot that is in a row of ``order`` 0, from its own tokens as
    ``propose_ngrams`` does, or from outputs of others: suffix decoding (Oliaro et al., 2024) with a
    longest match in place of a tree.

    The ring has outputs one behind the other, in a circle.  Of its places with the slot's salt, the
    one before which most tokens are the same as at the end of the sequence is taken, up to
    ``longest``, and the newest of these.  It serves if it has more of them than the sequence's own
    place.  What followed there is drafted up to the end of that output.

    Args:
        history, lengths, slots, order, shortest, longest, drafts, has_drafts: as of
            ``propose_ngrams``.
        ring: [capacity] int32, the tokens of outputs, each with -1 behind it; -1 elsewhere.
        owners: [capacity] int64, the salt of each of them.
        head: [1] int32, the oldest place, at which the next output begins.
        salts: [max_num_seqs] int64, the salt of each slot.
        found: [max_num_seqs] int64, zeros before and after.
    """
    most, capacity = drafts.shape[0], ring.shape[0]
    has_drafts.zero_()
    before = ring.roll(1)
    for row in (order == 0).nonzero().flatten().tolist():
        slot = int(slots[row])
        length = min(int(lengths[slot]), history.shape[1])
        known = history[slot, :length]
        count, first = own_place(known, shortest, longest)
        at = (before == known[-1:]).nonzero().flatten()
        at = at[(owners[at] == salts[slot]) & (ring[at] >= 0)]
        same = torch.zeros_like(at)
        alike = torch.ones_like(at, dtype=torch.bool)
        for back in range(1, min(longest, length) + 1):
            if not alike.any():
                break
            alike = alike & (ring[(at - back) % capacity] == known[-back])
            same += alike
        drafts[:, slot] = -1
        is_long = (same >= shortest) & (same > count)
        if is_long.any():
            age = (at - head) % capacity
            best = (torch.where(is_long, same, 0) * capacity + age).argmax()
            place = (at[best] + torch.arange(most, device=ring.device)) % capacity
            others = ring[place]
            is_over = (others < 0).cumsum(0) > 0
            drafts[:, slot], has_drafts[row] = torch.where(is_over, -1, others), 1
        elif count:
            behind = torch.arange(most, device=history.device) % (length - first)
            drafts[:, slot], has_drafts[row] = known[first + behind], 1


@drawn
def _cases(draw: Draw) -> Iterator[Case]:
    def ints(low: int, high: int, *shape: int) -> Tensor:
        return draw.integers(low, high, *shape).to(torch.int32)

    for num_seqs, width, most, shortest, longest, alphabet, capacity in [
        (1, 9, 1, 1, 1, 2, 2),
        (6, 40, 4, 1, 3, 4, 60),
        (11, 60, 6, 2, 9, 3, 5000),
        (5, 300, 3, 3, 24, 2, 2048),
    ]:
        max_num_seqs = num_seqs + 2
        history = ints(0, alphabet, max_num_seqs, width)
        lengths = ints(1, width + 1, max_num_seqs)
        ring = ints(0, alphabet, capacity)
        head = ints(0, capacity, 1)
        ring[ints(0, 20, capacity) == 0] = -1
        ring[int(head) - 1] = -1
        # Some sequences end as an output did, or nearly.
        for slot in range(0, num_seqs, 2):
            count = min(int(lengths[slot]), capacity - 1, longest + 1)
            end = int(lengths[slot])
            history[slot, end - count : end] = ring[:count].clamp(min=0)
        order = ints(-1, 2, num_seqs)
        order[0] = 0
        owners = draw.integers(0, 2, capacity // 8 + 1).repeat_interleave(8)[:capacity] * (1 << 40)
        salts = draw.integers(0, 2, max_num_seqs) * (1 << 40)
        rows = (history, lengths, draw.permutation(num_seqs).to(torch.int32), order)
        state = (ring, owners.contiguous(), head, salts, torch.zeros_like(salts))
        drafts = ints(0, 9, most, max_num_seqs)
        label = f"{num_seqs} of up to {width}, {shortest} to {longest} of {alphabet}, {capacity}"
        last = (drafts, ints(0, 9, num_seqs))
        yield Case(label, (*rows, shortest, longest, *state, *last))


def _cost(desc: OpDesc) -> Cost:
    return Cost(bytes=desc["history"].nbytes + desc["ring"].nbytes, flops=0)


OP = SemanticOp(
    reference=propose_suffix,
    fake=nothing,
    cases=_cases,
    cost=_cost,
    mutates=("found", "drafts", "has_drafts"),
    dtypes=(torch.int32,),
    implementations=(
        triton(tokens.propose_suffix),
        Implementation("native", propose_suffix),
    ),
)
