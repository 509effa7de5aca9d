"""``rope_kv_store`` is [QK-norm +] rotary embedding + KV store, in one kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.desc import Case, Cost, Draw, OpDesc, Tolerance, drawn
from ..core.float8 import E4M3, why_no_e4m3
from ..core.launch import Launches
from ..core.op import Implementation, SemanticOp, definition, dispatched, triton
from ..launches import rope_kv_store as kernels
from ..launches.rope_kv_store import RopeStoreArgs
from ..norm.norm import rms_norm_native
from .kv_store import OP as KV_STORE, check_kv_store, kv_store
from .rotary_embedding import LAYOUTS, OP as ROTARY_EMBEDDING, check_rotary


@dispatched
def rope_kv_store(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    kv_scale: Tensor | None = None,
    layout: str = "halves",
    weight_offset: float | None = None,
) -> Tensor:
    """Norm the heads of q and k if weights are given, rotate both, store k and v into the cache.

    ``rms_norm``, ``rotary_embedding`` and ``kv_store`` one after another, with their roundings;
    only the cache gets the rotated keys.

    Args:
        positions: [num_tokens] int32, clamped to the table.
        q: [num_tokens, num_heads, head_dim], any strides; often a slice of packed qkv.
        k: [num_tokens, num_kv_heads, head_dim], q's dtype.
        v: like ``k``.
        cos_sin_cache: [max_position, rotary_dim] float32, contiguous, as for ``rotary_embedding``.
        kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_dim], last dimension contiguous;
            q's dtype or float8_e4m3fn; mutated.
        slot_mapping: [num_tokens] int32; negative slots are skipped, others must be distinct.
        q_weight, k_weight: [head_dim] in q's dtype, both or neither; with a ``weight_offset`` also
            float32.
        eps: added to the mean square of a head; without weights it has no meaning.
        kv_scale: [2, num_kv_heads] float32 or None, as for ``kv_store``.
        layout: which columns rotate together, as for ``rotary_embedding``.
        weight_offset: what is added to the weights, as for ``rms_norm``.

    Returns:
        q rotated, contiguous, in its dtype.

    Raises:
        ValueError: shapes or dtypes disagree, one weight is given without the other, or the layout
            is another.
    """
    needed = (positions, q, k, v, cos_sin_cache, kv_cache, slot_mapping)
    norms = (q_weight, k_weight, eps)
    return _compose(definition(kv_store), *needed, *norms, kv_scale, layout, weight_offset)


def _check(args: tuple[Any, ...]) -> None:
    call = RopeStoreArgs(*args)
    head_dim, weights = call.q.shape[-1], (call.q_weight, call.k_weight)
    check_rotary(head_dim, call.cos_sin_cache.shape[1], call.layout)
    check_kv_store(call.k, call.v, call.kv_cache, call.slot_mapping, call.kv_scale)
    shapes = [None if weight is None else list(weight.shape) for weight in weights]
    if shapes not in ([None, None], [[head_dim]] * 2):
        raise ValueError(
            f"q_weight is {shapes[0]} and k_weight {shapes[1]}, expected [{head_dim}] for both "
            "or None for both"
        )


def _compose(store: Callable[..., None], *args: Any) -> Tensor:
    """The definition, of the definitions of its parts, but for ``store``."""
    _check(args)
    call = RopeStoreArgs(*args)
    q, k, how = call.q, call.k, (call.eps, call.weight_offset)
    if call.q_weight is not None:
        q, k = rms_norm_native(q, call.q_weight, *how), rms_norm_native(k, call.k_weight, *how)
    q, k = ROTARY_EMBEDDING.reference(call.positions, q, k, call.cos_sin_cache, call.layout)
    store(k, call.v, call.kv_cache, call.slot_mapping, call.kv_scale)
    return q  # type: ignore[no-any-return]


def _fake(positions: Tensor, q: Tensor, *rest: Any) -> Tensor:
    _check((positions, q, *rest))
    return q.new_empty(q.shape)


def _launches(*args: Any) -> Launches[Tensor]:
    _check(args)
    return kernels.rope_kv_store(*args)


@drawn
def _cases(draw: Draw) -> Iterator[Case]:
    def call(
        label: str,
        tokens: int,
        heads: tuple[int, int],
        dim: int,
        rotary: int,
        *,
        padding: int = 0,
        block_size: int = 16,
        norm: bool = False,
        fp8: bool = False,
        layout: str = "halves",
        offset: float | None = None,
    ) -> Case:
        num_q, num_kv = heads
        packed = draw.randn(tokens, num_q + 2 * num_kv, dim)
        q, k, v = packed.to(draw.dtype).split([num_q, num_kv, num_kv], dim=1)
        angle = draw.rand(50, rotary // 2) * 6.3
        table = torch.cat((angle.cos(), angle.sin()), dim=-1)
        positions = draw.integers(-2, 53, tokens).int()
        blocks = tokens // block_size + 2
        cache = draw.randn(blocks, 2, block_size, num_kv, dim)
        slots = draw.permutation(blocks * block_size)[:tokens].int()
        slots[draw.permutation(tokens)[:padding]] = -1
        weights: list[Any] = [None, None]
        if norm:
            weights = [(draw.rand(dim) + 0.5 - (offset or 0)).to(draw.dtype) for _ in range(2)]
        eps, kv_scale = 1e-6 if norm else 0.0, None
        if fp8:
            kv_scale = draw.rand(2, num_kv) + 0.5
            v.mul_(300)  # some of it saturates
        cache = cache.to(E4M3 if fp8 else draw.dtype)
        how = (eps, kv_scale, layout, offset)
        return Case(label, (positions, q, k, v, table, cache, slots, *weights, *how))

    yield call("one token, MHA", 1, (4, 4), 64, 64)
    yield call("one token, GQA, norm", 1, (8, 2), 128, 128, norm=True)
    yield call("GQA, head 128", 9, (8, 2), 128, 128)
    yield call("9 heads to 3, norm", 7, (9, 3), 64, 64, norm=True, block_size=8)
    yield call("many tokens, MQA", 70, (9, 1), 32, 32, padding=3)
    yield call("many tokens, norm", 66, (3, 2), 64, 64, padding=5, norm=True)
    yield call("partial 32 of 80, padding", 6, (3, 3), 80, 32, padding=3)
    yield call("partial 20 of 72, norm", 5, (5, 2), 72, 20, padding=1, norm=True)
    yield call("many tokens, partial 96 of 128, norm", 66, (3, 1), 128, 96, norm=True)
    yield call("head 112", 5, (3, 1), 112, 112)
    yield call("partial 64 of 192", 5, (2, 2), 192, 64, padding=1)
    yield call("partial 128 of 512, norm", 3, (2, 1), 512, 128, norm=True)
    yield call("head 256", 3, (2, 1), 256, 256, block_size=1)
    yield call("head 256, norm", 3, (2, 1), 256, 256, norm=True)
    yield call("all padding", 4, (2, 2), 16, 16, padding=4)
    yield call("no tokens", 0, (2, 2), 16, 16)
    yield call("fp8", 9, (8, 2), 128, 128, padding=1, fp8=True)
    yield call("fp8, norm, partial 20 of 72", 66, (5, 2), 72, 20, norm=True, fp8=True)
    for layout in [*LAYOUTS][1:]:
        many = call(f"{layout}, norm, many tokens", 66, (5, 2), 64, 64, layout=layout, norm=True)
        yield from (many, call(f"{layout}, 20 of 72", 5, (3, 1), 72, 20, layout=layout, fp8=True))
    yield call("norm with an offset", 5, (4, 1), 256, 256, norm=True, offset=1.0)
    sizes = 7, (4, 2), 128, 64
    yield call("pairs, offset, 64 of 128", *sizes, layout="pairs", norm=True, offset=1.0, padding=1)
    positions, q, k, v, *rest = call("", 6, (4, 2), 24, 24, padding=2, norm=True).args
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    yield Case("contiguous", (positions, q.contiguous(), k.contiguous(), v.contiguous(), *rest))
    yield Case("heads innermost", (positions, *turned, *rest))


def _cost(desc: OpDesc) -> Cost:
    """The sum of its parts less what stays in registers: normed and rotated heads."""
    q, k, cache, table = desc["q"], desc["k"], desc["kv_cache"], desc["cos_sin_cache"]
    num_tokens, rotary_dim = q.shape[0], table.shape[1]
    indices = desc["positions"].nbytes + desc["slot_mapping"].nbytes
    rows = num_tokens * rotary_dim * table.dtype.itemsize
    normed, weights = desc["q_weight"] is not None, 0
    if normed:
        weights = desc["q_weight"].nbytes + desc["k_weight"].nbytes
    stored = k.numel * cache.dtype.itemsize
    heads = q.shape[1] + k.shape[1]
    return Cost(
        bytes=2 * (q.nbytes + k.nbytes + stored) + indices + rows + weights,
        flops=3 * num_tokens * heads * rotary_dim + (4 * (q.numel + k.numel) if normed else 0),
    )


OP = SemanticOp(
    reference=rope_kv_store,
    fake=_fake,
    cases=_cases,
    cost=_cost,
    implementations=(
        triton(_launches, lambda desc: why_no_e4m3(desc, "kv_cache")),
        Implementation("native", partial(_compose, KV_STORE.implementation("native").fn)),
    ),
    mutates=("kv_cache",),
    # Heads are rounded after the norm and after the weight: where statistics differ in the last
    # bit of float32 either may flip, and the difference of two rotated halves keeps the error.  An
    # FP8 key then rounds to a neighbour, 2^-3 away; bfloat16's atol is over the least scale.
    tolerances={
        torch.float32: Tolerance(1e-5, 1e-5),
        torch.bfloat16: Tolerance(3e-2, 1.6e-2),
        torch.float16: Tolerance(4e-3, 2e-3),
        E4M3: Tolerance(6e-2, 0.15),
    },
)
