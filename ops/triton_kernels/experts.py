"""The experts' GEMM over gathered rows, the sort of slots by expert, and the sum over experts.

A slot is one choice of a token: slot ``token * top_k + place``.  Tokens are never moved: the sort
makes an index, by which the GEMM gathers rows of x and scatters rows of its result.  How many slots
an expert has is read on the device, so grids are upper bounds and a graph serves any routing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import gated_with
from .dependent import start_next_and_wait, wait_for_previous
from .float8 import to_float32
from .lowbit import numbers_of, scales_in_float32

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _sort_by_expert_kernel(
    ids_ptr,
    first_ptr,
    order_ptr,
    offsets_ptr,
    num_slots,
    BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """Slots by expert, in order; ``offsets[e]`` is the first of expert e.  One program an expert:
    it counts the slots of those before it, then writes its own.  ``first_ptr`` has the id of the
    first expert here; slots of those that are elsewhere are before all or behind all."""
    start_next_and_wait(PROGRAMMATIC)
    expert = tl.program_id(0)
    wanted = expert
    if first_ptr is not None:
        wanted += tl.load(first_ptr)
    lanes = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, num_slots, BLOCK):
        slots = start + lanes
        found = tl.load(ids_ptr + slots, mask=slots < num_slots, other=wanted)
        before += (found < wanted).to(tl.int32)
    first = tl.sum(before, axis=0)
    tl.store(offsets_ptr + expert, first)
    if first_ptr is None and expert == tl.num_programs(0) - 1:
        tl.store(offsets_ptr + expert + 1, num_slots)
    for start in range(0, num_slots, BLOCK):
        slots = start + lanes
        found = tl.load(ids_ptr + slots, mask=slots < num_slots, other=-1)
        mine = (found == wanted).to(tl.int32)
        places = first + tl.cumsum(mine, axis=0) - 1
        tl.store(order_ptr + places, slots, mask=mine > 0)
        first += tl.sum(mine, axis=0)
    if first_ptr is not None and expert == tl.num_programs(0) - 1:
        tl.store(offsets_ptr + expert + 1, first)


@triton.jit
def _count_by_expert_kernel(
    ids_ptr,
    counts_ptr,
    num_slots,
    EXPERTS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """``counts[chunk, expert]``: how many of a chunk's BLOCK slots chose an expert.  One program a
    chunk."""
    start_next_and_wait(PROGRAMMATIC)
    chunk = tl.program_id(0)
    slots = chunk * BLOCK + tl.arange(0, BLOCK)
    there = slots < num_slots
    ids = tl.load(ids_ptr + slots, mask=there, other=0)
    counts = tl.histogram(ids, EXPERTS_BLOCK, mask=there)
    tl.store(counts_ptr + chunk * EXPERTS_BLOCK + tl.arange(0, EXPERTS_BLOCK), counts)


@triton.jit
def _place_by_expert_kernel(
    ids_ptr,
    counts_ptr,
    order_ptr,
    offsets_ptr,
    num_slots,
    num_chunks,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    COUNTS_BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """The order and offsets that ``_sort_by_expert_kernel`` makes, from ``counts``.  A program
    places the slots of one expert in CHUNKS chunks.  It adds up the counts before them, of
    COUNTS_BLOCK chunks at a time, to know where they begin."""
    start_next_and_wait(PROGRAMMATIC)
    expert = tl.program_id(0) % NUM_EXPERTS
    first_chunk = tl.program_id(0) // NUM_EXPERTS * CHUNKS
    experts = tl.arange(0, EXPERTS_BLOCK)
    before = tl.zeros((EXPERTS_BLOCK,), dtype=tl.int32)
    for start in range(0, num_chunks, COUNTS_BLOCK):
        chunks = start + tl.arange(0, COUNTS_BLOCK)
        counts = tl.load(
            counts_ptr + chunks[:, None] * EXPERTS_BLOCK + experts[None, :],
            mask=(chunks < num_chunks)[:, None],
            other=0,
        )
        # Lower experts' slots of any chunk come first, then this expert's of earlier chunks.
        end = expert + (chunks < first_chunk).to(tl.int32)
        before += tl.sum(tl.where(experts[None, :] < end[:, None], counts, 0), axis=0)
    first = tl.sum(before, axis=0)
    if first_chunk == 0:
        tl.store(offsets_ptr + expert, first)
        if expert == NUM_EXPERTS - 1:
            tl.store(offsets_ptr + NUM_EXPERTS, num_slots)
    lanes = tl.arange(0, BLOCK)
    for chunk in range(first_chunk, tl.minimum(first_chunk + CHUNKS, num_chunks)):
        slots = chunk * BLOCK + lanes
        found = tl.load(ids_ptr + slots, mask=slots < num_slots, other=-1)
        mine = (found == expert).to(tl.int32)
        places = first + tl.cumsum(mine, axis=0) - 1
        tl.store(order_ptr + places, slots, mask=mine > 0)
        first += tl.sum(mine, axis=0)


@triton.jit
def _mma(x, w, total, SWAPPED: tl.constexpr):
    """``total`` plus x @ w.T; both transposed if SWAPPED."""
    if _INTERPRETED and x.dtype == tl.bfloat16:  # it holds bfloat16 as integers
        x = x.to(tl.float32)
        w = w.to(tl.float32)
    left, right = (w, tl.trans(x)) if SWAPPED else (x, tl.trans(w))
    if x.dtype == tl.float8e4nv:
        depth: tl.constexpr = x.shape[1]
        total = tl.dot(left, right, total, max_num_imprecise_acc=depth)
    else:
        total = tl.dot(left, right, total, input_precision="ieee")
    return total


@triton.jit
def _outer(of_rows, of_cols, SWAPPED: tl.constexpr):
    """The products of scales, like a tile of sums."""
    if SWAPPED:
        return of_cols[:, None] * of_rows[None, :]
    else:
        return of_rows[:, None] * of_cols[None, :]


@triton.jit
def _add_step(total, x, w, x_scale, scales, start, SCHEME: tl.constexpr, SWAPPED: tl.constexpr):
    """``total`` plus the product of a step, which has scales of its own in the scheme "block"."""
    if SCHEME == "block":
        part = _mma(x, w, tl.zeros_like(total), SWAPPED)
        return total + part * _outer(x_scale, tl.load(scales + start // 128), SWAPPED)
    else:
        return _mma(x, w, total, SWAPPED)


@triton.jit
def _tile_of_expert(
    tile, offsets_ptr, NUM_EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr
):
    """(expert, first place in the order, end of the expert's places) of a row tile; the expert is
    NUM_EXPERTS where there are fewer tiles."""
    experts = tl.arange(0, EXPERTS_BLOCK)
    there = experts < NUM_EXPERTS
    starts = tl.load(offsets_ptr + experts, mask=there, other=0)
    ends = tl.load(offsets_ptr + 1 + experts, mask=there, other=0)
    tiles = (ends - starts + BLOCK_M - 1) // BLOCK_M
    upto = tl.cumsum(tiles, axis=0)
    expert = tl.sum((there & (upto <= tile)).to(tl.int32), axis=0)
    mine = experts == expert
    within = tile - tl.sum(tl.where(mine, upto - tiles, 0), axis=0)
    first = tl.sum(tl.where(mine, starts, 0), axis=0) + within * BLOCK_M
    return expert, first, tl.sum(tl.where(mine, ends, 0), axis=0)


@triton.jit
def _expert_of_slot(slot, ids_ptr, first_ptr, NUM_EXPERTS: tl.constexpr):
    """The expert that a slot chose, counted from the first one here; NUM_EXPERTS if it is not."""
    expert = tl.load(ids_ptr + slot)
    if first_ptr is not None:
        expert -= tl.load(first_ptr)
        expert = tl.where(expert < 0, NUM_EXPERTS, expert)
    return expert


@triton.jit
def _load_weight(
    rows_at, scales_at, zeros_at, start, K, dtype: tl.constexpr, STORED: tl.constexpr,
    ZEROS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr,
    WHOLE_STEPS: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Columns from ``start`` on of some rows, [rows, BLOCK_K]; 0 behind K.  Of a STORED weight they
    are in ``dtype``.

    ``rows_at``, ``scales_at`` and ``zeros_at``, which is read with ZEROS, point to the rows' first
    numbers or words, scales and zero points.  A word's numbers are of one group.
    """
    if STORED is None:
        columns = start + tl.arange(0, BLOCK_K)
        inside = None if WHOLE_STEPS else (columns < K)[None, :]
        other = None if WHOLE_STEPS else 0.0
        loaded = tl.load(rows_at[:, None] + columns[None, :], mask=inside, other=other)
    else:
        each: tl.constexpr = 32 // BITS
        places = start // each + tl.arange(0, BLOCK_K // each)
        groups = places * each // GROUP
        inside = None if WHOLE_STEPS else (places * each < K)[None, :]
        other = None if WHOLE_STEPS else 0
        words = tl.load(rows_at[:, None] + places[None, :], mask=inside, other=other)
        scales = tl.load(scales_at[:, None] + groups[None, :], mask=inside, other=other)
        if WHOLE_STEPS:
            factors = scales_in_float32(scales)
        else:  # an exponent of 0 is no 0
            factors = tl.where(inside, scales_in_float32(scales), 0.0)
        zeros = None
        if ZEROS:
            at = zeros_at[:, None] + groups[None, :]
            zeros = tl.load(at, mask=inside, other=other).to(tl.float32)
        loaded = numbers_of(words, zeros, factors, 0x76543210, BITS, STORED, dtype, OFFSET)
    return loaded


@triton.jit
def _tile_of_program(tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(row tile, column tile): GROUP_M row tiles go before the next column tile."""
    tiles_in_group = GROUP_M * tiles_n
    first = tl.program_id(0) // tiles_in_group * GROUP_M
    group_tiles = tl.minimum(tiles_m - first, GROUP_M)
    within = tl.program_id(0) % tiles_in_group
    return first + within % group_tiles, within // group_tiles


@triton.jit
def _rows_of_expert(
    weight_ptr, scale_ptr, zero_ptr, expert, rows, expert_stride, weight_stride, expert_scales,
    scales_row, SCHEME: tl.constexpr, STORED: tl.constexpr
):  # fmt: skip
    """Where rows of an expert's weight, their scales and their zero points begin; zero points lie
    like scales.  What the weight does not have is the rows again: no function returns None."""
    wide = expert.to(tl.int64)
    at = weight_ptr + wide * expert_stride + rows.to(tl.int64) * weight_stride
    scales = at
    zeros = at
    if SCHEME == "tensor":
        scales = scale_ptr + expert
    elif SCHEME != "none" or STORED is not None:
        unit: tl.constexpr = 128 if SCHEME == "block" else 1
        scales = scale_ptr + wide * expert_scales + rows // unit * scales_row
    if zero_ptr is not None:
        zeros = zero_ptr + wide * expert_scales + rows * scales_row
    return at, scales, zeros


@triton.jit
def _load_x(
    x_at, x_scales, start, K, x_scale_group, SCHEME: tl.constexpr, WHOLE_STEPS: tl.constexpr,
    BLOCK_K: tl.constexpr
):  # fmt: skip
    """Columns from ``start`` on of some rows, and their scales in the scheme "block"."""
    columns = start + tl.arange(0, BLOCK_K)
    inside = None if WHOLE_STEPS else (columns < K)[None, :]
    other = None if WHOLE_STEPS else 0.0
    x = tl.load(x_at[:, None] + columns[None, :], mask=inside, other=other)
    x_scale = 0.0
    if SCHEME == "block":
        x_scale = tl.load(x_scales + start // 128 * x_scale_group)
    return x, x_scale


@triton.jit
def _finished(
    total, x_scales, scales, bias_ptr, biases, SCHEME: tl.constexpr,
    SWAPPED: tl.constexpr
):  # fmt: skip
    """Sums times the scales of rows and columns, or of the whole tensors, plus the biases."""
    if SCHEME == "tensor":
        total *= tl.load(x_scales) * tl.load(scales)
    elif SCHEME == "token":
        total *= _outer(tl.load(x_scales), tl.load(scales), SWAPPED)
    if bias_ptr is not None:
        bias = to_float32(tl.load(bias_ptr + biases))
        total += bias[:, None] if SWAPPED else bias[None, :]
    return total


@triton.jit
def _expert_linear_kernel(
    x_ptr, x_scale_ptr, weight_ptr, weight_scale_ptr, weight_zero_ptr, bias_ptr, ids_ptr, first_ptr,
    order_ptr, offsets_ptr, out_ptr, tiles_m, N, K, x_stride, x_scale_row, x_scale_group,
    expert_stride, weight_stride, expert_scales, scales_row, SLOTS_A_ROW: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, SCHEME: tl.constexpr,
    STORED: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, OFFSET: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr, SWAPPED: tl.constexpr, WHOLE_STEPS: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PROGRAMMATIC: tl.constexpr
):  # fmt: skip
    """out[slot] = x[slot // SLOTS_A_ROW] @ weight[expert of slot].T, scaled, plus a bias; with an
    ACTIVATION N columns of ``act(gate) * up``, of weights with N rows of gate, then N of up, or
    with pairs of both if INTERLEAVED.  Slots of experts that are not here are left out.  Without
    ``order_ptr`` a tile is one slot: for so few that sorting would take longer than it saves.
    """
    wait_for_previous(PROGRAMMATIC)
    tile, column = _tile_of_program(tiles_m, tl.cdiv(N, BLOCK_N), GROUP_M)
    if order_ptr is None:
        expert, first, end = _expert_of_slot(tile, ids_ptr, first_ptr, NUM_EXPERTS), tile, tile + 1
    else:
        expert, first, end = _tile_of_expert(tile, offsets_ptr, NUM_EXPERTS, EXPERTS_BLOCK, BLOCK_M)
    if order_ptr is not None or first_ptr is not None:  # noqa: SIM102 - known when compiled
        if expert >= NUM_EXPERTS:
            return
    # Places and columns outside are read as the last ones, and not written.
    places = first + tl.arange(0, BLOCK_M)
    slots = tl.minimum(places, end - 1)
    if order_ptr is not None:
        slots = tl.load(order_ptr + slots)
    cols = column * BLOCK_N + tl.arange(0, BLOCK_N)
    read_cols = tl.minimum(cols, N - 1)
    x_rows = slots // SLOTS_A_ROW
    x_at = x_ptr + x_rows.to(tl.int64) * x_stride
    gate_rows = 2 * read_cols if INTERLEAVED else read_cols
    up_rows = gate_rows + (1 if INTERLEAVED else N)
    ZEROS: tl.constexpr = weight_zero_ptr is not None
    gate_at, gate_scales, gate_zeros = _rows_of_expert(
        weight_ptr, weight_scale_ptr, weight_zero_ptr, expert, gate_rows, expert_stride,
        weight_stride, expert_scales, scales_row, SCHEME, STORED
    )  # fmt: skip
    up_at, up_scales, up_zeros = _rows_of_expert(
        weight_ptr, weight_scale_ptr, weight_zero_ptr, expert, up_rows, expert_stride,
        weight_stride, expert_scales, scales_row, SCHEME, STORED
    )  # fmt: skip
    x_scales = x_scale_ptr
    if SCHEME == "token" or SCHEME == "block":
        x_scales = x_scale_ptr + x_rows * x_scale_row
    shape: tl.constexpr = (BLOCK_N, BLOCK_M) if SWAPPED else (BLOCK_M, BLOCK_N)
    total = tl.zeros(shape, dtype=tl.float32)
    up_total = tl.zeros(shape, dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        x, x_scale = _load_x(
            x_at, x_scales, start, K, x_scale_group, SCHEME, WHOLE_STEPS, BLOCK_K
        )  # fmt: skip
        w = _load_weight(
            gate_at, gate_scales, gate_zeros, start, K, x.dtype, STORED, ZEROS, BITS, GROUP,
            OFFSET, WHOLE_STEPS, BLOCK_K
        )  # fmt: skip
        total = _add_step(total, x, w, x_scale, gate_scales, start, SCHEME, SWAPPED)
        if ACTIVATION is not None:
            w = _load_weight(
                up_at, up_scales, up_zeros, start, K, x.dtype, STORED, ZEROS, BITS, GROUP, OFFSET,
                WHOLE_STEPS, BLOCK_K
            )  # fmt: skip
            up_total = _add_step(up_total, x, w, x_scale, up_scales, start, SCHEME, SWAPPED)
    biases = expert.to(tl.int64) * (N if ACTIVATION is None else 2 * N)
    total = _finished(total, x_scales, gate_scales, bias_ptr, biases + gate_rows, SCHEME, SWAPPED)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if ACTIVATION is not None:
        up_total = _finished(
            up_total, x_scales, up_scales, bias_ptr, biases + up_rows, SCHEME, SWAPPED
        )
        gate, up = total.to(dtype).to(tl.float32), up_total.to(dtype).to(tl.float32)
        total = gated_with(gate, up, ACTIVATION, ALPHA, LIMIT, UP_OFFSET)
    if SWAPPED:
        total = tl.trans(total)
    out = out_ptr + slots.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(out, total.to(dtype), mask=(places < end)[:, None] & (cols < N)[None, :])


@triton.jit
def _combined(
    y_ptr, weights_ptr, shared_ptr, gate_ptr, residual_ptr, token, cols, mask, y_stride,
    shared_stride, gate_stride, residual_stride, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
    dtype: tl.constexpr
):  # fmt: skip
    """Columns of a token's results, weighted and added in the order in which they were chosen, with
    what is beside them; rounded as the ops in turn."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for place in tl.static_range(TOP_K):
        slot = token * TOP_K + place
        weight = tl.load(weights_ptr + slot)
        total += weight * to_float32(tl.load(y_ptr + slot * y_stride + cols, mask=mask, other=0.0))
    if shared_ptr is not None:
        shared = to_float32(
            tl.load(shared_ptr + token * shared_stride + cols, mask=mask, other=0.0)
        )
        if gate_ptr is not None:
            gate = tl.load(gate_ptr + token * gate_stride).to(tl.float32)
            shared *= 1.0 / (1.0 + tl.exp(-gate))
        total += shared
    out = total.to(dtype)
    if residual_ptr is not None:
        residual = to_float32(
            tl.load(residual_ptr + token * residual_stride + cols, mask=mask, other=0.0)
        )
        out = (out.to(tl.float32) + residual).to(dtype)
    return out


@triton.jit
def _combine_experts_kernel(
    y_ptr, weights_ptr, shared_ptr, gate_ptr, residual_ptr, out_ptr, hidden, y_stride,
    shared_stride, gate_stride, residual_stride, TOP_K: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr
):  # fmt: skip
    """The sum of a token's experts, PARTS programs a token."""
    start_next_and_wait(PROGRAMMATIC)
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    cols = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    mask = cols < hidden
    out = _combined(
        y_ptr, weights_ptr, shared_ptr, gate_ptr, residual_ptr, token, cols, mask, y_stride,
        shared_stride, gate_stride, residual_stride, TOP_K, BLOCK, out_ptr.dtype.element_ty
    )  # fmt: skip
    tl.store(out_ptr + token * hidden + cols, out, mask=mask)


@triton.jit
def _combine_add_norm_kernel(
    y_ptr, weights_ptr, shared_ptr, gate_ptr, residual_ptr, out_ptr, hidden, y_stride,
    shared_stride, gate_stride, residual_stride, norm_weight_ptr, normed_ptr, eps,
    TOP_K: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr, PROGRAMMATIC: tl.constexpr
):  # fmt: skip
    """The sum of a token's experts and the residual, and its RMSNorm."""
    start_next_and_wait(PROGRAMMATIC)
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < hidden
    weight = tl.load(norm_weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    total = _combined(
        y_ptr, weights_ptr, shared_ptr, gate_ptr, residual_ptr, token, cols, mask, y_stride,
        shared_stride, gate_stride, residual_stride, TOP_K, BLOCK, dtype
    )  # fmt: skip
    tl.store(out_ptr + token * hidden + cols, total, mask=mask)
    x = to_float32(total)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)
    if OFFSET is None:
        normed = normed.to(dtype).to(tl.float32)
    else:  # the product is rounded once
        weight += OFFSET
    tl.store(normed_ptr + token * hidden + cols, (normed * weight).to(dtype), mask=mask)
