"""``kv_store`` writes a step's keys and values into the paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..core.desc import EXACT, Case, Cost, Draw, OpDesc, drawn
from ..core.float8 import E4M3, to_e4m3, why_no_e4m3
from ..core.launch import Launches
from ..core.op import Implementation, SemanticOp, dispatched, triton
from ..launches import kv_store as kernels


@dispatched
def kv_store(
    k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: Tensor | None = None
) -> None:
    """Store one layer's new keys and values, in place (paging: Kwon et al., 2023, section 4.1).

    Args:
        k: [num_tokens, num_kv_heads, head_dim], any strides.
        v: like ``k``.
        kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_dim], keys at 0 and values at 1 of
            dimension 1, last dimension contiguous; k's dtype or float8_e4m3fn; mutated.
        slot_mapping: [num_tokens] int32, ``block_id * block_size + offset``; negative slots are
            skipped (padding), others must be distinct and inside the cache.
        kv_scale: [2, num_kv_heads] float32, of keys and of values, only for float8_e4m3fn: stored
            is value / scale, saturated at +-448; None: 1.

    Raises:
        ValueError: shapes or dtypes disagree.
    """
    check_kv_store(k, v, kv_cache, slot_mapping, kv_scale)
    stored = slot_mapping >= 0
    slot = slot_mapping[stored].long()
    block_size = kv_cache.shape[2]
    block, offset = slot // block_size, slot % block_size
    k_scale, v_scale = (None, None) if kv_scale is None else kv_scale.unbind()
    kv_cache[block, 0, offset] = _as_stored(k[stored], kv_cache, k_scale)
    kv_cache[block, 1, offset] = _as_stored(v[stored], kv_cache, v_scale)


def _as_stored(x: Tensor, kv_cache: Tensor, scale: Tensor | None) -> Tensor:
    """``x`` [tokens, heads, head_dim] in the cache's dtype; ``scale`` [heads]."""
    if kv_cache.dtype != E4M3:
        return x
    return to_e4m3(x, None if scale is None else scale[:, None])


def _native(
    k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: Tensor | None = None
) -> None:
    """Shapes do not depend on data, so that it can be captured in a CUDA graph.

    A skipped row repeats the write of the first row that is stored, so that whichever lands last
    writes the same; when none is stored, all rewrite slot 0 with what it holds.
    """
    check_kv_store(k, v, kv_cache, slot_mapping, kv_scale)
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
    scales = (None, None) if kv_scale is None else kv_scale.unbind()
    for plane, new, scale in zip(kv_cache.unbind(1), (k, v), scales, strict=True):
        new = _as_stored(new[row], plane, scale)
        plane[block, offset] = torch.where(nothing, plane[block, offset], new)


def check_kv_store(
    k: Tensor, v: Tensor, kv_cache: Tensor, slot_mapping: Tensor, kv_scale: Tensor | None = None
) -> None:
    """The kernel would read or write past an end, or other numbers, where these disagree."""
    fits = kv_cache.shape[1] == 2 and kv_cache.shape[3:] == k.shape[1:]
    if not fits or v.shape != k.shape or slot_mapping.shape != k.shape[:1]:
        raise ValueError(
            f"k {list(k.shape)}, v {list(v.shape)}, kv_cache {list(kv_cache.shape)} and "
            f"slot_mapping {list(slot_mapping.shape)} disagree; expected [num_tokens, "
            "num_kv_heads, head_dim] twice, [num_blocks, 2, block_size, num_kv_heads, head_dim] "
            "and [num_tokens]"
        )
    if kv_cache.dtype not in (k.dtype, E4M3) or v.dtype != k.dtype:
        raise ValueError(
            f"k is {k.dtype}, v {v.dtype} and kv_cache {kv_cache.dtype}; expected one dtype for all"
            f" three, or {E4M3} for kv_cache"
        )
    check_kv_scale(kv_cache, kv_scale)


def check_kv_scale(kv_cache: Tensor, kv_scale: Tensor | None) -> None:
    """
    Raises:
        ValueError: scales for a cache that has none, or not two for each KV head.
    """
    if kv_scale is None:
        return
    if kv_cache.dtype != E4M3:
        raise ValueError(f"kv_scale is given for a kv_cache of {kv_cache.dtype}, expected {E4M3}")
    expected = [2, kv_cache.shape[3]]
    if list(kv_scale.shape) != expected or kv_scale.dtype != torch.float32:
        raise ValueError(
            f"kv_scale is {kv_scale.dtype} {list(kv_scale.shape)}, expected float32 {expected}: "
            "one for the keys and one for the values of each KV head"
        )


def _launches(*args: Any) -> Launches[None]:
    check_kv_store(*args)
    return kernels.kv_store(*args)


@drawn
def _cases(draw: Draw) -> Iterator[Case]:
    def call(
        label: str,
        tokens: int,
        heads: int,
        dim: int,
        blocks: int,
        block_size: int,
        padding: int,
        fp8: str = "",
    ) -> Case:
        packed = draw.randn(tokens, 4 * heads, dim).to(draw.dtype)
        cache = draw.randn(blocks, 2, block_size, heads, dim)
        slots = draw.permutation(blocks * block_size)[:tokens].int()
        slots[draw.permutation(tokens)[:padding]] = -1
        k, v = packed[:, 2 * heads : 3 * heads], packed[:, 3 * heads :]
        scale = None
        if fp8:
            # From below the least e4m3 to far above the largest.
            exponent = draw.integers(-14, 12, *packed.shape)
            packed.mul_(exponent.float().exp2())
        if fp8 == "scales":
            scale = draw.rand(2, heads) + 0.1
        stored = cache.to(E4M3 if fp8 else draw.dtype)
        return Case(label, (k, v, stored, slots, scale))

    yield call("one token", 1, 2, 64, 3, 16, 0)
    yield call("GQA", 9, 8, 128, 4, 8, 0)
    yield call("half padding", 24, 3, 80, 5, 16, 12)
    yield call("head 96, many tokens", 70, 3, 96, 9, 16, 2)
    yield call("head 512", 5, 1, 512, 2, 16, 1)
    yield call("all slots taken", 96, 1, 64, 3, 32, 0)
    yield call("all padding", 5, 2, 64, 2, 8, 5)
    yield call("no tokens", 0, 2, 64, 2, 8, 0)
    yield call("fp8", 24, 3, 80, 5, 16, 12, "plain")
    yield call("fp8, scales", 9, 8, 128, 4, 8, 1, "scales")
    yield call("fp8, scales, many tokens", 70, 3, 64, 5, 16, 2, "scales")


def _cost(desc: OpDesc) -> Cost:
    """The cost as if no row were padding."""
    k, cache = desc["k"], desc["kv_cache"]
    return Cost(
        bytes=2 * (k.nbytes + k.numel * cache.dtype.itemsize) + desc["slot_mapping"].nbytes,
        flops=0,
    )


OP = SemanticOp(
    reference=kv_store,
    fake=check_kv_store,
    cases=_cases,
    cost=_cost,
    implementations=(
        triton(_launches, lambda desc: why_no_e4m3(desc, "kv_cache")),
        Implementation("native", _native),
    ),
    mutates=("kv_cache",),
    tolerances=EXACT,
)
