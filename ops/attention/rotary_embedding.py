"""``rotary_embedding`` rotates queries and keys by their positions; tables: ``rotary_cache``."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..core.desc import Case, Cost, Draw, OpDesc, drawn
from ..core.launch import Launches
from ..core.op import Implementation, SemanticOp, dispatched, triton
from ..launches import rotary
from ..launches.rotary import LAYOUTS as LAYOUTS


@dispatched
def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, layout: str = "halves"
) -> tuple[Tensor, Tensor]:
    """Rotary position embedding (Su et al., 2021, eq. 34).

    Args:
        positions: [num_tokens] int32.  Out-of-range ones, as padding rows may have, are clamped.
        q: [num_tokens, num_heads, head_dim], any strides; often a slice of packed qkv.
        k: [num_tokens, num_kv_heads, head_dim], q's dtype; no heads if q alone is to be rotated.
        cos_sin_cache: [max_position, rotary_dim] float32, contiguous: rotary_dim / 2 cosines, then
            as many sines, whatever the layout.  With rotary_dim < head_dim the columns behind it
            pass unchanged.
        layout: of ``LAYOUTS``: "halves" as GPT-NeoX and Llama, "pairs" of neighbours as GPT-J and
            the paper, "pairs_to_halves" as DeepSeek V3.

    Returns:
        (q, k) rotated, contiguous, in their dtype; computed in float32 and rounded once.

    Raises:
        ValueError: rotary_dim is odd or more than head_dim, or the layout is another.
    """
    max_position, rotary_dim = cos_sin_cache.shape
    check_rotary(q.shape[-1], rotary_dim, layout)
    table = cos_sin_cache[positions.clamp(0, max_position - 1)]
    cos, sin = table[:, None, :].chunk(2, dim=-1)
    return _rotate(q, cos, sin, layout), _rotate(k, cos, sin, layout)


def check_rotary(head_dim: int, rotary_dim: int, layout: str) -> None:
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(
            f"cos_sin_cache has rotary_dim {rotary_dim}, expected an even one up to head_dim "
            f"{head_dim}: build it with build_cos_sin_cache"
        )
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}, expected one of: {', '.join(LAYOUTS)}")


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    half, (pairs_in, pairs_out) = cos.shape[-1], LAYOUTS[layout]
    turning = x[..., : 2 * half].float()
    if pairs_in:
        first, second = turning[..., ::2], turning[..., 1::2]
    else:
        first, second = turning[..., :half], turning[..., half:]
    parts = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.stack(parts, dim=-1).flatten(-2) if pairs_out else torch.cat(parts, dim=-1)
    return torch.cat((rotated.to(x.dtype), x[..., 2 * half :]), dim=-1)


def _fake(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, layout: str = "halves"
) -> tuple[Tensor, Tensor]:
    check_rotary(q.shape[-1], cos_sin_cache.shape[1], layout)
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _launches(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, layout: str = "halves"
) -> Launches[tuple[Tensor, Tensor]]:
    check_rotary(q.shape[-1], cos_sin_cache.shape[1], layout)
    return rotary.rotary_embedding(positions, q, k, cos_sin_cache, layout)


@drawn
def _cases(draw: Draw) -> Iterator[Case]:
    def call(
        label: str, tokens: int, heads: int, kv_heads: int, dim: int, rotary: int, pos: int = 50
    ) -> Case:
        # q and k as the model passes them: slices of one packed qkv tensor.
        packed = draw.randn(tokens, heads + 2 * kv_heads, dim)
        packed = packed.to(draw.dtype)
        angle = draw.rand(pos, rotary // 2) * 6.3
        cache = torch.cat((angle.cos(), angle.sin()), dim=-1)
        positions = draw.integers(0, pos, tokens).int()
        q, k = packed[:, :heads], packed[:, heads : heads + kv_heads]
        return Case(label, (positions, q, k, cache))

    yield call("one token, MHA", 1, 4, 4, 64, 64)
    yield call("GQA, head 128", 9, 8, 2, 128, 128)
    yield call("many tokens", 70, 4, 1, 32, 32)
    yield call("partial 32 of 80", 5, 3, 3, 80, 32)
    yield call("partial 20 of 64", 7, 12, 5, 64, 20)
    yield call("partial 96 of 128", 5, 3, 1, 128, 96)
    yield call("head 112", 66, 2, 1, 112, 112)
    yield call("head 256", 3, 2, 1, 256, 256)
    yield call("partial 128 of 512", 2, 2, 1, 512, 128)
    yield call("one position", 4, 2, 2, 16, 16, pos=1)
    yield call("no tokens", 0, 2, 2, 16, 16)
    yield call("no keys", 9, 4, 0, 64, 32)
    positions, q, k, cache = call("", 6, 4, 2, 64, 64, pos=9).args
    far = torch.tensor([0, 8, 9, 2**31 - 1, -1, -(2**31)], dtype=torch.int32, device=draw.device)
    yield Case("padding rows out of range", (far, q, k, cache))
    yield Case("contiguous", (positions, q.contiguous(), k.contiguous(), cache))
    for layout in [*LAYOUTS][1:]:
        for case in (
            call("GQA, head 128", 9, 8, 2, 128, 128),
            call("partial 20 of 72, many tokens", 66, 5, 1, 72, 20),
            call("no tokens", 0, 2, 2, 16, 16),
        ):
            yield Case(f"{layout}, {case.label}", (*case.args, layout))


def _cost(desc: OpDesc) -> Cost:
    """Every cos/sin row counts once a token: tokens at one position are rare in a batch."""
    q, k, cache = desc["q"], desc["k"], desc["cos_sin_cache"]
    num_tokens, rotary_dim = q.shape[0], cache.shape[1]
    table = num_tokens * rotary_dim * cache.dtype.itemsize
    return Cost(
        bytes=2 * (q.nbytes + k.nbytes) + table + desc["positions"].nbytes,
        flops=3 * num_tokens * (q.shape[1] + k.shape[1]) * rotary_dim,
    )


OP = SemanticOp(
    reference=rotary_embedding,
    fake=_fake,
    cases=_cases,
    cost=_cost,
    implementations=(
        triton(_launches),
        Implementation("native", rotary_embedding, inline=True),
    ),
)
