"""Moves of single token ids by slot; a few hundred bytes, so launch latency is all there is."""

from __future__ import annotations

import triton
import triton.language as tl


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
