"""Store new keys and values into the paged cache.

Bandwidth-bound: 2 * T * KVH * D elements are read and as many written, plus T slots; into an FP8
cache, after a division by the scale of K or V and head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import wait_for_previous
from .float8 import scaled_as
from .groups import Heads, PagedCache


@triton.jit
def _kv_store_kernel(
    k: Heads,
    v: Heads,
    cache: PagedCache,
    slots_ptr,
    kv_scale_ptr,
    num_heads,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    wait_for_previous(PROGRAMMATIC)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None].to(tl.int64)
    col = tl.arange(0, DIM_BLOCK)[None, :]
    exists = head < num_heads
    mask = exists & (col < HEAD_DIM)
    new_k = tl.load(k.ptr + token * k.token_stride + head * k.head_stride + col, mask=mask)
    new_v = tl.load(v.ptr + token * v.token_stride + head * v.head_stride + col, mask=mask)
    block = slot // BLOCK_SIZE
    within = slot % BLOCK_SIZE
    base = cache.ptr + block * cache.block_stride + within * cache.slot_stride
    rows = base + head * cache.head_stride + col
    dtype: tl.constexpr = cache.ptr.dtype.element_ty
    new_k = scaled_as(new_k, kv_scale_ptr, head, exists, dtype)
    new_v = scaled_as(new_v, kv_scale_ptr, num_heads + head, exists, dtype)
    tl.store(rows, new_k, mask=mask)
    tl.store(rows + cache.kv_stride, new_v, mask=mask)
