"""Store new keys and values into the paged cache.

Bandwidth-bound: 2 * T * KVH * D elements are read and as many written, plus T slots.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .._op import Launch

# Fewer heads a program while the grid would leave SMs idle.
_FEW_TOKENS = 64


@triton.jit
def _kv_store_kernel(
    k_ptr,
    v_ptr,
    cache_ptr,
    slots_ptr,
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
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None].to(tl.int64)
    col = tl.arange(0, DIM_BLOCK)[None, :]
    mask = (head < num_heads) & (col < HEAD_DIM)
    k = tl.load(k_ptr + token * k_token_stride + head * k_head_stride + col, mask=mask)
    v = tl.load(v_ptr + token * v_token_stride + head * v_head_stride + col, mask=mask)
    block = slot // BLOCK_SIZE
    within = slot % BLOCK_SIZE
    base = cache_ptr + block * cache_block_stride + within * cache_slot_stride
    rows = base + head * cache_head_stride + col
    tl.store(rows, k, mask=mask)
    tl.store(rows + cache_kv_stride, v, mask=mask)


def kv_store(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> list[Launch]:
    num_tokens, num_heads, head_dim = k.shape
    k = k if k.stride(2) == 1 else k.contiguous()
    v = v if v.stride(2) == 1 else v.contiguous()
    dim_block = triton.next_power_of_2(head_dim)
    heads = min(2 if num_tokens <= _FEW_TOKENS else 8, triton.next_power_of_2(num_heads))
    launch = Launch(
        kernel=_kv_store_kernel,
        grid=(num_tokens, triton.cdiv(num_heads, heads)),
        args={
            "k_ptr": k,
            "v_ptr": v,
            "cache_ptr": kv_cache,
            "slots_ptr": slot_mapping,
            "num_heads": num_heads,
            "k_token_stride": k.stride(0),
            "k_head_stride": k.stride(1),
            "v_token_stride": v.stride(0),
            "v_head_stride": v.stride(1),
            "cache_block_stride": kv_cache.stride(0),
            "cache_kv_stride": kv_cache.stride(1),
            "cache_slot_stride": kv_cache.stride(2),
            "cache_head_stride": kv_cache.stride(3),
        },
        constexprs={
            "BLOCK_SIZE": kv_cache.shape[2],
            "HEAD_DIM": head_dim,
            "DIM_BLOCK": dim_block,
            "HEADS": heads,
        },
        num_warps=min(max(heads * dim_block // 256, 1), 4),
    )
    return [launch]
