"""``paged_attention`` with the decode kernel of csrc: the implementation ``cuda``.

It takes sequences with one query, the Triton prefill kernel the rest.  Which of the two are
launched follows from shapes alone, so a captured graph serves any lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch

from ._cuda import why_no_csrc
from ._float8 import E4M3
from ._launch import Launch, run_launches
from ._op import Implementation, OpDesc

_SM = 90
_HEAD_DIMS = (64, 128)
_PAGES = (8, 16, 32, 64, 128, 256)
_MAX_GROUP = 16

Prefill: TypeAlias = Callable[..., list[Launch]]


def has_decodes(args: tuple[Any, ...]) -> bool:
    """Whether a call may have what is the decode kernel's.  A lone sequence with more rows than one
    is the prefill kernel's, whatever it has."""
    num_tokens, num_seqs = len(args[0]), len(args[3])
    return num_tokens == num_seqs or num_seqs > 1


def has_prefills(args: tuple[Any, ...]) -> bool:
    """Whether a call may have what is the prefill kernel's: more than one query a sequence."""
    return len(args[0]) != len(args[3])


def decode(*args: Any) -> None:
    """The sequences with one query."""
    kv_scale, out_scale = (*args[9:], None, None)[:2]
    torch.ops.fw_cuda.decode_attention.default(*args[:9], kv_scale, out_scale)


def _run(*args: Any, prefill: Callable[..., None]) -> None:
    if has_prefills(args):
        prefill(*args)
    if has_decodes(args):
        decode(*args)


def runs(*args: Any, prefill: str = "_prefill_kernel") -> tuple[str, ...]:
    """Names of the kernels of a call, whose prefill kernel is ``prefill``."""
    names = [(prefill, has_prefills(args)), ("csrc paged_attention", has_decodes(args))]
    return tuple(name for name, is_launched in names if is_launched)


def _launches(*args: Any, prefill: Prefill) -> tuple[list[Launch], None]:
    return prefill(*args) if has_prefills(args) else [], None


def _supports(desc: OpDesc, triton_supports: Callable[[OpDesc], str]) -> str:
    q, kv_cache = desc["q"], desc["kv_cache"]
    _, num_heads, head_dim = q.shape
    _, _, page, kv_heads, _ = kv_cache.shape
    if desc.device != "cuda":
        return f"on {desc.device}, not CUDA"
    if desc.sm != _SM:
        return f"built for SM 9.0, not {desc.sm / 10 if desc.sm else 'an unknown one'}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"q is {q.dtype}: the kernel takes bfloat16 and float16"
    if kv_cache.dtype not in (q.dtype, E4M3):
        return f"KV cache is {kv_cache.dtype}, q is {q.dtype}"
    if head_dim not in _HEAD_DIMS:
        return f"head_dim {head_dim}: the kernel takes {' and '.join(map(str, _HEAD_DIMS))}"
    if page not in _PAGES:
        return f"block size {page}: the kernel takes powers of two from 8 to 256"
    if num_heads // kv_heads > _MAX_GROUP:
        return f"{num_heads} heads share {kv_heads} KV heads: a group has at most {_MAX_GROUP}"
    if reason := triton_supports(desc):
        return reason
    return why_no_csrc(desc)


def by_cuda(prefill: Prefill, triton_supports: Callable[[OpDesc], str]) -> Implementation:
    """The implementation; ``prefill`` and ``triton_supports`` are the Triton implementation's."""
    launches = partial(_launches, prefill=prefill)
    return Implementation(
        "cuda",
        partial(_run, prefill=run_launches(launches)),
        partial(_supports, triton_supports=triton_supports),
        devices=("cuda",),
        launches=launches,
        runs=runs,
    )
