"""Describes the launch of the KV store."""

from __future__ import annotations

from torch import Tensor

from ..core.launch import Launch, Launches
from ..core.tiles import cdiv, dense_rows, next_power_of_2
from .heads import cache_args, heads_args, heads_per_program


def kv_store(
    k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: Tensor | None = None
) -> Launches[None]:
    num_tokens, num_heads, head_dim = k.shape
    k, v = dense_rows(k), dense_rows(v)
    dim_block = next_power_of_2(head_dim)
    heads = heads_per_program(num_tokens, num_heads, few=2)
    launch = Launch(
        kernel="kv_store:_kv_store_kernel",
        grid=(num_tokens, cdiv(num_heads, heads)),
        args={
            **heads_args("k", k),
            **heads_args("v", v),
            **cache_args(kv_cache),
            "slots_ptr": slot_mapping,
            "kv_scale_ptr": kv_scale,
            "num_heads": num_heads,
        },
        constexprs={
            "BLOCK_SIZE": kv_cache.shape[2],
            "HEAD_DIM": head_dim,
            "DIM_BLOCK": dim_block,
            "HEADS": heads,
        },
        num_warps=min(max(heads * dim_block // 256, 1), 4),
    )
    return [launch], None
