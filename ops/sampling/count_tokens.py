"""``count_tokens`` counts sampled tokens into the penalty state, on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..core.desc import Case, Cost, Draw, OpDesc, drawn
from ..core.op import Implementation, SemanticOp, dispatched, nothing, triton
from ..launches import penalties


@dispatched
def count_tokens(token_ids: Tensor, slots: Tensor, output_counts: Tensor) -> None:
    """Add one to ``output_counts[slots[i], token_ids[i]]`` for each i; repeated pairs add up.

    Args:
        token_ids: [num_tokens] int32; a negative id is skipped.
        slots: [num_tokens] int32, state row of each token; -1 is skipped.
        output_counts: [max_num_seqs, vocab] int32, contiguous, mutated.
    """
    valid = (slots >= 0) & (token_ids >= 0)
    rows, columns = slots.clamp(min=0).long(), token_ids.clamp(min=0).long()
    output_counts.index_put_((rows, columns), valid.to(output_counts.dtype), accumulate=True)


def _triton_supports(desc: OpDesc) -> str:
    dtype = desc["output_counts"].dtype
    return "" if dtype == torch.int32 else f"output_counts are {dtype}, not torch.int32"


@drawn
def _cases(draw: Draw) -> Iterator[Case]:
    for num_tokens, max_num_seqs, vocab in [(1, 1, 17), (33, 4, 7), (300, 16, 1003)]:

        def integers(low: int, high: int, *shape: int) -> Tensor:
            return draw.integers(low, high, *shape).int()

        yield Case(
            f"{num_tokens} into {max_num_seqs} x {vocab}",
            (
                integers(-1, vocab, num_tokens),
                integers(-1, max_num_seqs, num_tokens),
                integers(0, 9, max_num_seqs, vocab),
            ),
        )


def _cost(desc: OpDesc) -> Cost:
    num_tokens = desc["token_ids"].numel
    return Cost(bytes=16 * num_tokens, flops=num_tokens)


OP = SemanticOp(
    reference=count_tokens,
    fake=nothing,
    cases=_cases,
    cost=_cost,
    implementations=(
        triton(penalties.count_tokens, _triton_supports),
        Implementation("native", count_tokens),
    ),
    mutates=("output_counts",),
    dtypes=(torch.int32,),
)
