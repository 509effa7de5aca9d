"""Describes the launch of the rotary embedding: queries and keys in one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.launch import Launch, Launches
from ..core.tiles import cdiv, dense_rows, next_power_of_2
from .heads import heads_args, heads_per_program

LAYOUTS: Mapping[str, tuple[bool, bool]] = {
    "halves": (False, False),
    "pairs": (True, True),
    "pairs_to_halves": (True, False),
    "halves_to_pairs": (False, True),
}
"""Whether the two columns that rotate together are neighbours, in q and k and in the results; else
they are rotary_dim / 2 apart."""


def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, layout: str
) -> Launches[tuple[Tensor, Tensor]]:
    num_tokens, num_q_heads, head_dim = q.shape
    num_k_heads = k.shape[1]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    q, k = dense_rows(q), dense_rows(k)
    pairs_in, pairs_out = LAYOUTS[layout]
    half = cos_sin_cache.shape[1] // 2
    half_block = next_power_of_2(half)
    rest_block = next_power_of_2(max(head_dim - 2 * half, 1))
    heads = heads_per_program(num_tokens, max(num_q_heads, num_k_heads), few=4)
    args: dict[str, Any] = {
        "positions_ptr": positions,
        **heads_args("q", q),
        **heads_args("k", k),
        "cache_ptr": cos_sin_cache,
        "q_out_ptr": q_out,
        "k_out_ptr": k_out,
        "num_q_heads": num_q_heads,
        "num_k_heads": num_k_heads,
        "max_position": cos_sin_cache.shape[0],
    }
    launch = Launch(
        kernel="rotary:_rotary_kernel",
        grid=(num_tokens, cdiv(num_q_heads, heads) + cdiv(num_k_heads, heads)),
        args=args,
        constexprs={
            "HEAD_DIM": head_dim,
            "HALF": half,
            "HALF_BLOCK": half_block,
            "REST_BLOCK": rest_block,
            "HEADS": heads,
            "PAIRS_IN": pairs_in,
            "PAIRS_OUT": pairs_out,
        },
        num_warps=min(max(heads * half_block // 256, 1), 4),
        dynamic=("max_position",),
    )
    return [launch], (q_out, k_out)
