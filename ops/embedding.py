"""``embedding`` gathers rows of the token table."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ._launch import Launch
from ._op import Case, Cost, Implementation, OpDesc, SemanticOp, Tolerance, triton
from .launches import gather


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """``weight[ids]``.

    Args:
        ids: [num_tokens] int32.  Ids outside the vocabulary, as padding rows may have, are clamped.
        weight: [vocab, hidden], at least one row.

    Returns:
        [num_tokens, hidden], contiguous.
    """
    return torch.ops.fw.embedding.default(ids, weight)  # type: ignore[no-any-return]


def _reference(ids: Tensor, weight: Tensor) -> Tensor:
    return F.embedding(ids.clamp(0, weight.shape[0] - 1), weight)


def _fake(ids: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty((ids.shape[0], weight.shape[1]))


def _launches(ids: Tensor, weight: Tensor) -> tuple[list[Launch], Tensor]:
    return gather.gather_rows(ids, weight, ids.shape[0])


def _cases(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Iterator[Case]:
    for num_tokens, vocab, hidden in [(1, 300, 64), (13, 1000, 130), (3, 17, 4096), (0, 5, 64)]:
        weight = torch.randn((vocab, hidden), generator=gen, device=device).to(dtype)
        ids = torch.randint(0, vocab, (num_tokens,), generator=gen, device=device).int()
        yield Case(f"{num_tokens} of {vocab} x {hidden}", (ids, weight))
    weight = torch.randn((9, 64), generator=gen, device=device).to(dtype)
    ids = torch.tensor([0, 8, 9, -1, 2**31 - 1, -(2**31)], dtype=torch.int32, device=device)
    yield Case("padding rows out of range", (ids, weight))


def _cost(desc: OpDesc) -> Cost:
    ids, weight = desc["ids"], desc["weight"]
    row_bytes = weight.shape[1] * weight.dtype.itemsize
    return Cost(bytes=ids.nbytes + 2 * ids.shape[0] * row_bytes, flops=0)


_EXACT = Tolerance(0.0, 0.0)

OP = SemanticOp(
    name="embedding",
    reference=_reference,
    fake=_fake,
    cases=_cases,
    cost=_cost,
    implementations=(
        triton(_launches),
        Implementation("native", _reference, inline=True),
    ),
    tolerances={torch.float32: _EXACT, torch.bfloat16: _EXACT, torch.float16: _EXACT},
)
