"""The rotation of queries and keys is raised as transformers spells it, and near misses are not."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.passes import CANONICALIZE, PassReport, VerificationError, run_passes
from fusewright.passes.cleanup import Cleanup
from tests.passes.graphs import aten, targets
from tests.passes.test_mutations import Change, Mutation, Spoiled, apply, put, swap

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


def heads_last(q: Tensor, k: Tensor, f: Tensor) -> Any:
    cos, sin = (t.unsqueeze(2) for t in angles(f, q.dtype))
    return q * cos + half(q) * sin, k * cos + half(k) * sin


def partial(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """Of heads of twice the width, the first half rotates."""
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


def inputs(dtype: torch.dtype, batch: int = 1, tokens: int = TOKENS) -> dict[str, Tensor]:
    return {
        "q": torch.randn(BATCH, TOKENS, HEADS, DIM).to(dtype),
        "k": torch.randn(BATCH, TOKENS, KV_HEADS, DIM).to(dtype),
        "f": torch.randn(batch, tokens, DIM // 2),
    }


def raised(fn: Callable[..., Any], **given: Tensor) -> tuple[PassReport, list[str]]:
    gm = aten(fn, **given)
    (report,) = run_passes(gm, [CANONICALIZE[1]], verify=True)
    return report, targets(gm)


def names(fn: Any) -> Any:
    return getattr(fn, "__name__", None)


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize(
    "fn", [llama, other_orders, chunked, heads_last, partial, partial_of_each], ids=names
)
def test_every_spelling_is_raised(fn: Any, dtype: torch.dtype, batch: int) -> None:
    report, ops = raised(fn, **inputs(dtype, batch))
    assert report.matched == 2 and not report.missed
    assert ops.count("rotary_embedding.default") == 1
    assert "neg.default" not in ops and ops.count("repeat.default") == (batch == 1)


def test_layers_share_one_table() -> None:
    def layers(q: Tensor, k: Tensor, f: Tensor) -> Any:
        cos, sin = (t.unsqueeze(2) for t in angles(f, q.dtype))
        for _ in range(3):
            q, k = q * cos + half(q) * sin, k * cos + half(k) * sin
        return q, k

    gm = aten(layers, **inputs(BF16))
    report, _cleaned = run_passes(gm, [CANONICALIZE[1], Cleanup()], verify=True)
    ops = targets(gm)
    assert report.matched == 6
    assert ops.count("rotary_embedding.default") == 3
    assert [ops.count(f"{one}.default") for one in ("cos", "sin", "arange", "cat")] == [1, 1, 1, 1]


def one_sided(q: Tensor, k: Tensor, f: Tensor) -> Any:
    cos, sin = (t.unsqueeze(2) for t in angles(f, q.dtype))
    return q * cos + half(q) * sin, k


def read_early(q: Tensor, k: Tensor, f: Tensor) -> Any:
    cos, sin = (t.unsqueeze(2) for t in angles(f, q.dtype))
    q = q * cos + half(q) * sin
    k = k + q.sum()
    return q, k * cos + half(k) * sin


def pairs_of_neighbours(q: Tensor, k: Tensor, f: Tensor) -> Any:
    def turned(x: Tensor) -> Tensor:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)

    cos, sin = (t.unsqueeze(2) for t in angles(f, q.dtype))
    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def clockwise(q: Tensor, k: Tensor, f: Tensor) -> Any:
    def turned(x: Tensor) -> Tensor:
        return torch.cat((-x[..., : DIM // 2], x[..., DIM // 2 :]), dim=-1)

    cos, sin = (t.unsqueeze(2) for t in angles(f, q.dtype))
    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def angles_of_all_columns(q: Tensor, k: Tensor, f: Tensor) -> Any:
    emb = torch.cat((f, f + 1), dim=-1)
    cos, sin = emb.cos().to(q.dtype).unsqueeze(2), emb.sin().to(q.dtype).unsqueeze(2)
    return q * cos + half(q) * sin, k * cos + half(k) * sin


def cosines_twice(q: Tensor, k: Tensor, f: Tensor) -> Any:
    cos, _ = (t.unsqueeze(2) for t in angles(f, q.dtype))
    return q * cos + half(q) * cos, k * cos + half(k) * cos


def scales_differ(q: Tensor, k: Tensor, f: Tensor) -> Any:
    cos, sin = angles(f, q.dtype)[0].unsqueeze(2), angles(f, q.dtype, 2.0)[1].unsqueeze(2)
    return q * cos + half(q) * sin, k * cos + half(k) * sin


def of_one_token(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """The angles of the first token, for all."""
    cos, sin = (t.unsqueeze(2) for t in angles(f[:, :1], q.dtype))
    return q * cos + half(q) * sin, k * cos + half(k) * sin


def laid_out_by_head(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """The concatenation, which is contiguous, gives the sum its strides."""
    cos, sin = (t.unsqueeze(1) for t in angles(f, q.dtype))
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    return sin * half(q) + cos * q, sin * half(k) + cos * k


def subtracted(q: Tensor, k: Tensor, f: Tensor) -> Any:
    cos, sin = (t.unsqueeze(2) for t in angles(f, q.dtype))
    return q * cos - half(q) * sin, k * cos - half(k) * sin


@pytest.mark.parametrize(
    ("fn", "sites", "reason"),
    [
        (one_sided, 1, "no other rotation by the same angles follows"),
        (read_early, 2, "sum_1 reads it before k is rotated"),
        (pairs_of_neighbours, 0, ""),
        (clockwise, 2, "the parts are not the two halves of the last dimension"),
        (angles_of_all_columns, 2, "cat is not the frequencies twice, side by side"),
        (cosines_twice, 2, "cos is not a sin"),
        (scales_differ, 2, "cosines and sines are not of the same angles"),
        (subtracted, 2, "mul_3 feeds sub, not a sum"),
        (of_one_token, 2, "angles of [1, 1, 8] do not match a tensor of [2, 5, 4, 16]"),
        (
            laid_out_by_head,
            2,
            "the result has strides [320, 80, 16, 1], the op's are by token",
        ),
    ],
    ids=names,
)
def test_near_misses_are_left_alone(fn: Any, sites: int, reason: str) -> None:
    report, ops = raised(fn, **inputs(BF16))
    assert len(report.missed) == sites and not report.matched
    assert "rotary_embedding.default" not in ops
    if sites:
        assert reason in [site.reason for site in report.missed]


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(
    "change",
    [
        swap(1, 2),
        apply(1, operator.neg),
        apply(0, "flip", 0),
        apply(3, "flip", 1),
        apply(3, operator.mul, 1.02),
        put(0, 0),
    ],
)
def test_wrong_rewrites_are_caught(change: Change, dtype: torch.dtype) -> None:
    wrong = Spoiled(CANONICALIZE[1], Mutation("", "canonicalize_rope", llama, inside=change))
    with pytest.raises((VerificationError, RuntimeError, TypeError)):
        run_passes(aten(llama, **inputs(dtype)), [wrong], verify=True)
