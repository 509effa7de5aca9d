"""Moves of single token ids by slot; a few hundred bytes, so launch latency is all there is."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .._op import Launch

_BLOCK = 256


@triton.jit
def _feed_tokens_kernel(ids_ptr, last_ptr, slots_ptr, num_seqs, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_seqs
    slots = tl.load(slots_ptr + rows, mask=mask, other=-1)
    fed = slots >= 0
    tl.store(ids_ptr + rows, tl.load(last_ptr + slots, mask=fed, other=0), mask=fed)


@triton.jit
def _keep_tokens_kernel(last_ptr, ids_ptr, slots_ptr, num_seqs, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_seqs
    slots = tl.load(slots_ptr + rows, mask=mask, other=0)
    tl.store(last_ptr + slots, tl.load(ids_ptr + rows, mask=mask, other=0), mask=mask)


def feed_tokens(input_ids: Tensor, last_tokens: Tensor, slots: Tensor) -> list[Launch]:
    args = {"ids_ptr": input_ids, "last_ptr": last_tokens, "slots_ptr": slots}
    return [_launch(_feed_tokens_kernel, args, slots.shape[0])]


def keep_tokens(last_tokens: Tensor, token_ids: Tensor, slots: Tensor) -> list[Launch]:
    args = {"last_ptr": last_tokens, "ids_ptr": token_ids, "slots_ptr": slots}
    return [_launch(_keep_tokens_kernel, args, slots.shape[0])]


def _launch(kernel: object, args: dict[str, Tensor], num_seqs: int) -> Launch:
    return Launch(
        kernel=kernel,
        grid=(triton.cdiv(num_seqs, _BLOCK),),
        args={**args, "num_seqs": num_seqs},
        constexprs={"BLOCK": _BLOCK},
    )
