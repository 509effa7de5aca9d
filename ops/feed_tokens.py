"""``feed_tokens``: tokens sampled by the step before become inputs without leaving the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ._launch import Launch, run_launches
from ._op import Case, Cost, Implementation, OpDesc, SemanticOp
from .launches import tokens


def feed_tokens(input_ids: Tensor, last_tokens: Tensor, slots: Tensor) -> None:
    """Set ``input_ids[i] = last_tokens[slots[i]]`` for every i with ``slots[i] >= 0``.

    Args:
        input_ids: [num_tokens] int32, written; num_tokens >= num_seqs.
        last_tokens: [max_num_seqs] int32, the newest sampled token of every slot.
        slots: [num_seqs] int32; -1 leaves the input as it is.
    """
    torch.ops.fw.feed_tokens.default(input_ids, last_tokens, slots)


def _reference(input_ids: Tensor, last_tokens: Tensor, slots: Tensor) -> None:
    inputs = input_ids[: slots.shape[0]]
    inputs.copy_(torch.where(slots >= 0, last_tokens[slots.clamp(min=0)], inputs))


def _fake(input_ids: Tensor, last_tokens: Tensor, slots: Tensor) -> None:
    return None


def _launches(input_ids: Tensor, last_tokens: Tensor, slots: Tensor) -> tuple[list[Launch], None]:
    return tokens.feed_tokens(input_ids, last_tokens, slots), None


def _cases(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Iterator[Case]:
    for num_tokens, num_seqs, max_num_seqs in [(1, 1, 1), (9, 5, 8), (300, 257, 300)]:
        ids = torch.randint(0, 1000, (num_tokens,), generator=gen, device=device).to(dtype)
        last = torch.randint(0, 1000, (max_num_seqs,), generator=gen, device=device).to(dtype)
        slots = torch.randperm(max_num_seqs, generator=gen, device=device)[:num_seqs]
        keep = torch.rand(num_seqs, generator=gen, device=device) < 0.3
        slots = torch.where(keep, -1, slots).to(torch.int32)
        yield Case(f"{num_seqs} of {num_tokens}", (ids, last, slots))


def _cost(desc: OpDesc) -> Cost:
    return Cost(bytes=3 * desc["slots"].nbytes, flops=0)


OP = SemanticOp(
    name="feed_tokens",
    reference=_reference,
    fake=_fake,
    cases=_cases,
    cost=_cost,
    mutates=("input_ids",),
    dtypes=(torch.int32,),
    implementations=(
        Implementation("triton", run_launches(_launches), devices=("cuda",), launches=_launches),
        Implementation("native", _reference),
    ),
)
