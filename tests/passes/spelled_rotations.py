"""Rotations of queries and keys in the spellings of transformers' models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BF16 = torch.bfloat16
BATCH, TOKENS, HEADS, KV_HEADS, DIM = 2, 5, 4, 2, 16


def angles(f: Tensor, dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    emb = torch.cat((f, f), dim=-1)
    return (emb.cos() * scale).to(dtype), (emb.sin() * scale).to(dtype)


def half(x: Tensor) -> Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def llama(q: Tensor, k: Tensor, f: Tensor) -> Any:
    cos, sin = (t.unsqueeze(1) for t in angles(f, q.dtype))
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    return (q * cos) + (half(q) * sin), (k * cos) + (half(k) * sin)


def other_orders(q: Tensor, k: Tensor, f: Tensor) -> Any:
    cos, sin = (t[:, None] for t in angles(f, q.dtype, 1.25))
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    return cos * q + sin * half(q), cos * k + sin * half(k)


def chunked(q: Tensor, k: Tensor, f: Tensor) -> Any:
    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)

    cos, sin = (t.unsqueeze(1) for t in angles(f, q.dtype))
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def turned_back(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """As NanoChat, which rotates the other way."""

    def back(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return torch.cat((second, -first), dim=-1)

    cos, sin = (t.unsqueeze(1) for t in angles(f, q.dtype))
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    return q * cos + back(q) * sin, k * cos + back(k) * sin


def heads_last(q: Tensor, k: Tensor, f: Tensor) -> Any:
    cos, sin = (t.unsqueeze(2) for t in angles(f, q.dtype))
    return q * cos + half(q) * sin, k * cos + half(k) * sin


def partial(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """Heads are twice as wide, and their first half rotates."""
    cos, sin = (t.unsqueeze(1) for t in angles(f, q.dtype))
    q, k = torch.cat((q, q + 1), -1).transpose(1, 2), torch.cat((k, k), -1).transpose(1, 2)
    first, rest = q[..., :DIM], q[..., DIM:]
    second, tail = k[..., :DIM], k[..., DIM:]
    first, second = first * cos + half(first) * sin, second * cos + half(second) * sin
    return torch.cat((first, rest), -1), torch.cat((second, tail), -1)


def partial_of_each(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """As Phi-3: q is put together before k rotates."""
    cos, sin = (t.unsqueeze(1) for t in angles(f[..., : DIM // 4], q.dtype))
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    first, rest, second, tail = q[..., : DIM // 2], q[..., DIM // 2 :], *k.split(DIM // 2, -1)
    q = torch.cat((first * cos + half(first) * sin, rest), dim=-1)
    return q, torch.cat((second * cos + half(second) * sin, tail), dim=-1)


def wide_angles(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """As OLMo: float32 cosines make the products float32."""
    cos, sin = (t.unsqueeze(1) for t in angles(f, torch.float32))
    return tuple(
        (x * cos + half(x) * sin).to(q.dtype) for x in (q.transpose(1, 2), k.transpose(1, 2))
    )


def wide_tensors(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """As ModernBERT, which casts a tensor twice."""
    cos, sin = (t.unsqueeze(2) for t in angles(f, q.dtype))
    return tuple(((x.float() * cos) + (half(x.float()) * sin)).to(q.dtype) for x in (q, k))


def four_products(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """As gpt-oss: no frequency twice.  The results are laid out by head."""
    cos, sin = ((t * 1.25).to(q.dtype).unsqueeze(1) for t in (f.cos(), f.sin()))

    def rotated(x: Tensor) -> Tensor:
        a, b = x.transpose(1, 2).chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    return rotated(q), rotated(k)


def laid_out_by_head(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """The concatenation, which is contiguous, gives the sum its strides."""
    cos, sin = (t.unsqueeze(1) for t in angles(f, q.dtype))
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    return sin * half(q) + cos * q, sin * half(k) + cos * k


def turned(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def pairs(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """As Cohere."""
    emb = torch.repeat_interleave(f, 2, dim=-1)
    cos, sin = emb.cos().to(q.dtype).unsqueeze(1), emb.sin().to(q.dtype).unsqueeze(1)
    made = []
    for x in (q.transpose(1, 2).float(), k.transpose(1, 2).float()):
        made.append((x * cos + turned(x) * sin).to(q.dtype))
    return made


def pairs_turned_back(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """The second of each pair is negated."""

    def back(x: Tensor) -> Tensor:
        return torch.stack((x[..., 1::2], -x[..., ::2]), dim=-1).flatten(-2)

    emb = torch.repeat_interleave(f, 2, dim=-1)
    cos, sin = emb.cos().to(q.dtype).unsqueeze(2), emb.sin().to(q.dtype).unsqueeze(2)
    return q * cos + back(q) * sin, k * cos + back(k) * sin


def partial_pairs(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """As GLM: the frequencies side by side, of which the first are repeated."""
    f = f[..., : DIM // 4]
    cos, sin = (t.unsqueeze(1) for t in angles(f, q.dtype))
    width = cos.shape[-1] // 2
    cos, sin = (t[..., :width].repeat_interleave(2, dim=-1) for t in (cos, sin))
    parts = [x.transpose(1, 2).split(DIM // 2, dim=-1) for x in (q, k)]
    made = [first * cos + turned(first) * sin for first, _ in parts]
    return [torch.cat((one, rest), dim=-1) for one, (_, rest) in zip(made, parts, strict=True)]


def looked_up(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """As GPT-J: a table of sines, then cosines, which are spread once for k and once for q."""
    sin, cos = torch.cat((f, 1 - f), dim=-1).to(q.dtype).chunk(2, dim=-1)

    def rotated(x: Tensor) -> Tensor:
        by_sin = torch.repeat_interleave(sin[:, :, None, :], 2, 3)
        return x * torch.repeat_interleave(cos[:, :, None, :], 2, 3) + turned(x) * by_sin

    return rotated(k), rotated(q)


def pairs_to_halves(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """As DeepSeek V3."""
    cos, sin = (t[..., : DIM // 2].unsqueeze(1) for t in angles(f, q.dtype))
    made = []
    for x in (q.transpose(1, 2), k.transpose(1, 2)):
        a, b = x[..., ::2], x[..., 1::2]
        made.append(torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1))
    return made


def complex_numbers(q: Tensor, k: Tensor, f: Tensor, heads: int = 2, conj: bool = False) -> Any:
    """As Llama 4."""
    freqs_cis = torch.polar(torch.ones_like(f), f) * 1.25
    return rotated_as_complex(q, k, (freqs_cis.conj() if conj else freqs_cis), heads)


def rotated_as_complex(q: Tensor, k: Tensor, freqs_cis: Tensor, heads: int = 2) -> Any:
    made = []
    for x in (q, k):
        number = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        turned = torch.view_as_real(number * freqs_cis.unsqueeze(heads)).flatten(3)
        made.append(turned.type_as(x))
    return made


def complex_by_head(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """As DeepSeek V2."""
    return complex_numbers(q.transpose(1, 2), k.transpose(1, 2), f, heads=1)


def complex_table(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """Numbers of which nothing is known."""
    return rotated_as_complex(q, k, torch.complex(f, 1 - f))


def joined_narrow(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """As Ernie 4.5: the tensor is turned in its dtype, and the products are in float32."""
    cos, sin = (t.unsqueeze(1) for t in angles(f, torch.float32))
    cos, sin = (t[..., : DIM // 2].repeat_interleave(2, dim=-1) for t in (cos, sin))
    made = []
    for x in (q.transpose(1, 2), k.transpose(1, 2)):
        made.append(((x.float() * cos) + (turned(x).float() * sin)).to(x.dtype))
    return made


def normed_one_by_one(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """As Gemma 3n and 4: q is rotated and transposed before k is computed."""
    cos, sin = (t.unsqueeze(2) for t in angles(f, q.dtype))
    q = (q * cos + half(q) * sin).transpose(1, 2)
    k = k * 2
    return q, (k * cos + half(k) * sin).transpose(1, 2)


def without_batch(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """As the vision tower of Qwen2-VL, whose angles have two dimensions before the heads'."""
    cos, sin = (t.unsqueeze(-2).float() for t in angles(f[0], q.dtype))
    return tuple(((x.float() * cos) + (half(x.float()) * sin)).to(x.dtype) for x in (q[0], k[1]))


def without_batch_by_head(q: Tensor, k: Tensor, f: Tensor) -> Any:
    cos, sin = angles(f[0], q.dtype)
    return tuple(x * cos + half(x) * sin for x in (q[0].transpose(0, 1), k[1].transpose(0, 1)))


def flat_angles(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """As DINOv3: two dimensions, which broadcast over batch and heads."""
    cos, sin = angles(f[0], q.dtype)
    return tuple(x * cos + half(x) * sin for x in (q.transpose(1, 2), k.transpose(1, 2)))


def of_two_axes(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """As the vision tower of Gemma 4: each half of a head rotates by angles of its own."""
    rows, columns = f[..., : DIM // 4], f[..., DIM // 4 :]
    emb = torch.cat((rows, rows, columns, columns), dim=-1)
    cos, sin = (t.to(q.dtype).split([DIM // 2] * 2, dim=-1) for t in (emb.cos(), emb.sin()))
    made = []
    for x in (q, k):
        parts = zip(x.split([DIM // 2] * 2, dim=-1), cos, sin, strict=True)
        made.append([x * c.unsqueeze(2) + half(x) * s.unsqueeze(2) for x, c, s in parts])
    return [torch.cat(parts, dim=-1) for parts in made]


def of_three_axes(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """As Qwen2-VL first had it: sections of both halves take the angles of an axis each."""
    many = torch.stack((f, f + 1, f * 2))
    emb, sections = torch.cat((many, many), dim=-1), [3, 2, 3] * 2
    cos, sin = (
        torch.cat([m[i % 3] for i, m in enumerate(t.to(q.dtype).split(sections, -1))], -1)
        for t in (emb.cos(), emb.sin())
    )
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    return (q * cos) + (half(q) * sin), (k * cos) + (half(k) * sin)


AXES = [without_batch, without_batch_by_head, flat_angles, of_two_axes, of_three_axes]
"""In halves too, by angles that have other dimensions, or several axes."""
HALVES = [
    llama, other_orders, chunked, heads_last, partial, partial_of_each, wide_angles, wide_tensors,
    four_products, laid_out_by_head, normed_one_by_one, turned_back,
]  # fmt: skip
PAIRS = [
    pairs, partial_pairs, looked_up, complex_numbers, complex_by_head, complex_table, joined_narrow,
    pairs_turned_back,
]  # fmt: skip
EXACT = [wide_angles, wide_tensors, pairs, joined_narrow]


def inputs(dtype: torch.dtype, batch: int = 1, tokens: int = TOKENS) -> dict[str, Tensor]:
    return {
        "q": torch.randn(BATCH, TOKENS, HEADS, DIM).to(dtype),
        "k": torch.randn(BATCH, TOKENS, KV_HEADS, DIM).to(dtype),
        "f": torch.randn(batch, tokens, DIM // 2),
    }
