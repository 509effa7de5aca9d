"""Rotary embedding of queries and keys in one launch.

Bandwidth-bound: q and k are read once and written once, 2 * T * (H + KVH) * D elements; the
cos/sin rows (T * rotary_dim floats) are read by every group of heads, from L2 but for the first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import wait_for_previous
from .float8 import to_float32
from .groups import Heads


@triton.jit
def load_parts(rows, mask, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, PAIRS: tl.constexpr):
    """The columns that rotate together, in float32: [heads, HALF_BLOCK] each, of ``rows``, pointers
    [heads, 1].  Neighbours are loaded side by side and parted in registers, so that accesses stay
    whole vectors."""
    if PAIRS:
        col = tl.arange(0, 2 * HALF_BLOCK)[None, :]
        both = to_float32(tl.load(rows + col, mask=(col < 2 * HALF) & mask, other=0.0))
        first, second = tl.split(tl.reshape(both, (both.shape[0], HALF_BLOCK, 2)))
    else:
        col = tl.arange(0, HALF_BLOCK)[None, :]
        first = to_float32(tl.load(rows + col, mask=(col < HALF) & mask, other=0.0))
        second = to_float32(tl.load(rows + HALF + col, mask=(col < HALF) & mask, other=0.0))
    return first, second


@triton.jit
def store_parts(
    rows, first, second, mask, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, PAIRS: tl.constexpr
):
    dtype = rows.dtype.element_ty
    if PAIRS:
        col = tl.arange(0, 2 * HALF_BLOCK)[None, :]
        both = tl.reshape(tl.join(first, second), (first.shape[0], 2 * HALF_BLOCK))
        tl.store(rows + col, both.to(dtype), mask=mask & (col < 2 * HALF))
    else:
        col = tl.arange(0, HALF_BLOCK)[None, :]
        tl.store(rows + col, first.to(dtype), mask=mask & (col < HALF))
        tl.store(rows + HALF + col, second.to(dtype), mask=mask & (col < HALF))


@triton.jit
def _rotate(
    x: Heads,
    out_ptr,
    token,
    head,
    num_heads,
    cos,
    sin,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    PAIRS_IN: tl.constexpr,
    PAIRS_OUT: tl.constexpr,
):
    in_rows = x.ptr + token * x.token_stride + head[:, None].to(tl.int64) * x.head_stride
    out_rows = out_ptr + (token * num_heads + head[:, None]) * HEAD_DIM
    mask = (head < num_heads)[:, None]
    first, second = load_parts(in_rows, mask, HALF, HALF_BLOCK, PAIRS_IN)
    rotated, turned = first * cos - second * sin, second * cos + first * sin
    store_parts(out_rows, rotated, turned, mask, HALF, HALF_BLOCK, PAIRS_OUT)
    if 2 * HALF < HEAD_DIM:
        rest = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
        rest_mask = mask & (rest < HEAD_DIM)
        value = tl.load(in_rows + rest, mask=rest_mask, other=0.0)
        tl.store(out_rows + rest, value, mask=rest_mask)


@triton.jit
def _rotary_kernel(
    positions_ptr, q: Heads, k: Heads, cache_ptr, q_out_ptr, k_out_ptr, num_q_heads, num_k_heads,
    max_position, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr, HEADS: tl.constexpr, PAIRS_IN: tl.constexpr, PAIRS_OUT: tl.constexpr,
    PROGRAMMATIC: tl.constexpr
):  # fmt: skip
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
            q, q_out_ptr, token, head, num_q_heads, cos, sin,
            HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK, PAIRS_IN, PAIRS_OUT
        )  # fmt: skip
    else:
        head = (group - num_q_groups) * HEADS + tl.arange(0, HEADS)
        _rotate(
            k, k_out_ptr, token, head, num_k_heads, cos, sin,
            HEAD_DIM, HALF, HALF_BLOCK, REST_BLOCK, PAIRS_IN, PAIRS_OUT
        )  # fmt: skip
