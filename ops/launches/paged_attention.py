"""Describes the launches of paged attention: one for sequences with one query, one for the rest.

Nothing in them depends on values on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._device_table import num_sms
from .._launch import Launch
from .counters import MAX_COUNTERS
from .counters import counters as _counters
from .paged_attention_plan import MAX_SEQS, AttentionPlan, plan


def programs_at_once(device: torch.device) -> int:
    """Multiprocessors for which a plan is made."""
    # Under the interpreter few programs: it runs them one after the other, and they must loop.
    return 2 if device.type == "cpu" else num_sms(device)


def _check_layout(q: Tensor, kv_cache: Tensor, block_table: Tensor, out: Tensor) -> None:
    head_dim = q.shape[2]
    if q.stride(2) != 1 or q.stride(1) != head_dim:
        raise ValueError(f"q has strides {q.stride()}: heads must be contiguous, only tokens apart")
    if not (out.is_contiguous() and kv_cache.is_contiguous() and block_table.stride(1) == 1):
        raise ValueError("paged_attention needs contiguous out, kv_cache and block_table rows")


@dataclass(frozen=True)
class _Call:
    """The arguments of a call that both kernels take."""

    plan: AttentionPlan
    tensors: dict[str, Tensor | None]
    numbers: dict[str, int | float]
    flags: dict[str, bool]
    dynamic: tuple[str, ...] = ("num_seqs", "table_stride", "window")


def _call(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    out: Tensor,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    kv_scale: Tensor | None = None,
    out_scale: Tensor | None = None,
    *,
    invariant: bool = False,
) -> _Call:
    num_tokens, num_heads, head_dim = q.shape
    num_seqs, max_blocks = block_table.shape
    _, _, block_size, kv_heads, _ = kv_cache.shape
    _check_layout(q, kv_cache, block_table, out)
    if num_seqs > MAX_SEQS or num_seqs * kv_heads > MAX_COUNTERS:
        raise ValueError(
            f"paged_attention takes {MAX_SEQS} sequences and {MAX_COUNTERS} pairs of a sequence"
            f" and a KV head at most, got {num_seqs} sequences of {kv_heads} KV heads"
        )
    tensors = {
        "q_ptr": q,
        "kv_ptr": kv_cache,
        "table_ptr": block_table,
        "seq_lens_ptr": seq_lens,
        "query_start_ptr": query_start_loc,
        "out_ptr": out,
        "kv_scale_ptr": kv_scale,
        "out_scale_ptr": out_scale,
    }
    numbers = {
        "num_seqs": num_seqs,
        "q_stride": q.stride(0),
        "table_stride": block_table.stride(0),
        "scale": scale,
        "window": sliding_window,
        "soft_cap": soft_cap,
    }
    made = plan(
        num_tokens,
        num_seqs,
        max_blocks * block_size,
        kv_heads,
        num_heads // kv_heads,
        head_dim,
        block_size,
        q.element_size(),
        kv_cache.element_size(),
        programs_at_once(q.device),
        invariant,
    )
    flags = {"HAS_WINDOW": sliding_window > 0, "HAS_CAP": soft_cap > 0}
    return _Call(made, tensors, numbers, flags)


def decode(*args: Any) -> list[Launch]:
    """The launch for sequences with one query, of the op's arguments."""
    if not _has_work(*args):
        return []
    call = _call(*args)
    p, device = call.plan, args[0].device
    splits = {"max_splits": p.max_splits, "partial_rows": p.partial_rows}
    scratch = torch.empty(p.scratch_numel, dtype=torch.float32, device=device)
    launch = Launch(
        "paged_attention:_decode_kernel",
        p.decode_grid,
        call.tensors
        | {"scratch_ptr": scratch, "counter_ptr": _counters(device)}
        | splits
        | call.numbers,
        p.decode_constexprs | call.flags,
        p.decode_warps,
        p.decode_stages,
        (*call.dynamic, *splits),
        programmatic=True,
    )
    return [launch]


def prefill(*args: Any, invariant: bool = False) -> list[Launch]:
    """The launch for sequences with more than one query; where there is but one sequence, for it
    whatever it has, so that it needs no other launch.

    ``invariant``: for all sequences, in tiles that do not depend on the batch: then a query's bits
    follow from its own context."""
    if not _has_work(*args):
        return []
    call = _call(*args, invariant=invariant)
    p = call.plan
    fewest = 1 if invariant or len(args[2]) == 1 else 2
    launch = Launch(
        "paged_attention:_prefill_kernel",
        p.prefill_grid,
        call.tensors | call.numbers,
        p.prefill_constexprs | call.flags | {"FEWEST": fewest},
        p.prefill_warps,
        p.prefill_stages,
        call.dynamic,
        programmatic=True,
        max_registers=p.prefill_registers,
    )
    return [launch]


def _has_work(q: Tensor, kv_cache: Tensor, block_table: Tensor, *rest: Any) -> bool:
    return len(q) > 0 and len(block_table) > 0


def paged_attention(*args: Any, invariant: bool = False) -> tuple[list[Launch], None]:
    """All launches of one call, of the op's arguments."""
    num_tokens, num_seqs = len(args[0]), len(args[2])
    if invariant:
        return prefill(*args, invariant=True), None
    if num_tokens == num_seqs:
        return decode(*args), None
    if num_seqs == 1:
        return prefill(*args), None
    return [*prefill(*args), *decode(*args)], None
