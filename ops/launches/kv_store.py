"""Launch of the KV store."""

from __future__ import annotations

from torch import Tensor

from .._launch import Launch
from .tiles import cdiv, next_power_of_2

# Fewer heads a program while the grid would leave SMs idle.
_FEW_TOKENS = 64


def kv_store(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> list[Launch]:
    num_tokens, num_heads, head_dim = k.shape
    k = k if k.stride(2) == 1 else k.contiguous()
    v = v if v.stride(2) == 1 else v.contiguous()
    dim_block = next_power_of_2(head_dim)
    heads = min(2 if num_tokens <= _FEW_TOKENS else 8, next_power_of_2(num_heads))
    launch = Launch(
        kernel="kv_store:_kv_store_kernel",
        grid=(num_tokens, cdiv(num_heads, heads)),
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
