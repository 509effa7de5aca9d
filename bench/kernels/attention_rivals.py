"""FlashInfer and FlashAttention 3 as rivals of ``paged_attention``, where they are installed.

Both read the same pages as we do.  FlashInfer plans a batch on the host, which is not measured: a
server does it once a step, for all layers.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ...ops.core.float8 import E4M3
from ...ops.launches.paged_attention import AttentionArgs
from .harness import Planned

_WORKSPACE_BYTES = 384 << 20
"""FlashInfer's plans share a buffer of this size for partial results of split contexts."""


@dataclass(frozen=True)
class Shape:
    """A rival computes the same layer if it has all of these."""

    kv_dtype: torch.dtype
    head_dim: int
    window: int = 0
    chunk: int = 0
    sinks: bool = False


@dataclass(frozen=True)
class Rival:
    """A library.

    Attributes:
        module: what it is imported as.
        package: how it is installed.
        plan: the op's arguments -> a function that computes the op once more for them.
        why_not: why it does not compute a layer, or "".
    """

    module: str
    package: str
    plan: Callable[..., Callable[[], Any]]
    why_not: Callable[[Shape], str]


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def pages(call: AttentionArgs) -> tuple[Tensor, Tensor, Tensor]:
    """A block table as rows of a sparse matrix: where each sequence's blocks begin, the blocks, and
    the tokens in its last one.  All int32, on the host."""
    block_size, table = call.kv_cache.shape[2], call.block_table.cpu()
    lengths = call.seq_lens.cpu()
    counts = (lengths + block_size - 1) // block_size
    indptr = torch.cat((counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)))
    indices = torch.cat([row[:count] for row, count in zip(table, counts.tolist(), strict=True)])
    return indptr, indices, lengths - (counts - 1) * block_size


def flashinfer(*args: Any) -> Callable[[], Any]:
    """FlashInfer's own choice of kernel for decodes, or for prompts."""
    library: Any = importlib.import_module("flashinfer")
    call = AttentionArgs(*args)
    _, heads, head_dim = call.q.shape
    indptr, indices, last = pages(call)
    indices = indices.to(call.q.device)
    sizes = heads, call.kv_cache.shape[3], head_dim, call.kv_cache.shape[2]
    options = {
        "window_left": call.sliding_window - 1,  # beside the query itself; -1 is all
        "sm_scale": call.scale,
        "q_data_type": call.q.dtype,
        "kv_data_type": call.kv_cache.dtype,
    }
    workspace = _workspace(call.q.device)
    if call.q.shape[0] == len(call.seq_lens):
        # Tensor cores where a KV head has several queries, as FlashInfer advises.
        tensor_cores = heads // call.kv_cache.shape[3] >= 4
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=tensor_cores
        )
        wrapper.plan(indptr, indices, last, *sizes, **options)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        starts = call.query_start_loc.cpu()
        wrapper.plan(starts, indptr, indices, last, *sizes, causal=True, **options)
    return lambda: wrapper.run(call.q, call.kv_cache)


def flash_attention_3(*args: Any) -> Callable[[], Any]:
    """FlashAttention 3 over pages, with its own number of splits."""
    library: Any = importlib.import_module("flash_attn_interface")
    call = AttentionArgs(*args)
    starts = call.query_start_loc
    k, v = call.kv_cache.unbind(1)
    options = {
        "cache_seqlens": call.seq_lens,
        "page_table": call.block_table,
        "cu_seqlens_q": starts,
        "max_seqlen_q": int((starts[1:] - starts[:-1]).max()),
        "softmax_scale": call.scale,
        "causal": True,
        "window_size": (call.sliding_window - 1, 0) if call.sliding_window else (-1, -1),
        "attention_chunk": call.chunk,
    }
    return lambda: library.flash_attn_with_kvcache(call.q, k, v, **options)


def _why_not_flashinfer(shape: Shape) -> str:
    if shape.chunk or shape.sinks:
        return "its wrappers of pages know neither chunks nor sinks"
    if shape.head_dim not in (64, 128, 256):
        return f"head_dim {shape.head_dim}: it has 64, 128 and 256"
    return ""


def _why_not_flash_attention(shape: Shape) -> str:
    if shape.sinks:
        return "it knows no sinks"
    if shape.kv_dtype == E4M3:
        return "its FP8 takes queries in FP8 too, which is another op"
    if shape.head_dim > 256:
        return f"head_dim {shape.head_dim}: it has up to 256"
    return ""


RIVALS = {
    "flashinfer": Rival(
        "flashinfer", "pip install flashinfer-python", flashinfer, _why_not_flashinfer
    ),
    "flash-attn-3": Rival(
        "flash_attn_interface",
        "build it from the folder hopper/ of github.com/Dao-AILab/flash-attention",
        flash_attention_3,
        _why_not_flash_attention,
    ),
}


def rivals(shape: Shape) -> Mapping[str, Planned]:
    """The rivals that are installed and compute such a layer, as libraries of a ``KernelWork``."""
    return {
        name: Planned(rival.plan)
        for name, rival in RIVALS.items()
        if find_spec(rival.module) and not rival.why_not(shape)
    }


def absent() -> list[str]:
    """A line for each rival that is not installed: attention is measured without it."""
    return [
        f"bench kernels: {name} is not measured: Python finds no module {rival.module}; "
        f"{rival.package}"
        for name, rival in RIVALS.items()
        if not find_spec(rival.module)
    ]
