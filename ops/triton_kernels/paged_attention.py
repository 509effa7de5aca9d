"""Paged attention: a split-KV kernel for sequences with one query, a flash kernel for the rest.

Both plan on the device: each program reads all lengths as one vector, scans them and finds its
work by counting.  So grids depend on shapes alone (CUDA graphs) and padding costs nothing.  A
prefill computes the same whatever its batch; a decode longer than two ``MIN_SPLIT`` is split as its
batch leaves room for.

Queries of one sequence may come as neighbouring sequences of one query each, as when a step
verifies drafts.  Where the prefill kernel has them, a few are one piece of work, which reads K and
V once (``_runs``).

Shape legend: rows are (query, head of the group) pairs that share one KV head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import logistic
from .dependent import start_next_and_wait, wait_for_previous
from .float8 import stored_as
from .groups import Rows

# Finite, so that rows whose tile is fully masked give exp2(-inf) = 0 and never inf - inf.
_NO_MAX = tl.constexpr(-1.0e30)
_LOG2_E = tl.constexpr(1.4426950408889634)
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr):
    if _INTERPRETED:
        # The interpreter would multiply the bits of bfloat16 as integers.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _operand(x, dtype: tl.constexpr):
    """Exact: e4m3 is part of every dtype of q.  Scales go into logits and results instead."""
    if _INTERPRETED:
        return x.to(tl.float32)
    if x.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        # Straight to bfloat16 takes the slow conversion unit of Hopper; the detour does not.
        return x.to(tl.float16).to(tl.float32).to(dtype)
    return x.to(dtype)


@triton.jit
def _scales(kv_scale_ptr, head, scale, KV_HEADS: tl.constexpr):
    """The scale of the logits of a KV head, and of its results."""
    v_scale = 1.0
    if kv_scale_ptr is not None:
        scale *= tl.load(kv_scale_ptr + head)
        v_scale = tl.load(kv_scale_ptr + KV_HEADS + head)
    return scale, v_scale


@triton.jit
def _first_seen(position, window, chunk):
    """The first position that a query at ``position`` sees."""
    return tl.maximum(tl.maximum(position - window + 1, position // chunk * chunk), 0)


@triton.jit
def _num_seen(seq_len, window, chunk, HAS_WINDOW: tl.constexpr):
    """How many positions the last query of a sequence sees."""
    if HAS_WINDOW:
        return seq_len - _first_seen(seq_len - 1, window, chunk)
    return seq_len


@triton.jit
def _follows(index, num_seqs, query_start_ptr, seq_lens_ptr, table, BLOCK_SIZE: tl.constexpr):
    """Whether the one query of each sequence ``index`` follows the one query of the sequence before
    it in the same sequence: their lengths differ by one, and they share the block of the former's
    position, which no other sequence stores into."""
    inside = (index > 0) & (index < num_seqs)
    first = tl.load(query_start_ptr + index - 1, mask=inside, other=0)
    start = tl.load(query_start_ptr + index, mask=inside, other=0)
    stop = tl.load(query_start_ptr + index + 1, mask=inside, other=0)
    before = tl.load(seq_lens_ptr + index - 1, mask=inside, other=0)
    own = tl.load(seq_lens_ptr + index, mask=inside, other=0)
    near = (start - first == 1) & (stop - start == 1) & (before > 0) & (own == before + 1)
    block_ptr = table.ptr + index.to(tl.int64) * table.stride + (before - 1) // BLOCK_SIZE
    block = tl.load(block_ptr, mask=near, other=0)
    return near & (block == tl.load(block_ptr - table.stride, mask=near, other=1))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _latest(values):
    """The largest of each value and those before it."""
    if _INTERPRETED:  # it would call ``_larger`` for every element
        number = tl.arange(0, values.shape[0])
        return tl.max(tl.where(number[None, :] <= number[:, None], values[None, :], 0), axis=1)
    return tl.associative_scan(values, 0, _larger)


@triton.jit
def _runs(
    index, num_seqs, query_start_ptr, seq_lens_ptr, table, BLOCK_SIZE: tl.constexpr,
    MOST_ROWS: tl.constexpr
):  # fmt: skip
    """(whether a sequence is a piece of work, how many rows that has): the last of every up to
    MOST_ROWS sequences that follow each other, divided from the first on."""
    if MOST_ROWS == 1:
        return index >= 0, tl.full(index.shape, 1, dtype=tl.int32)
    follows = _follows(index, num_seqs, query_start_ptr, seq_lens_ptr, table, BLOCK_SIZE)
    first = _latest(tl.where(follows, 0, index))
    before = (index - first) % MOST_ROWS
    followed = _follows(index + 1, num_seqs, query_start_ptr, seq_lens_ptr, table, BLOCK_SIZE)
    return (before == MOST_ROWS - 1) | (followed == 0), before + 1


@triton.jit
def _softmax_start(sinks_ptr, head, live):
    """The maximum, in units of log2, and the sum of a softmax that has seen no key yet: only the
    sink of each query head, if there are sinks."""
    row_max = tl.full(head.shape, _NO_MAX, dtype=tl.float32)
    row_sum = tl.zeros(head.shape, dtype=tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=live, other=float("-inf")).to(tl.float32) * _LOG2_E
        row_max = tl.maximum(row_max, sink)
        row_sum = tl.exp2(sink - row_max)
    return row_max, row_sum


@triton.jit
def _by_column(row_sum, BLOCK_N: tl.constexpr):
    """Sums apart by column, as ``_attend`` keeps them: what there is in the first."""
    return tl.where(tl.arange(0, BLOCK_N)[None, :] == 0, row_sum[:, None], 0.0)


@triton.jit
def _store_rows(ptrs, result, out_scale_ptr, mask):
    """``result`` float32, saturated where ``out_scale_ptr`` is given and the rows are FP8."""
    if out_scale_ptr is not None:
        result *= 1.0 / tl.load(out_scale_ptr)
    tl.store(ptrs, stored_as(result, ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _tanh(x, IS_EXACT: tl.constexpr):
    if not IS_EXACT:
        return 2.0 * logistic(2.0 * x) - 1.0
    # The quotient loses relative accuracy near zero, where the series has it.
    e = tl.exp2(tl.abs(x) * (-2.0 * _LOG2_E))
    far = (1.0 - e) / (1.0 + e)
    far = tl.where(x < 0, -far, far)
    y = x * x
    series = 1.0 + y * (-0.33333333 + y * (0.13333333 + y * (-0.05396825 + y * 0.02186949)))
    return tl.where(y < 0.09, x * series, far)


@triton.jit
def _load_rows(ptr, row, cols, valid, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr):
    """[rows, cols] at element offsets ``row``; whatever is not valid reads as zero."""
    ptrs = ptr + row[:, None] + cols[None, :]
    if MASKED:
        if cols.shape[0] == HEAD_DIM:
            return tl.load(ptrs, mask=valid[:, None], other=0.0)
        return tl.load(ptrs, mask=valid[:, None] & (cols < HEAD_DIM)[None, :], other=0.0)
    if cols.shape[0] == HEAD_DIM:
        return tl.load(ptrs)
    return tl.load(ptrs, mask=(cols < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _attend(
    acc, row_max, row_sum, q, query_pos, first_seen, kv_ptr, table_ptr, head, begin, end,
    readable_begin, scale, soft_cap, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Online softmax (Milakov and Gimelshein, 2018) over the KV positions [begin, end).

    When MASKED, nothing outside [readable_begin, end) is used: no V is read there, no block looked
    up, and the logits of whatever K lies there are dropped.  row_max is in units of log2.
    ``row_sum`` of [rows, BLOCK_N] instead of [rows] stays apart by column: where warps share the
    columns, as with few rows, summing them every tile would cost two barriers.
    """
    # Without a cap, the scale goes into the exponent's multiply-add instead of over all logits.
    unit = 1.0 if HAS_CAP else scale * _LOG2_E
    cols = tl.arange(0, q.shape[1])
    first = begin + tl.arange(0, BLOCK_N)
    in_reach = (first >= readable_begin) & (first < end)
    block = tl.load(table_ptr + first // BLOCK_SIZE, mask=in_reach, other=0)
    v_ptr = kv_ptr + BLOCK_SIZE * KV_HEADS * HEAD_DIM
    for tile in range(begin, end, BLOCK_N):
        pos = tile + tl.arange(0, BLOCK_N)
        valid = (pos >= readable_begin) & (pos < end)
        row = block.to(tl.int64) * (2 * BLOCK_SIZE * KV_HEADS * HEAD_DIM)
        row += (pos % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM) + head * HEAD_DIM
        k = _operand(_load_rows(kv_ptr, row, cols, valid, HEAD_DIM, False), q.dtype)
        # One tile ahead, or K and V could not be pipelined behind the load of their addresses.
        following = pos + BLOCK_N
        block = tl.load(table_ptr + following // BLOCK_SIZE, mask=following < end, other=0)
        logits = _dot(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_N], tl.float32), PRECISION)
        if HAS_CAP:
            share = _tanh(logits * (scale / soft_cap), q.dtype == tl.float32)
            logits = share * (soft_cap * _LOG2_E)
        if MASKED:
            seen = valid[None, :]
            if CAUSAL:
                seen &= pos[None, :] <= query_pos[:, None]
                if HAS_WINDOW:
                    seen &= pos[None, :] >= first_seen[:, None]
            logits = tl.where(seen, logits, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(logits, axis=1) * unit)
        p = tl.exp2(logits * unit - new_max[:, None])
        alpha = tl.exp2(row_max - new_max)
        if len(row_sum.shape) == 2:
            row_sum = row_sum * alpha[:, None] + p
        else:
            row_sum = row_sum * alpha + tl.sum(p, axis=1)
        row_max = new_max
        v = _operand(_load_rows(v_ptr, row, cols, valid, HEAD_DIM, MASKED), q.dtype)
        acc = _dot(p.to(q.dtype), v, acc * alpha[:, None], PRECISION)
    return acc, row_max, row_sum


@triton.jit
def _combine(
    out_ptr,
    partial_ptr,
    lse_ptr,
    out_scale_ptr,
    num_splits,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MERGE_BLOCK: tl.constexpr,
):
    """Merge the partial results of one (sequence, KV head), in the order of the splits."""
    rows = tl.arange(0, BLOCK_G)
    cols = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_G, BLOCK_D], dtype=tl.float32)
    peak = tl.full([BLOCK_G], _NO_MAX, dtype=tl.float32)
    total = tl.zeros([BLOCK_G], dtype=tl.float32)
    for first in range(0, num_splits, MERGE_BLOCK):
        split = first + tl.arange(0, MERGE_BLOCK)
        row = split[:, None] * GROUP + rows[None, :]
        live = (split < num_splits)[:, None] & (rows < GROUP)[None, :]
        # .cg: other multiprocessors wrote these; their lines in this one's L1 would be stale.
        lse = tl.load(lse_ptr + row, mask=live, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            partial_ptr + row[:, :, None] * HEAD_DIM + cols[None, None, :],
            mask=live[:, :, None] & (cols < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_peak = tl.maximum(peak, tl.max(lse, axis=0))
        alpha = tl.exp2(peak - new_peak)
        weight = tl.exp2(lse - new_peak[None, :])
        acc = acc * alpha[:, None] + tl.sum(part * weight[:, :, None], axis=0)
        total = total * alpha + tl.sum(weight, axis=0)
        peak = new_peak
    mask = (rows < GROUP)[:, None] & (cols < HEAD_DIM)[None, :]
    result = acc / tl.where(rows < GROUP, total, 1.0)[:, None]
    offsets = rows[:, None] * HEAD_DIM + cols[None, :]
    _store_rows(out_ptr + offsets, result, out_scale_ptr, mask)


@triton.jit
def _share(reads, KV_HEADS: tl.constexpr, MIN_SPLIT: tl.constexpr):
    """Tokens of a work item when all programs have equal work: all of a program's, or half where
    that is long, so that a second item evens out what the first left uneven."""
    total = tl.sum(reads.to(tl.int64), axis=0) * KV_HEADS
    share = tl.cdiv(total, tl.num_programs(0)).to(tl.int32)
    return tl.where(share > 8 * MIN_SPLIT, tl.cdiv(share, 2), share)


@triton.jit
def _split_span(read, share, max_splits, MIN_SPLIT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tokens of each split of a sequence that reads ``read`` of them, in whole tiles.

    A split costs its start, its partial result and the merge.  So short sequences have one, and
    longer ones no more than 16 before these reach 4 * MIN_SPLIT; none is shorter than ``share``.
    """
    least = tl.maximum(tl.minimum(read // 16, 4 * MIN_SPLIT), MIN_SPLIT)
    least = tl.where(read <= 2 * MIN_SPLIT, 2 * MIN_SPLIT, tl.maximum(share, least))
    splits = tl.maximum(tl.minimum(read // least, max_splits), 1)
    return tl.maximum(tl.cdiv(tl.cdiv(read, splits), BLOCK_N), 1) * BLOCK_N


@triton.jit
def _decode_kernel(
    q: Rows, table: Rows, kv_ptr, seq_lens_ptr, query_start_ptr, out_ptr, kv_scale_ptr,
    out_scale_ptr, sinks_ptr, scratch_ptr, counter_ptr, max_splits, partial_rows, num_seqs, scale,
    window, chunk, soft_cap, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, MIN_SPLIT: tl.constexpr, SEQS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, MERGE_BLOCK: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr,
    PROGRAMMATIC: tl.constexpr
):  # fmt: skip
    """Sequences with exactly one query: persistent programs over (sequence, split, KV head).  The
    one that finishes a split sequence last merges its splits."""
    start_next_and_wait(PROGRAMMATIC)
    index = tl.arange(0, SEQS)
    live = index < num_seqs
    query_start = tl.load(query_start_ptr + index, mask=live, other=0)
    query_stop = tl.load(query_start_ptr + 1 + index, mask=live, other=0)
    reads = tl.load(seq_lens_ptr + index, mask=live, other=0)
    reads = _num_seen(reads, window, chunk, HAS_WINDOW)
    reads = tl.where(query_stop - query_start == 1, reads, 0)
    share = _share(reads, KV_HEADS, MIN_SPLIT)
    units = tl.cdiv(reads, _split_span(reads, share, max_splits, MIN_SPLIT, BLOCK_N))
    units_to_here = tl.cumsum(units, axis=0)
    num_items = tl.sum(units, axis=0) * KV_HEADS

    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    row_mask = (rows < GROUP)[:, None] & (cols < HEAD_DIM)[None, :]
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        # Neighbouring programs take the KV heads of one block: their rows are adjacent in memory.
        head = item % KV_HEADS
        unit = item // KV_HEADS
        before = units_to_here <= unit
        seq = tl.sum(before.to(tl.int32), axis=0)
        split = unit - tl.max(tl.where(before, units_to_here, 0), axis=0)
        seq_len = tl.load(seq_lens_ptr + seq)
        token = tl.load(query_start_ptr + seq).to(tl.int64)
        read = _num_seen(seq_len, window, chunk, HAS_WINDOW)
        span = _split_span(read, share, max_splits, MIN_SPLIT, BLOCK_N)
        num_splits = tl.cdiv(read, span)
        begin = seq_len - read + split * span
        end = tl.minimum(begin + span, seq_len)

        offsets = rows[:, None] * HEAD_DIM + cols[None, :]
        q_row = q.ptr + token * q.stride + head * (GROUP * HEAD_DIM)
        query = tl.load(q_row + offsets, mask=row_mask, other=0.0)
        logit_scale, v_scale = _scales(kv_scale_ptr, head, scale, KV_HEADS)
        # A sequence has its sinks once: in its first split, whose weight in the merge counts them.
        row_max, row_sum = _softmax_start(
            sinks_ptr, head * GROUP + rows, (rows < GROUP) & (split == 0)
        )
        acc, row_max, row_sum = _attend(
            tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32), row_max,
            _by_column(row_sum, BLOCK_N), query, rows, rows,
            kv_ptr, table.ptr + seq.to(tl.int64) * table.stride, head, begin, end, begin,
            logit_scale, soft_cap, KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N, True, False, HAS_WINDOW,
            HAS_CAP, PRECISION
        )  # fmt: skip
        row_sum = tl.sum(row_sum, axis=1)
        acc = acc * (v_scale / row_sum)[:, None]
        out_row = out_ptr + (token * KV_HEADS + head) * (GROUP * HEAD_DIM)
        if num_splits == 1:
            _store_rows(out_row + offsets, acc, out_scale_ptr, row_mask)
        else:
            pair = seq * KV_HEADS + head
            first_row = pair * max_splits * GROUP
            partial_ptr = scratch_ptr + first_row * HEAD_DIM
            lse_ptr = scratch_ptr + partial_rows * HEAD_DIM + first_row
            lse = row_max + tl.log2(row_sum)
            tl.store(partial_ptr + split * (GROUP * HEAD_DIM) + offsets, acc, mask=row_mask)
            tl.store(lse_ptr + split * GROUP + rows, lse, mask=rows < GROUP)
            # All threads' stores come before the one thread that releases them.
            tl.debug_barrier()
            arrived = tl.atomic_add(counter_ptr + pair, 1, sem="acq_rel")
            if arrived == num_splits - 1:
                _combine(
                    out_row, partial_ptr, lse_ptr, out_scale_ptr, num_splits, GROUP, HEAD_DIM,
                    BLOCK_G, BLOCK_D, MERGE_BLOCK
                )  # fmt: skip
                tl.store(counter_ptr + pair, 0)


@triton.jit
def _attend_in_parts(
    acc, row_max, row_sum, q, query_pos, first_seen, kv_ptr, table_ptr, head, begin, end,
    readable_begin, first_pos, window, chunk, scale, soft_cap, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, IS_WIDE: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """``_attend`` for the queries from ``first_pos`` to ``end``: without masks in the tiles that
    all of them see whole, unless the window is narrow."""
    if IS_WIDE or not HAS_WINDOW:
        all_see = tl.maximum((first_pos + 1) // BLOCK_N * BLOCK_N, begin)
        if HAS_WINDOW:
            all_reach = tl.cdiv(_first_seen(end - 1, window, chunk), BLOCK_N) * BLOCK_N
            all_reach = tl.minimum(all_reach, all_see)
            acc, row_max, row_sum = _attend(
                acc, row_max, row_sum, q, query_pos, first_seen, kv_ptr, table_ptr, head,
                begin, all_reach, readable_begin, scale, soft_cap, KV_HEADS, HEAD_DIM, BLOCK_SIZE,
                BLOCK_N, True, True, HAS_WINDOW, HAS_CAP, PRECISION
            )  # fmt: skip
            begin = all_reach
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q, query_pos, first_seen, kv_ptr, table_ptr, head, begin,
            all_see, begin, scale, soft_cap, KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N, False, False,
            HAS_WINDOW, HAS_CAP, PRECISION
        )  # fmt: skip
        begin = all_see
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, query_pos, first_seen, kv_ptr, table_ptr, head, begin, end,
        readable_begin, scale, soft_cap, KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N, True, True,
        HAS_WINDOW, HAS_CAP, PRECISION
    )  # fmt: skip
    return acc, row_max, row_sum


@triton.jit
def _prefill_kernel(
    q: Rows, table: Rows, kv_ptr, seq_lens_ptr, query_start_ptr, out_ptr, kv_scale_ptr,
    out_scale_ptr, sinks_ptr, num_seqs, scale, window, chunk, soft_cap, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, SEQS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, HAS_WINDOW: tl.constexpr,
    IS_WIDE: tl.constexpr, HAS_CAP: tl.constexpr, FEWEST: tl.constexpr, PRECISION: tl.constexpr,
    PROGRAMMATIC: tl.constexpr
):  # fmt: skip
    """Sequences with at least FEWEST queries: a program takes BLOCK_M // GROUP queries of one KV
    head.  If FEWEST is 1, these may be sequences that follow each other in one.

    The flash-attention forward (Dao, 2023): masks only in the tiles that the diagonal crosses, and
    in those that the begin of a wide window does; of a narrow one in all.
    """
    wait_for_previous(PROGRAMMATIC)
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    index = tl.arange(0, SEQS)
    live = index < num_seqs
    starts = tl.load(query_start_ptr + index, mask=live, other=0)
    stops = tl.load(query_start_ptr + 1 + index, mask=live, other=0)
    contexts = tl.load(seq_lens_ptr + index, mask=live, other=0)
    MOST: tl.constexpr = BLOCK_Q if FEWEST == 1 and SEQS > 1 else 1
    ends, num_rows = _runs(index, num_seqs, query_start_ptr, seq_lens_ptr, table, BLOCK_SIZE, MOST)
    has_tiles = ends & (stops - starts >= FEWEST) & (contexts > 0)
    tiles = tl.where(has_tiles, tl.cdiv(stops - starts, BLOCK_Q), 0)
    tiles_to_here = tl.cumsum(tiles, axis=0)
    # Last tiles first: they see the longest context.
    unit = tl.sum(tiles, axis=0) - 1 - tl.program_id(1)
    if unit < 0:
        return
    head = tl.program_id(0)
    scale, v_scale = _scales(kv_scale_ptr, head, scale, KV_HEADS)
    before = tiles_to_here <= unit
    seq = tl.sum(before.to(tl.int32), axis=0)
    first_query = (unit - tl.max(tl.where(before, tiles_to_here, 0), axis=0)) * BLOCK_Q
    start = tl.load(query_start_ptr + seq)
    if MOST > 1:
        start -= tl.sum(tl.where(index == seq, num_rows, 0), axis=0) - 1
    query_len = tl.load(query_start_ptr + 1 + seq) - start
    computed = tl.load(seq_lens_ptr + seq) - query_len

    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    query = first_query + rows // GROUP
    row_live = (query < query_len) & (rows < BLOCK_Q * GROUP)
    token = (start + query).to(tl.int64)
    query_head = head * GROUP + rows % GROUP
    head_col = query_head * HEAD_DIM
    q_rows = _load_rows(q.ptr, token * q.stride + head_col, cols, row_live, HEAD_DIM, True)

    query_pos = computed + query
    end = computed + tl.minimum(first_query + BLOCK_Q, query_len)
    readable_begin = 0
    first_seen = query_pos
    if HAS_WINDOW:
        readable_begin = _first_seen(computed + first_query, window, chunk)
        first_seen = _first_seen(query_pos, window, chunk)
    # A multiple of BLOCK_N: a query's tiles, and so its rounding, do not depend on the chunking.
    begin = readable_begin // BLOCK_N * BLOCK_N
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], _NO_MAX, dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    table_ptr = table.ptr + seq.to(tl.int64) * table.stride
    acc, row_max, row_sum = _attend_in_parts(
        acc, row_max, row_sum, q_rows, query_pos, first_seen, kv_ptr, table_ptr, head, begin, end,
        readable_begin, computed + first_query, window, chunk, scale, soft_cap, KV_HEADS, HEAD_DIM,
        BLOCK_SIZE, BLOCK_N, HAS_WINDOW, IS_WIDE, HAS_CAP, PRECISION
    )  # fmt: skip
    if sinks_ptr is not None:
        # Last, not first: the loops would carry the layout that sinks are loaded in.
        sink_max, sink = _softmax_start(sinks_ptr, query_head, row_live)
        new_max = tl.maximum(row_max, sink_max)
        alpha = tl.exp2(row_max - new_max)
        acc *= alpha[:, None]
        row_sum = row_sum * alpha + sink * tl.exp2(sink_max - new_max)
    out_row = out_ptr + token * (KV_HEADS * GROUP * HEAD_DIM) + head_col
    mask = row_live[:, None] & (cols < HEAD_DIM)[None, :]
    # Rows that are no query may have seen nothing.
    result = acc * (v_scale / tl.where(row_live, row_sum, 1.0))[:, None]
    _store_rows(out_row[:, None] + cols[None, :], result, out_scale_ptr, mask)
