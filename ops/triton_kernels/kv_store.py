"""Store new keys and values into the paged cache.

Bandwidth-bound: 2 * T * KVH * D elements are read and as many written, plus T slots; into an FP8
cache, after a division by the scale of K or V and head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import wait_for_previous
from .float8 import scaled_as


@triton.jit
def _kv_store_kernel(
    k_ptr,
    v_ptr,
    cache_ptr,
    slots_ptr,
    kv_scale_ptr,
    num_heads,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    cache_block_stride,
    cache_kv_stride,
    cache_slot_stride,
    cache_head_stride,
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
    k = tl.load(k_ptr + token * k_token_stride + head * k_head_stride + col, mask=mask)
    v = tl.load(v_ptr + token * v_token_stride + head * v_head_stride + col, mask=mask)
    block = slot // BLOCK_SIZE
    within = slot % BLOCK_SIZE
    base = cache_ptr + block * cache_block_stride + within * cache_slot_stride
    rows = base + head * cache_head_stride + col
    dtype: tl.constexpr = cache_ptr.dtype.element_ty
    k = scaled_as(k, kv_scale_ptr, head, exists, dtype)
    v = scaled_as(v, kv_scale_ptr, num_heads + head, exists, dtype)
    tl.store(rows, k, mask=mask)
    tl.store(rows + cache_kv_stride, v, mask=mask)
