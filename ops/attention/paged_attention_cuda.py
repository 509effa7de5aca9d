"""Runs ``paged_attention`` with the kernels of csrc: the implementation ``cuda``.

The decode kernel takes sequences with one query, a prefill kernel the rest: csrc's for a head_dim
of 128 and K and V of q's dtype, else Triton's.  Which of them are launched follows from shapes and
dtypes alone, so a captured graph serves any lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch

from ..core.choice import Choice, Kernel, select
from ..core.cuda import why_no_csrc
from ..core.desc import OpDesc
from ..core.float8 import E4M3
from ..core.launch import Launch, Launches, run_launches
from ..core.op import Implementation, on_gpu
from ..core.target import Target, here
from ..launches.paged_attention import AttentionArgs

_HEAD_DIMS = (64, 128)
_PREFILL_HEAD_DIM = 128
_BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
_MAX_GROUP = 16

Prefill: TypeAlias = Callable[..., list[Launch]]


def has_decodes(args: tuple[Any, ...]) -> bool:
    """Whether a call may have what is the decode kernel's.  A lone sequence with more rows than one
    is the prefill kernel's, whatever it has."""
    call = AttentionArgs(*args)
    return call.is_decode or len(call.seq_lens) > 1


def has_prefills(args: tuple[Any, ...]) -> bool:
    """Whether a call may have what is the prefill kernel's: more than one query a sequence."""
    return not AttentionArgs(*args).is_decode


def _own_prefill_refuses(call: AttentionArgs, rows: int, target: Target) -> str:
    """Why the prefills of a call are not csrc's: it multiplies K and V as they are stored."""
    if call.kv_cache.dtype != call.q.dtype:
        return f"K and V are {call.kv_cache.dtype}, q is {call.q.dtype}"
    if (head_dim := call.q.shape[2]) != _PREFILL_HEAD_DIM:
        return f"head_dim {head_dim}: no faster than Triton's but at {_PREFILL_HEAD_DIM}"
    return ""


OWN_PREFILL = Kernel("csrc prefill_attention", _own_prefill_refuses)
PREFILLS = (OWN_PREFILL, Kernel("_prefill_kernel"))
DECODES = (Kernel("csrc paged_attention"),)


def has_own_prefill(args: tuple[Any, ...]) -> bool:
    """Whether a call has prefills, and they are csrc's."""
    call = AttentionArgs(*args)
    return not call.is_decode and not _own_prefill_refuses(call, len(call.q), here(call.q.device))


def prefill(*args: Any) -> None:
    """The sequences with more than one query; a lone one whatever it has.

    Algorithm: FlashAttention-3 (Shah et al., 2024).
    """
    call, fewest = AttentionArgs(*args), 2 if has_decodes(args) else 1
    torch.ops.fw_cuda.prefill_attention.default(*call[:9], call.out_scale, fewest)


def decode(*args: Any) -> None:
    """The sequences with one query."""
    torch.ops.fw_cuda.decode_attention.default(*AttentionArgs(*args)[:11])


def _run(*args: Any, triton_prefill: Callable[..., None]) -> None:
    if has_own_prefill(args):
        prefill(*args)
    elif has_prefills(args):
        triton_prefill(*args)
    if has_decodes(args):
        decode(*args)


def choices(*args: Any) -> tuple[Choice, ...]:
    """The kernels that a call launches."""
    call = AttentionArgs(*args)
    rows, target = len(call.q), here(call.q.device)
    parts = (
        ("attention of prefills", PREFILLS, has_prefills(args)),
        ("attention of decodes", DECODES, has_decodes(args)),
    )
    return tuple(select(call, rows, target, kernels, of) for of, kernels, is_run in parts if is_run)


def _launches(*args: Any, triton_prefill: Prefill) -> Launches[None]:
    by_triton = has_prefills(args) and not has_own_prefill(args)
    return triton_prefill(*args) if by_triton else [], None


def _supports(desc: OpDesc, triton_supports: Callable[[OpDesc], str]) -> str:
    q, kv_cache = desc["q"], desc["kv_cache"]
    _, num_heads, head_dim = q.shape
    _, _, block_size, kv_heads, _ = kv_cache.shape
    if reason := why_no_csrc(desc):
        return reason
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"q is {q.dtype}: the kernel takes bfloat16 and float16"
    if kv_cache.dtype not in (q.dtype, E4M3):
        return f"KV cache is {kv_cache.dtype}, q is {q.dtype}"
    if head_dim not in _HEAD_DIMS:
        return f"head_dim {head_dim}: the kernel takes {' and '.join(map(str, _HEAD_DIMS))}"
    if block_size not in _BLOCK_SIZES:
        return f"block size {block_size}: the kernel takes powers of two from 8 to 256"
    if num_heads // kv_heads > _MAX_GROUP:
        return f"{num_heads} heads share {kv_heads} KV heads: a group has at most {_MAX_GROUP}"
    if desc["sinks"] is not None:
        return "sinks: the kernel's softmax has none"
    if desc["chunk"]:
        return f"chunks of {desc['chunk']} positions: the kernel knows sliding windows alone"
    return triton_supports(desc)


def by_cuda(triton_prefill: Prefill, triton_supports: Callable[[OpDesc], str]) -> Implementation:
    """The implementation; both arguments are the Triton implementation's."""
    launches = partial(_launches, triton_prefill=triton_prefill)
    return on_gpu(
        "cuda",
        partial(_run, triton_prefill=run_launches(launches)),
        partial(_supports, triton_supports=triton_supports),
        launches=launches,
        selects=choices,
    )
