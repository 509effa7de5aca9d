"""``embedding`` gathers rows of the token table."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.desc import EXACT, Case, Cost, Draw, OpDesc, drawn
from ..core.launch import Launches
from ..core.op import Implementation, SemanticOp, dispatched, triton
from ..launches import tokens as kernels


@dispatched
def embedding(ids: Tensor, weight: Tensor, first_id: Tensor | None = None) -> Tensor:
    """``weight[ids]``, or a rank's summand of it.

    Args:
        ids: [num_tokens] int32.  Ids outside the vocabulary, as padding rows may have, are clamped.
        weight: [vocab, hidden], at least one row.
        first_id: [1] int32, the id of row 0 of a ``weight`` that is one rank's part of the
            vocabulary.  The row of an id that lies in another part is zeros, so that the sum over
            the ranks is the embedding.

    Returns:
        [num_tokens, hidden], contiguous.
    """
    if first_id is None:
        return F.embedding(ids.clamp(0, weight.shape[0] - 1), weight)
    row = ids.long() - first_id
    found = F.embedding(row.clamp(0, weight.shape[0] - 1), weight)
    is_here = (row >= 0) & (row < weight.shape[0])
    return torch.where(is_here.unsqueeze(-1), found, 0)


def _fake(ids: Tensor, weight: Tensor, first_id: Tensor | None = None) -> Tensor:
    return weight.new_empty((ids.shape[0], weight.shape[1]))


def _launches(ids: Tensor, weight: Tensor, first_id: Tensor | None = None) -> Launches[Tensor]:
    return kernels.gather_rows(ids, weight, ids.shape[0], first=first_id)


@drawn
def _cases(draw: Draw) -> Iterator[Case]:
    device = draw.device
    for num_tokens, vocab, hidden in [(1, 300, 64), (13, 1000, 130), (3, 17, 4096), (0, 5, 64)]:
        weight = draw.randn(vocab, hidden).to(draw.dtype)
        ids = draw.integers(0, vocab, num_tokens).int()
        yield Case(f"{num_tokens} of {vocab} x {hidden}", (ids, weight))
    weight = draw.randn(9, 64).to(draw.dtype)
    ids = torch.tensor([0, 8, 9, -1, 2**31 - 1, -(2**31)], dtype=torch.int32, device=device)
    yield Case("padding rows out of range", (ids, weight))
    ids = torch.tensor([0, 8, 9, 17, 18, -1, 2**31 - 1], dtype=torch.int32, device=device)
    first = torch.tensor([9], dtype=torch.int32, device=device)
    yield Case("the second half of a vocabulary", (ids, weight, first))


def _cost(desc: OpDesc) -> Cost:
    ids, weight = desc["ids"], desc["weight"]
    row_bytes = weight.shape[1] * weight.dtype.itemsize
    return Cost(bytes=ids.nbytes + 2 * ids.shape[0] * row_bytes, flops=0)


OP = SemanticOp(
    reference=embedding,
    fake=_fake,
    cases=_cases,
    cost=_cost,
    implementations=(
        triton(_launches),
        Implementation("native", embedding, inline=True),
    ),
    tolerances=EXACT,
)
