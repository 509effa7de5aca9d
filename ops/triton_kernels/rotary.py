"""Rotary embedding of queries and keys in one launch.

Bandwidth-bound: q and k are read once and written once, 2 * T * (H + KVH) * D elements; the
cos/sin rows (T * rotary_dim floats) are read by every group of heads, from L2 but for the first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import wait_for_previous


@triton.jit
def _rotate(
    in_ptr,
    out_ptr,
    token,
    head,
    num_heads,
    token_stride,
    head_stride,
    cos,
    sin,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    in_rows = in_ptr + token * token_stride + head[:, None].to(tl.int64) * head_stride
    out_rows = out_ptr + (token * num_heads + head[:, None]) * HEAD_DIM
    col = tl.arange(0, HALF_BLOCK)[None, :]
    mask = (head < num_heads)[:, None] & (col < HALF)
    first = tl.load(in_rows + col, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(in_rows + HALF + col, mask=mask, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_rows + col, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(out_rows + HALF + col, (second * cos + first * sin).to(dtype), mask=mask)
    if 2 * HALF < HEAD_DIM:
        rest = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
        rest_mask = (head < num_heads)[:, None] & (rest < HEAD_DIM)
        value = tl.load(in_rows + rest, mask=rest_mask, other=0.0)
        tl.store(out_rows + rest, value, mask=rest_mask)


@triton.jit
def _rotary_kernel(
    positions_ptr,
    q_ptr,
    k_ptr,
    cache_ptr,
    q_out_ptr,
    k_out_ptr,
    num_q_heads,
    num_k_heads,
    max_position,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    wait_for_previous(PROGRAMMATIC)
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    num_q_groups = tl.cdiv(num_q_heads, HEADS)
    position = tl.load(positions_ptr + token).to(tl.int64)
    position = tl.minimum(tl.maximum(position, 0), max_position - 1)
    col = tl.arange(0, HALF_BLOCK)
    cos_ptr = cache_ptr + position * (2 * HALF) + col
    cos = tl.load(cos_ptr, mask=col < HALF, other=0.0)[None, :]
    sin = tl.load(cos_ptr + HALF, mask=col < HALF, other=0.0)[None, :]
    # Two calls, not two sets of pointers picked by a branch: each keeps its known alignment.
    if group < num_q_groups:
        head = group * HEADS + tl.arange(0, HEADS)
        _rotate(
            q_ptr,
            q_out_ptr,
            token,
            head,
            num_q_heads,
            q_token_stride,
            q_head_stride,
            cos,
            sin,
            HEAD_DIM,
            HALF,
            HALF_BLOCK,
            REST_BLOCK,
        )
    else:
        head = (group - num_q_groups) * HEADS + tl.arange(0, HEADS)
        _rotate(
            k_ptr,
            k_out_ptr,
            token,
            head,
            num_k_heads,
            k_token_stride,
            k_head_stride,
            cos,
            sin,
            HEAD_DIM,
            HALF,
            HALF_BLOCK,
            REST_BLOCK,
        )
