"""``kv_store``: write this step's keys and values into the paged cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ._launch import Launch, run_launches
from ._op import Case, Cost, Implementation, OpDesc, SemanticOp, Tolerance
from .launches import kv_store as kernels


def kv_store(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store one layer's new keys and values, in place (paging: Kwon et al., 2023, section 4.1).

    Args:
        k: [num_tokens, num_kv_heads, head_dim], any strides.
        v: like ``k``.
        kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_dim], keys at 0 and values at 1 of
            dimension 1, last dimension contiguous; mutated.
        slot_mapping: [num_tokens] int32, ``block_id * block_size + offset``; negative slots are
            skipped (padding), others must be distinct and inside the cache.

    Raises:
        ValueError: the shapes disagree.
    """
    torch.ops.fw.kv_store.default(k, v, kv_cache, slot_mapping)


def _reference(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    stored = slot_mapping >= 0
    slot = slot_mapping[stored].long()
    block_size = kv_cache.shape[2]
    block, offset = slot // block_size, slot % block_size
    kv_cache[block, 0, offset] = k[stored].to(kv_cache.dtype)
    kv_cache[block, 1, offset] = v[stored].to(kv_cache.dtype)


def _native(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Shapes do not depend on data, so that it can be captured in a CUDA graph.

    A skipped row repeats the write of the first row that is stored, so that whichever lands last
    writes the same; when none is stored, all rewrite slot 0 with what it holds.
    """
    check_kv_store(k, v, kv_cache, slot_mapping)
    num_tokens = slot_mapping.shape[0]
    if num_tokens == 0:
        return
    stored = slot_mapping >= 0
    first = stored.int().argmax()
    row = torch.where(stored, torch.arange(num_tokens, device=k.device), first)
    slot = slot_mapping[row].clamp(min=0).long()
    block_size = kv_cache.shape[2]
    block, offset = slot // block_size, slot % block_size
    nothing = ~stored.any()
    for plane, new in ((kv_cache[:, 0], k), (kv_cache[:, 1], v)):
        plane[block, offset] = torch.where(nothing, plane[block, offset], new[row].to(plane.dtype))


def check_kv_store(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """The kernel would read or write past an end where these disagree."""
    fits = kv_cache.shape[1] == 2 and kv_cache.shape[3:] == k.shape[1:]
    if not fits or v.shape != k.shape or slot_mapping.shape != k.shape[:1]:
        raise ValueError(
            f"k {list(k.shape)}, v {list(v.shape)}, kv_cache {list(kv_cache.shape)} and "
            f"slot_mapping {list(slot_mapping.shape)} disagree; expected [num_tokens, "
            "num_kv_heads, head_dim] twice, [num_blocks, 2, block_size, num_kv_heads, head_dim] "
            "and [num_tokens]"
        )


def _fake(k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    check_kv_store(k, v, kv_cache, slot_mapping)


def _launches(
    k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor
) -> tuple[list[Launch], None]:
    check_kv_store(k, v, kv_cache, slot_mapping)
    return kernels.kv_store(k, v, kv_cache, slot_mapping), None


def _cases(dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> Iterator[Case]:
    def call(
        label: str, tokens: int, heads: int, dim: int, blocks: int, block_size: int, padding: int
    ) -> Case:
        packed = torch.randn((tokens, 4 * heads, dim), generator=gen, device=device).to(dtype)
        cache = torch.randn((blocks, 2, block_size, heads, dim), generator=gen, device=device)
        slots = torch.randperm(blocks * block_size, generator=gen, device=device)[:tokens].int()
        slots[torch.randperm(tokens, generator=gen, device=device)[:padding]] = -1
        k, v = packed[:, 2 * heads : 3 * heads], packed[:, 3 * heads :]
        return Case(label, (k, v, cache.to(dtype), slots))

    yield call("one token", 1, 2, 64, 3, 16, 0)
    yield call("GQA", 9, 8, 128, 4, 8, 0)
    yield call("half padding", 24, 3, 80, 5, 16, 12)
    yield call("all slots taken", 96, 1, 64, 3, 32, 0)
    yield call("all padding", 5, 2, 64, 2, 8, 5)
    yield call("no tokens", 0, 2, 64, 2, 8, 0)


def _cost(desc: OpDesc) -> Cost:
    """As if no row were padding."""
    k, cache = desc["k"], desc["kv_cache"]
    return Cost(
        bytes=2 * (k.nbytes + k.numel * cache.dtype.itemsize) + desc["slot_mapping"].nbytes,
        flops=0,
    )


_EXACT = Tolerance(0.0, 0.0)

OP = SemanticOp(
    name="kv_store",
    reference=_reference,
    fake=_fake,
    cases=_cases,
    cost=_cost,
    implementations=(
        Implementation("triton", run_launches(_launches), devices=("cuda",), launches=_launches),
        Implementation("native", _native),
    ),
    mutates=("kv_cache",),
    tolerances={torch.float32: _EXACT, torch.bfloat16: _EXACT, torch.float16: _EXACT},
)
