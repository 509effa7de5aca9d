"""Describes the launches of paged attention: one for sequences with one query, one for the rest.

Nothing in them depends on values on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.counters import MAX_COUNTERS, counters as _counters
from ..core.device_table import num_sms
from ..core.launch import Launch, Launches
from .paged_attention_plan import MAX_SEQS, AttentionPlan, plan

# A window, or a chunk, of all positions.
_ALL = 2**31 - 1
# Positions of a window or chunk from which on most tiles need no mask.
_WIDE = 512


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


class AttentionArgs(NamedTuple):
    """The arguments of the op ``paged_attention``."""

    q: Any
    kv_cache: Any
    block_table: Any
    seq_lens: Any
    query_start_loc: Any
    out: Any
    scale: float
    sliding_window: int
    soft_cap: float
    kv_scale: Any = None
    out_scale: Any = None
    sinks: Any = None
    chunk: int = 0

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one query."""
        return len(self.q) == len(self.seq_lens)

    @property
    def is_empty(self) -> bool:
        return not (len(self.q) and len(self.seq_lens))


def first_seen(position: int, sliding_window: int, chunk: int) -> int:
    """The first position that a query at ``position`` sees."""
    first = max(0, position - sliding_window + 1) if sliding_window > 0 else 0
    return max(first, position // chunk * chunk) if chunk > 0 else first


@dataclass(frozen=True)
class _KernelArgs:
    """The arguments that both kernels share."""

    plan: AttentionPlan
    tensors: dict[str, Tensor | int | None]
    numbers: dict[str, int | float]
    flags: dict[str, bool]
    dynamic: tuple[str, ...] = ("num_seqs", "table_stride", "window", "chunk")


def _kernel_args(call: AttentionArgs, *, invariant: bool = False) -> _KernelArgs:
    q, kv_cache, block_table, out = call.q, call.kv_cache, call.block_table, call.out
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
        "q_stride": q.stride(0),
        "table_ptr": block_table,
        "table_stride": block_table.stride(0),
        "kv_ptr": kv_cache,
        "seq_lens_ptr": call.seq_lens,
        "query_start_ptr": call.query_start_loc,
        "out_ptr": out,
        "kv_scale_ptr": call.kv_scale,
        "out_scale_ptr": call.out_scale,
        "sinks_ptr": call.sinks,
    }
    numbers = {
        "num_seqs": num_seqs,
        "scale": call.scale,
        "window": call.sliding_window or _ALL,
        "chunk": call.chunk or _ALL,
        "soft_cap": call.soft_cap,
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
    has_window = call.sliding_window > 0 or call.chunk > 0
    flags = {"HAS_WINDOW": has_window, "HAS_CAP": call.soft_cap > 0}
    return _KernelArgs(made, tensors, numbers, flags)


def decode(*args: Any) -> list[Launch]:
    """The launch for sequences with one query, of the op's arguments."""
    call = AttentionArgs(*args)
    if call.is_empty:
        return []
    given = _kernel_args(call)
    p, device = given.plan, call.q.device
    splits = {"max_splits": p.max_splits, "partial_rows": p.partial_rows}
    scratch = torch.empty(p.scratch_numel, dtype=torch.float32, device=device)
    launch = Launch(
        "paged_attention:_decode_kernel",
        p.decode_grid,
        given.tensors
        | {"scratch_ptr": scratch, "counter_ptr": _counters(device)}
        | splits
        | given.numbers,
        p.decode_constexprs | given.flags,
        p.decode_warps,
        p.decode_stages,
        (*given.dynamic, *splits),
    )
    return [launch]


def prefill(*args: Any, invariant: bool = False) -> list[Launch]:
    """The launch for sequences with more than one query; where there is but one sequence, for it
    whatever it has, so that it needs no other launch.

    ``invariant``: for all sequences, in tiles that do not depend on the batch: then a query's bits
    follow from its own context."""
    call = AttentionArgs(*args)
    if call.is_empty:
        return []
    given = _kernel_args(call, invariant=invariant)
    p = given.plan
    fewest = 1 if invariant or len(call.seq_lens) == 1 else 2
    is_wide = _WIDE <= min(given.numbers["window"], given.numbers["chunk"]) < _ALL
    launch = Launch(
        "paged_attention:_prefill_kernel",
        p.prefill_grid,
        given.tensors | given.numbers,
        p.prefill_constexprs | given.flags | {"FEWEST": fewest, "IS_WIDE": is_wide},
        p.prefill_warps,
        p.prefill_stages,
        given.dynamic,
        max_registers=p.prefill_registers,
    )
    return [launch]


def paged_attention(*args: Any, invariant: bool = False) -> Launches[None]:
    """All launches of one call; takes the op's arguments."""
    call = AttentionArgs(*args)
    if invariant:
        return prefill(*args, invariant=True), None
    if call.is_decode:
        return decode(*args), None
    if len(call.seq_lens) == 1:
        return prefill(*args), None
    return [*prefill(*args), *decode(*args)], None
