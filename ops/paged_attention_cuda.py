"""``paged_attention`` with the decode kernel of csrc: the implementation ``cuda``.

It takes batches of at most one query a sequence; the Triton launches do the rest.  Which of the two
runs follows from shapes alone, so a captured graph serves any lengths.
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

Launches: TypeAlias = Callable[..., tuple[list[Launch], None]]


def takes(args: tuple[Any, ...]) -> bool:
    """Whether the kernel of csrc runs a call of these arguments: one query a sequence."""
    q, _, _, seq_lens, *_ = args
    return bool(q.shape[0] == seq_lens.shape[0])


def decode(*args: Any) -> None:
    """A call that the kernel of csrc ``takes``."""
    kv_scale, out_scale = (*args[9:], None, None)[:2]
    torch.ops.fw_cuda.decode_attention.default(*args[:9], kv_scale, out_scale)


def _run(*args: Any, triton: Callable[..., None]) -> None:
    if takes(args):
        decode(*args)
    else:
        triton(*args)


def _launches(*args: Any, triton: Launches) -> tuple[list[Launch], None]:
    return ([], None) if takes(args) else triton(*args)


def supports(desc: OpDesc, triton_supports: Callable[[OpDesc], str]) -> str:
    """Empty, or why the kernel of csrc cannot serve the call; ``triton_supports`` of the rest."""
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


def by_cuda(launches: Launches, triton_supports: Callable[[OpDesc], str]) -> Implementation:
    """The implementation; ``launches`` and ``triton_supports`` are the Triton implementation's."""
    return Implementation(
        "cuda",
        partial(_run, triton=run_launches(launches)),
        partial(supports, triton_supports=triton_supports),
        devices=("cuda",),
        launches=partial(_launches, triton=launches),
    )
