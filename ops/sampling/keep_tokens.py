"""``keep_tokens`` keeps the newest sampled token of every request on the device, by slot."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..core.desc import Case, Cost, Draw, OpDesc, drawn
from ..core.op import Implementation, SemanticOp, dispatched, nothing, triton
from ..launches import tokens


@dispatched
def keep_tokens(last_tokens: Tensor, token_ids: Tensor, slots: Tensor, read: Tensor) -> None:
    """Set ``last_tokens[slots[i]] = max(token_ids[i], 0)`` and ``read[i] = token_ids[i]``.

    The next step reads ``last_tokens`` as input ids before the host knows that a row has no token
    (a negative id, see ``argmax``).

    Args:
        last_tokens: [max_num_seqs] int32, written.
        token_ids: [num_seqs] int32, as sampled.
        slots: [num_seqs] int32, none negative; of several rows of a slot any one is kept there.
        read: [num_seqs] int32, written: what the host reads, its own memory or not.
    """
    last_tokens[slots] = token_ids.clamp(min=0)
    read.copy_(token_ids)


@drawn
def _cases(draw: Draw) -> Iterator[Case]:
    for num_seqs, max_num_seqs in [(1, 1), (5, 8), (257, 300)]:
        last = draw.integers(0, 1000, max_num_seqs).to(draw.dtype)
        ids = draw.integers(-2, 1000, num_seqs).to(draw.dtype)
        ids[num_seqs // 2] = -1
        slots = draw.permutation(max_num_seqs)[:num_seqs]
        yield Case(f"{num_seqs} of {max_num_seqs}", (last, ids, slots.to(torch.int32), ids + 1))


def _cost(desc: OpDesc) -> Cost:
    return Cost(bytes=4 * desc["slots"].nbytes, flops=0)


OP = SemanticOp(
    reference=keep_tokens,
    fake=nothing,
    cases=_cases,
    cost=_cost,
    mutates=("last_tokens", "read"),
    dtypes=(torch.int32,),
    implementations=(
        triton(tokens.keep_tokens),
        Implementation("native", keep_tokens),
    ),
)
