"""Plans what one shape of paged attention launches: grids, tiles and scratch, as pure data.

Decode tiles depend on the model's shape and dtypes alone; prefill tiles have more or fewer rows by
the batch, but never other columns.  How many splits a long decode has, the kernel decides from all
lengths of its batch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from ...config.arch import HOPPER
from ..core.tiles import cdiv, next_power_of_2

# Every program holds all lengths in registers.
MAX_SEQS = 4096
# Bounds the float32 scratch of split sequences: heads x head_dim x 4 bytes for each.
MAX_PARTIALS = 8192

MAX_HEAD_DIM = 512

MOST_DECODE_STAGES = 4
# What Triton needs of shared memory for exchanges between warps, at most.
EXCHANGE_BYTES = 4608
# Tokens of the shortest split; no tile is longer.
MIN_SPLIT = 128
# Short prompts have at most this many tokens on average, and at most eight times as many together.
MOST_SHORT_TOKENS = 512
# At most 128 tokens a sequence on average and more than 1024 together are not short prompts, but
# many decodes or very short prompts.
FEW_TOKENS, MANY_TOGETHER = 128, 1024


def most_heads_of_a_group(head_dim: int) -> int:
    """Query heads that may share a KV head: a tile has a row for each, whose float32 sums, padded
    to a power of two, fill the registers of 8 warps by half."""
    return min(128, 32768 // max(16, next_power_of_2(head_dim)))


@dataclass(frozen=True)
class AttentionPlan:
    """The launches of one shape, as cached data.  ``scratch_numel`` counts float32 elements."""

    decode_grid: tuple[int, ...]
    decode_constexprs: dict[str, Any]
    decode_warps: int
    decode_stages: int
    max_splits: int
    partial_rows: int
    scratch_numel: int
    prefill_grid: tuple[int, ...]
    prefill_constexprs: dict[str, Any]
    prefill_warps: int
    prefill_stages: int
    prefill_registers: int


def _max_splits(num_seqs: int, kv_heads: int, max_context: int) -> int:
    """Splits of the longest sequence: enough programs for one sequence to fill the device.

    Falls with ``num_seqs`` only where scratch would pass MAX_PARTIALS.
    """
    fill_device = max(32, min(64, 256 // kv_heads))
    return max(1, min(fill_device, cdiv(max_context, MIN_SPLIT), MAX_PARTIALS // num_seqs))


def _decode_stages(tile_bytes: int, q_bytes: int) -> tuple[int, int]:
    """(stages of K and V, shared memory that they take with q, in bytes).  Of one stage K and V are
    in registers."""
    for stages in range(MOST_DECODE_STAGES, 1, -1):
        shared_bytes = 2 * (stages - 1) * tile_bytes + q_bytes + EXCHANGE_BYTES
        if shared_bytes <= HOPPER.shared_bytes:
            break
    return stages, shared_bytes


def _prefill_tile(
    block_d: int,
    itemsize: int,
    group: int,
    num_tokens: int,
    num_seqs: int,
    kv_heads: int,
    num_sms: int,
    kv_itemsize: int,
    invariant: bool,
) -> tuple[int, int, int, int, int]:
    """(BLOCK_M, BLOCK_N, warps, stages, registers).  BLOCK_N never depends on the batch: rounding
    would."""
    group_rows = next_power_of_2(group)
    if itemsize == 4:
        return max(16, group_rows), 32 if block_d <= 64 else 16, 4, 2, 0
    if block_d > 256:  # what 64 rows leave of registers and shared memory
        return 64, 32, 8, 2, 0
    # Three stages, where shared memory has room, so that loads also overlap QK and softmax.
    stages = 3 if block_d <= 128 else 2
    if invariant:  # its rows are mostly those of decodes, its time that of their loads
        return max(64, group_rows), 64, 4 if block_d <= 128 else 8, stages, 0
    few_programs = cdiv(num_tokens * group, 128) * kv_heads < num_sms
    # Two programs of short prompts fit a multiprocessor: a program spends its time on its begin.
    short_prompts = num_tokens <= min(MOST_SHORT_TOKENS * num_seqs, 8 * MOST_SHORT_TOKENS)
    short_prompts &= num_tokens > FEW_TOKENS * num_seqs or num_tokens <= MANY_TOGETHER
    if (few_programs or short_prompts) and group_rows <= 64:
        return 64, 64, 4 if block_d <= 128 else 8, 2, 0
    if block_d == 128 and itemsize == kv_itemsize:
        # So that two fit a multiprocessor: one alone takes a tenth longer with three stages.
        return 128, 64, 8, 2, 128
    return 128, 64, 8, stages, 0


@functools.lru_cache(maxsize=4096)
def plan(
    num_tokens: int,
    num_seqs: int,
    max_context: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    itemsize: int,
    kv_itemsize: int,
    num_sms: int,
    invariant: bool = False,
) -> AttentionPlan:
    block_d = max(16, next_power_of_2(head_dim))
    # Few variants, since each is a compilation; a larger scan costs little.
    seqs = next(n for n in (1, 64, 1024, MAX_SEQS) if num_seqs <= n)
    shared = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "SEQS": seqs,
        "BLOCK_D": block_d,
        "PRECISION": "ieee" if itemsize == 4 else "tf32",
    }
    # At most 8 KiB of K a tile, so that four programs fit one multiprocessor: while one has
    # nothing in flight, between its items, the others must have.
    block_n = max(16, min(64, 8192 // (block_d * kv_itemsize)))
    max_splits = _max_splits(num_seqs, kv_heads, max_context)
    partial_rows = num_seqs * kv_heads * max_splits * group if max_splits > 1 else 0
    block_g = next_power_of_2(group)
    decode = shared | {
        "MIN_SPLIT": MIN_SPLIT,
        "BLOCK_M": max(16, block_g),
        "BLOCK_N": block_n,
        "BLOCK_G": block_g,
        "MERGE_BLOCK": max(1, min(16, 4096 // (block_g * block_d))),
    }
    block_m, prefill_n, prefill_warps, stages, registers = _prefill_tile(
        block_d, itemsize, group, num_tokens, num_seqs, kv_heads, num_sms, kv_itemsize, invariant
    )
    tiles = min(num_tokens // (block_m // group) + num_seqs, num_tokens)
    warps = 4 if block_g <= 32 else 8
    decode_stages, shared_bytes = _decode_stages(
        block_n * block_d * kv_itemsize, max(16, block_g) * block_d * itemsize
    )
    # As many programs as fit at once: by registers, 128 a thread, and by shared memory.
    persistent = max(1, min(16 // warps, HOPPER.shared_bytes // shared_bytes)) * num_sms
    return AttentionPlan(
        decode_grid=(min(num_seqs * kv_heads * max_splits, persistent),),
        decode_constexprs=decode,
        decode_warps=warps,
        decode_stages=decode_stages,
        max_splits=max_splits,
        partial_rows=partial_rows,
        scratch_numel=max(1, partial_rows * (head_dim + 1)),
        prefill_grid=(kv_heads, tiles),
        prefill_constexprs=shared | {"BLOCK_M": block_m, "BLOCK_N": prefill_n},
        prefill_warps=prefill_warps,
        prefill_stages=stages,
        prefill_registers=registers,
    )
