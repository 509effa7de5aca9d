"""[RMSNorm of each head +] rotary embedding of q and k, and the KV store, in one launch.

Bandwidth-bound: q, k and v are read once and written once, 2 * T * (H + 2 * KVH) * D elements; a
program holds a few heads of q, of one token, or of k and v, of one or more.  Nothing is masked that
need not be: what would lie behind the last head is that head once more.  All loads come before all
stores, so that their latencies overlap.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dependent import start_next_and_wait
from .float8 import scaled_as, to_float32
from .groups import Heads, PagedCache
from .rotary import load_parts, store_parts


@triton.jit
def _scale_columns(x, scale, weight, offset, dtype: tl.constexpr):
    """Without an offset rounded before the weight and after it, with one rounded once, as by
    ``rms_norm``."""
    normed = x * scale
    if offset is None:
        normed = normed.to(dtype).to(tl.float32)
    else:
        weight += offset
    return to_float32((normed * weight).to(dtype))


@triton.jit
def _rotate_heads(
    in_rows,
    out_rows,
    stored,
    weight_ptr,
    eps,
    offset,
    cos_ptr,
    scale_ptr,
    head,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    PAIRS_IN: tl.constexpr,
    PAIRS_OUT: tl.constexpr,
):
    """From rows to rows: pointers, ``stored`` and ``head`` are [heads, 1]; FP8 rows get the values
    divided by ``scale_ptr[head]``, unless that is None."""
    dtype: tl.constexpr = in_rows.dtype.element_ty
    out_dtype: tl.constexpr = out_rows.dtype.element_ty
    col = tl.arange(0, HALF_BLOCK)[None, :]
    rest = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
    mask, rest_mask = col < HALF, rest < HEAD_DIM
    first, second = load_parts(in_rows, True, HALF, HALF_BLOCK, PAIRS_IN)
    if 2 * HALF < HEAD_DIM:
        tail = tl.load(in_rows + rest, mask=rest_mask, other=0.0).to(tl.float32)
    # Tables and weights are loaded as whole tiles, all rows alike and out of L1: a single row would
    # be spread over threads and passed on through shared memory, with barriers.
    cos_tile = tl.broadcast_to(cos_ptr + col, first.shape)
    cos = tl.load(cos_tile, mask=mask, other=0.0)
    sin = tl.load(cos_tile + HALF, mask=mask, other=0.0)
    if weight_ptr is not None:
        squares = tl.sum(first * first + second * second, axis=1)
        if 2 * HALF < HEAD_DIM:
            squares += tl.sum(tail * tail, axis=1)
        rms = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        weight_rows = weight_ptr + tl.zeros_like(head)
        first_weight, second_weight = load_parts(weight_rows, True, HALF, HALF_BLOCK, PAIRS_IN)
        first = _scale_columns(first, rms, first_weight, offset, dtype)
        second = _scale_columns(second, rms, second_weight, offset, dtype)
        if 2 * HALF < HEAD_DIM:
            rest_weight = tl.load(weight_rows + rest, mask=rest_mask, other=0.0).to(tl.float32)
            tail = _scale_columns(tail, rms, rest_weight, offset, dtype)
    rotated_first = (first * cos - second * sin).to(dtype)
    rotated_second = (second * cos + first * sin).to(dtype)
    rotated_first = scaled_as(rotated_first, scale_ptr, head, head >= 0, out_dtype)
    rotated_second = scaled_as(rotated_second, scale_ptr, head, head >= 0, out_dtype)
    store_parts(out_rows, rotated_first, rotated_second, stored, HALF, HALF_BLOCK, PAIRS_OUT)
    if 2 * HALF < HEAD_DIM:
        tail = scaled_as(tail.to(dtype), scale_ptr, head, head >= 0, out_dtype)
        tl.store(out_rows + rest, tail, mask=stored & rest_mask)


@triton.jit
def _cos_row(positions_ptr, token, table_ptr, max_position, HALF: tl.constexpr):
    position = tl.load(positions_ptr + token).to(tl.int64)
    return table_ptr + tl.minimum(tl.maximum(position, 0), max_position - 1) * (2 * HALF)


@triton.jit
def _rope_kv_store_kernel(
    positions_ptr, q: Heads, k: Heads, v: Heads, cache: PagedCache, table_ptr, slots_ptr,
    q_weight_ptr, k_weight_ptr, kv_scale_ptr, q_out_ptr, num_q_heads, max_position, eps,
    weight_offset,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr,
    HEADS: tl.constexpr, PAIRS_IN: tl.constexpr, PAIRS_OUT: tl.constexpr, PROGRAMMATIC: tl.constexpr
):  # fmt: skip
    start_next_and_wait(PROGRAMMATIC)
    num_tokens, group = tl.num_programs(0), tl.program_id(1)
    num_q_groups = tl.cdiv(num_q_heads, HEADS)
    lane = tl.arange(0, HEADS)[:, None]
    if group < num_q_groups:
        token = tl.program_id(0).to(tl.int64)
        head = tl.minimum(group * HEADS + lane, num_q_heads - 1).to(tl.int64)
        _rotate_heads(
            q.ptr + token * q.token_stride + head * q.head_stride,
            q_out_ptr + (token * num_q_heads + head) * HEAD_DIM,
            lane >= 0,
            q_weight_ptr,
            eps,
            weight_offset,
            _cos_row(positions_ptr, token, table_ptr, max_position, HALF),
            None,
            head,
            HEAD_DIM,
            HALF,
            HALF_BLOCK,
            REST_BLOCK,
            PAIRS_IN,
            PAIRS_OUT,
        )
    else:
        # Rows are heads of all tokens: few heads a token still fill a program.
        first = ((group - num_q_groups) * num_tokens + tl.program_id(0)) * HEADS
        if first < num_tokens * KV_HEADS:
            row = tl.minimum(first + lane, num_tokens * KV_HEADS - 1)
            token, head = (row // KV_HEADS).to(tl.int64), (row % KV_HEADS).to(tl.int64)
            slot = tl.load(slots_ptr + token).to(tl.int64)
            slot_ptr = cache.ptr + slot // BLOCK_SIZE * cache.block_stride
            rows = slot_ptr + slot % BLOCK_SIZE * cache.slot_stride + head * cache.head_stride
            col = tl.arange(0, DIM_BLOCK)[None, :]
            v_rows = v.ptr + token * v.token_stride + head * v.head_stride
            new_v = tl.load(v_rows + col, mask=col < HEAD_DIM, other=0.0)
            _rotate_heads(
                k.ptr + token * k.token_stride + head * k.head_stride,
                rows,
                slot >= 0,
                k_weight_ptr,
                eps,
                weight_offset,
                _cos_row(positions_ptr, token, table_ptr, max_position, HALF),
                kv_scale_ptr,
                head,
                HEAD_DIM,
                HALF,
                HALF_BLOCK,
                REST_BLOCK,
                PAIRS_IN,
                PAIRS_OUT,
            )
            dtype: tl.constexpr = cache.ptr.dtype.element_ty
            new_v = scaled_as(new_v, kv_scale_ptr, KV_HEADS + head, head >= 0, dtype)
            tl.store(rows + cache.kv_stride + col, new_v, mask=(slot >= 0) & (col < HEAD_DIM))
