"""Describes the launch of [QK-norm +] rotary embedding + KV store.

Heads of q, and of k with v, share one grid.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.launch import Launch, Launches
from ..core.tiles import cdiv, dense_rows, next_power_of_2
from .heads import cache_args, heads_args, heads_per_program
from .rotary import LAYOUTS


class RopeStoreArgs(NamedTuple):
    """The arguments of the op ``rope_kv_store``."""

    positions: Any
    q: Any
    k: Any
    v: Any
    cos_sin_cache: Any
    kv_cache: Any
    slot_mapping: Any
    q_weight: Any = None
    k_weight: Any = None
    eps: float = 0.0
    kv_scale: Any = None
    layout: str = "halves"
    weight_offset: float | None = None


def rope_kv_store(*args: Any) -> Launches[Tensor]:
    """The launch of a call of the op, and its result."""
    call = RopeStoreArgs(*args)
    q, k, v, cos_sin_cache, kv_cache = call[1:6]
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    q, k, v = map(dense_rows, (q, k, v))
    half = cos_sin_cache.shape[1] // 2
    pairs_in, pairs_out = LAYOUTS[call.layout]
    half_block = next_power_of_2(half)
    heads = heads_per_program(num_tokens, max(num_q_heads, num_kv_heads), few=4)
    launch = Launch(
        kernel="rope_kv_store:_rope_kv_store_kernel",
        grid=(num_tokens, cdiv(num_q_heads, heads) + cdiv(num_kv_heads, heads)),
        args={
            "positions_ptr": call.positions,
            **heads_args("q", q),
            **heads_args("k", k),
            **heads_args("v", v),
            **cache_args(kv_cache),
            "table_ptr": cos_sin_cache,
            "slots_ptr": call.slot_mapping,
            "q_weight_ptr": call.q_weight,
            "k_weight_ptr": call.k_weight,
            "kv_scale_ptr": call.kv_scale,
            "q_out_ptr": q_out,
            "num_q_heads": num_q_heads,
            "max_position": cos_sin_cache.shape[0],
            "eps": call.eps,
            "weight_offset": call.weight_offset,
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
            "PAIRS_IN": pairs_in,
            "PAIRS_OUT": pairs_out,
        },
        num_warps=min(max(heads * half_block // 256, 1), 4),
        dynamic=("max_position",),
    )
    return [launch], q_out
