"""Runs ``paged_attention`` with the kernels of csrc: the implementation ``cuda``.

A decode kernel takes sequences with one query, a prefill kernel the rest; each is csrc's where that
takes the call, else Triton's.  Which of them are launched follows from shapes, dtypes and features
alone, so a captured graph serves any lengths.
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

_HEAD_DIMS = (64, 128, 256)
_DECODE_HEAD_DIMS = (64, 128)
# Where K and V, as stored in FP8 and widened, fill shared memory: head_dim, most sequences.
_WIDEST, _MOST_SEQS_OF_WIDEST = 256, 64
_BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
_MAX_GROUP = 16

Part: TypeAlias = Callable[..., list[Launch]]


def has_decodes(args: tuple[Any, ...]) -> bool:
    """Whether a call may have what is the decode kernel's.  A lone sequence with more rows than one
    is the prefill kernel's, whatever it has."""
    call = AttentionArgs(*args)
    return call.is_decode or len(call.seq_lens) > 1


def has_prefills(args: tuple[Any, ...]) -> bool:
    """Whether a call may have what is the prefill kernel's: more than one query a sequence."""
    return not AttentionArgs(*args).is_decode


def _own_prefill_refuses(call: AttentionArgs, rows: int, target: Target) -> str:
    """Why the prefills of a call are not csrc's: Triton's kernel is ahead, or was not compared."""
    head_dim = call.q.shape[2]
    if head_dim == 64 and (call.sliding_window or call.chunk or call.soft_cap > 0):
        return "head_dim 64 with a window, chunks or a soft cap: Triton's is ahead"
    if head_dim == _WIDEST and call.soft_cap > 0:
        return f"head_dim {_WIDEST} with a soft cap: not compared with Triton's"
    fills = head_dim == _WIDEST and call.kv_cache.dtype != call.q.dtype
    if fills and (num_seqs := len(call.seq_lens)) > _MOST_SEQS_OF_WIDEST:
        return f"{num_seqs} sequences of head_dim {_WIDEST} in FP8: up to {_MOST_SEQS_OF_WIDEST}"
    return ""


def _own_decode_refuses(call: AttentionArgs, rows: int, target: Target) -> str:
    """Why the decodes of a call are not csrc's."""
    _, num_heads, head_dim = call.q.shape
    if head_dim not in _DECODE_HEAD_DIMS:
        return f"head_dim {head_dim}: the kernel takes {' and '.join(map(str, _DECODE_HEAD_DIMS))}"
    if (group := num_heads // call.kv_cache.shape[3]) > _MAX_GROUP:
        return f"{group} heads share a KV head: a group has at most {_MAX_GROUP}"
    if call.chunk:
        return f"chunks of {call.chunk} positions: the kernel knows sliding windows alone"
    return ""


OWN_PREFILL = Kernel("csrc prefill_attention", _own_prefill_refuses)
PREFILLS = (OWN_PREFILL, Kernel("_prefill_kernel"))
OWN_DECODE = Kernel("csrc paged_attention", _own_decode_refuses)
DECODES = (OWN_DECODE, Kernel("_decode_kernel"))


def has_own_prefill(args: tuple[Any, ...]) -> bool:
    """Whether a call has prefills, and they are csrc's."""
    call = AttentionArgs(*args)
    return not call.is_decode and not _own_prefill_refuses(call, len(call.q), here(call.q.device))


def has_own_decode(args: tuple[Any, ...]) -> bool:
    """Whether a call may have decodes, and they are csrc's."""
    call = AttentionArgs(*args)
    refuses = _own_decode_refuses(call, len(call.q), here(call.q.device))
    return has_decodes(args) and not refuses


def prefill(*args: Any) -> None:
    """The sequences with more than one query; a lone one whatever it has.

    Algorithm: FlashAttention-3 (Shah et al., 2024).
    """
    call, fewest = AttentionArgs(*args), 2 if has_decodes(args) else 1
    torch.ops.fw_cuda.prefill_attention.default(*call, fewest)


def decode(*args: Any) -> None:
    """The sequences with one query."""
    torch.ops.fw_cuda.decode_attention.default(*AttentionArgs(*args)[:12])


def _run(*args: Any, by_triton: Callable[..., None]) -> None:
    if has_own_prefill(args):
        prefill(*args)
    by_triton(*args)  # the parts that are Triton's, if there are any
    if has_own_decode(args):
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


def _launches(*args: Any, triton_prefill: Part, triton_decode: Part) -> Launches[None]:
    prefills = has_prefills(args) and not has_own_prefill(args)
    decodes = has_decodes(args) and not has_own_decode(args)
    launches = [*triton_prefill(*args)] if prefills else []
    return [*launches, *(triton_decode(*args) if decodes else [])], None


def _supports(desc: OpDesc, triton_supports: Callable[[OpDesc], str]) -> str:
    q, kv_cache = desc["q"], desc["kv_cache"]
    head_dim, block_size = q.shape[2], kv_cache.shape[2]
    if reason := why_no_csrc(desc):
        return reason
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"q is {q.dtype}: the kernels take bfloat16 and float16"
    if kv_cache.dtype not in (q.dtype, E4M3):
        return f"KV cache is {kv_cache.dtype}, q is {q.dtype}"
    if head_dim not in _HEAD_DIMS:
        return f"head_dim {head_dim}: the kernels take {', '.join(map(str, _HEAD_DIMS))}"
    if block_size not in _BLOCK_SIZES:
        return f"block size {block_size}: the kernels take powers of two from 8 to 256"
    return triton_supports(desc)


def by_cuda(
    triton_prefill: Part, triton_decode: Part, triton_supports: Callable[[OpDesc], str]
) -> Implementation:
    """The implementation; the arguments are the Triton implementation's."""
    launches = partial(_launches, triton_prefill=triton_prefill, triton_decode=triton_decode)
    return on_gpu(
        "cuda",
        partial(_run, by_triton=run_launches(launches)),
        partial(_supports, triton_supports=triton_supports),
        launches=launches,
        selects=choices,
    )
