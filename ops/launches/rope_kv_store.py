"""Describes the launch of [QK-norm +] rotary embedding + KV store.

Heads of q, and of k with v, share one grid.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._launch import Launch
from .heads import cache_strides, dense_heads, head_strides, heads_per_program
from .tiles import cdiv, next_power_of_2


def rope_kv_store(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    kv_scale: Tensor | None = None,
) -> tuple[list[Launch], Tensor]:
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    q, k, v = map(dense_heads, (q, k, v))
    half = cos_sin_cache.shape[1] // 2
    half_block = next_power_of_2(half)
    heads = heads_per_program(num_tokens, max(num_q_heads, num_kv_heads), few=4)
    launch = Launch(
        kernel="rope_kv_store:_rope_kv_store_kernel",
        grid=(num_tokens, cdiv(num_q_heads, heads) + cdiv(num_kv_heads, heads)),
        args={
            "positions_ptr": positions,
            "q_ptr": q,
            "k_ptr": k,
            "v_ptr": v,
            "table_ptr": cos_sin_cache,
            "cache_ptr": kv_cache,
            "slots_ptr": slot_mapping,
            "q_weight_ptr": q_weight,
            "k_weight_ptr": k_weight,
            "kv_scale_ptr": kv_scale,
            "q_out_ptr": q_out,
            "num_q_heads": num_q_heads,
            "max_position": cos_sin_cache.shape[0],
            **head_strides("q", q),
            **head_strides("k", k),
            **head_strides("v", v),
            **cache_strides(kv_cache),
            "eps": eps,
        },
        constexprs={
            "KV_HEADS": num_kv_heads,
            "BLOCK_SIZE": kv_cache.shape[2],
            "HEAD_DIM": head_dim,
            "HALF": half,
            "HALF_BLOCK": half_block,
            "REST_BLOCK": next_power_of_2(max(head_dim - 2 * half, 1)),
            "DIM_BLOCK": next_power_of_2(head_dim),
            "HEADS": heads,
        },
        num_warps=min(max(heads * half_block // 256, 1), 4),
        dynamic=("max_position",),
        programmatic=True,
    )
    return [launch], q_out
