"""``argmax`` picks the most probable token: greedy sampling."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..core.desc import Case, Cost, Draw, OpDesc, drawn
from ..core.op import Implementation, SemanticOp, dispatched, triton
from ..launches import sampling
from .noise import FLOAT32_MAX, largest_of_rows


@dispatched
def argmax(logits: Tensor) -> Tensor:
    """Index of the largest logit of each row; the lowest index wins ties.

    Args:
        logits: [num_seqs, vocab], floating point, last dimension contiguous.

    Returns:
        [num_seqs] int32; -1 for a row with a NaN, -2 for a row of only -inf: such a row has no
        token.  +inf is the largest finite float32.
    """
    return largest_of_rows(logits.float().clamp(max=FLOAT32_MAX))


def _fake(logits: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int32)


@drawn
def _cases(draw: Draw) -> Iterator[Case]:
    dtype = draw.dtype
    for shape in [(1, 1), (1, 33), (7, 1000), (3, 32003), (2, 151936)]:
        logits = draw.randn(*shape)
        yield Case(f"{list(shape)}", (logits.to(dtype),))
    # Half-precision rounding makes ties common: few distinct values, and padded rows.
    coarse = draw.integers(0, 4, 5, 9000).to(dtype)
    yield Case("ties", (coarse[:, :8190],))
    special = draw.randn(8, 5000).to(dtype)
    special[0] = torch.nan
    special[1] = -torch.inf
    special[2, 4321] = special[2, 4400] = torch.inf
    special[3, ::3] = torch.nan
    special[4, 4999] = -torch.nan
    special[5, 17], special[5, 3000] = torch.inf, torch.nan
    special[6], special[6, 2500] = -torch.inf, -3.0
    special[7], special[7, 0] = -torch.inf, torch.nan
    yield Case("nan and inf", (special,))


def _cost(desc: OpDesc) -> Cost:
    logits = desc["logits"]
    return Cost(bytes=logits.nbytes + 4 * logits.shape[0], flops=logits.numel)


OP = SemanticOp(
    reference=argmax,
    fake=_fake,
    cases=_cases,
    cost=_cost,
    implementations=(
        triton(sampling.argmax),
        Implementation("native", argmax, inline=True),
    ),
)
