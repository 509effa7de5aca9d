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


HALVES = [
    llama, other_orders, chunked, heads_last, partial, partial_of_each, wide_angles, wide_tensors,
    four_products, laid_out_by_head,
]  # fmt: skip
PAIRS = [pairs, partial_pairs, looked_up, complex_numbers, complex_by_head, complex_table]
EXACT = [wide_angles, wide_tensors, pairs]


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
@pytest.mark.parametrize("fn", [*HALVES, *PAIRS, pairs_to_halves], ids=names)
def test_every_spelling_is_raised(fn: Any, dtype: torch.dtype, batch: int) -> None:
    gm = aten(fn, **inputs(dtype, batch))
    (report,) = run_passes(gm, [CANONICALIZE[1]], verify=True)
    ops = targets(gm)
    assert report.matched == 2 and not report.missed
    (call,) = (n for n in gm.graph.nodes if "rotary" in str(n.target))
    layout = "pairs_to_halves" if fn is pairs_to_halves else "pairs" if fn in PAIRS else "halves"
    assert (*call.args[4:], "halves")[0] == layout
    assert "neg.default" not in ops and ops.count("repeat.default") == (batch == 1)
    if fn in EXACT or (dtype == torch.float32 and "complex" not in fn.__name__):
        assert [check.max_abs for check in report.checks] == [0.0]


@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_what_a_decode_step_rotates_is_raised(tokens: int) -> None:
    """With one token, heads and tokens can be told apart by the tensor alone."""
    for fn in (llama, heads_last, pairs, looked_up, complex_by_head):
        given = {name: value[:, :tokens] for name, value in inputs(BF16).items()}
        report, _ = raised(fn, **given)
        assert report.matched == 2, fn.__name__


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


def pairs_by_angles_of_halves(q: Tensor, k: Tensor, f: Tensor) -> Any:
    cos, sin = (t.unsqueeze(2) for t in angles(f, q.dtype))
    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def halves_by_angles_of_pairs(q: Tensor, k: Tensor, f: Tensor) -> Any:
    emb = torch.repeat_interleave(f, 2, dim=-1)
    cos, sin = emb.cos().to(q.dtype).unsqueeze(2), emb.sin().to(q.dtype).unsqueeze(2)
    return q * cos + half(q) * sin, k * cos + half(k) * sin


def the_other_way(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """The second of each pair is negated."""

    def turned(x: Tensor) -> Tensor:
        return torch.stack((x[..., 1::2], -x[..., ::2]), dim=-1).flatten(-2)

    emb = torch.repeat_interleave(f, 2, dim=-1)
    cos, sin = emb.cos().to(q.dtype).unsqueeze(2), emb.sin().to(q.dtype).unsqueeze(2)
    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def pairs_joined_as_halves(q: Tensor, k: Tensor, f: Tensor) -> Any:
    def turned(x: Tensor) -> Tensor:
        return torch.cat((-x[..., 1::2], x[..., ::2]), dim=-1)

    cos, sin = (t.unsqueeze(2) for t in angles(f, q.dtype))
    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def every_third(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """Columns 0, 3, ... and 1, 4, ... are as many, but no pairs."""
    cos, sin = (t.unsqueeze(2) for t in angles(f[..., :3], q.dtype))

    def rotated(x: Tensor) -> Tensor:
        part = torch.stack((-x[..., 1:8:3], x[..., 0:8:3]), dim=-1).flatten(-2)
        return x[..., :6] * cos + part * sin

    return rotated(q), rotated(k)


def four(q: Tensor, k: Tensor, f: Tensor, join: Callable[..., Any]) -> Any:
    cos, sin = (t.to(q.dtype).unsqueeze(2) for t in (f.cos(), f.sin()))
    return tuple(torch.cat(join(*x.chunk(2, dim=-1), cos, sin), dim=-1) for x in (q, k))


def wrong_sign(q: Tensor, k: Tensor, f: Tensor) -> Any:
    return four(q, k, f, lambda a, b, c, s: (a * c + b * s, b * c - a * s))


def swapped_parts(q: Tensor, k: Tensor, f: Tensor) -> Any:
    return four(q, k, f, lambda a, b, c, s: (b * c - a * s, a * c + b * s))


def one_part_twice(q: Tensor, k: Tensor, f: Tensor) -> Any:
    return four(q, k, f, lambda a, b, c, s: (a * c - b * s, b * c + b * s))


def sines_for_cosines(q: Tensor, k: Tensor, f: Tensor) -> Any:
    return four(q, k, f, lambda a, b, c, s: (a * s - b * c, b * s + a * c))


def other_angles_below(q: Tensor, k: Tensor, f: Tensor) -> Any:
    return four(q, k, f, lambda a, b, c, s: (a * c - b * s, b * (c + 1) + a * s))


def conjugated(q: Tensor, k: Tensor, f: Tensor) -> Any:
    return complex_numbers(q, k, f, conj=True)


def complex_halves(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """Real and imaginary parts are half a head apart."""
    numbers = torch.polar(torch.ones_like(f), f).unsqueeze(2)
    made = []
    for x in (q, k):
        paired = torch.stack(x.float().chunk(2, dim=-1), dim=-1)
        made.append(torch.view_as_real(torch.view_as_complex(paired) * numbers).flatten(3).to(q))
    return made


def double(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """float32 angles, but tensors of float64."""
    cos, sin = (t.unsqueeze(2) for t in angles(f, torch.float32))
    return tuple(x * cos + half(x) * sin for x in (q.double(), k.double()))


def double_inside(q: Tensor, k: Tensor, f: Tensor) -> Any:
    cos, sin = (t.unsqueeze(2) for t in angles(f, torch.float64))
    return tuple((x * cos + half(x) * sin).to(q.dtype) for x in (q, k))


def double_complex(q: Tensor, k: Tensor, f: Tensor) -> Any:
    numbers = torch.polar(torch.ones_like(f), f).to(torch.complex128).unsqueeze(2)
    made = []
    for x in (q, k):
        number = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        made.append(torch.view_as_real(number * numbers).flatten(3).to(q.dtype))
    return made


def never_cast_back(q: Tensor, k: Tensor, f: Tensor) -> Any:
    cos, sin = (t.unsqueeze(2) for t in angles(f, torch.float32))
    return q * cos + half(q) * sin, k * cos + half(k) * sin


def narrowed_on_the_way(q: Tensor, k: Tensor, f: Tensor) -> Any:
    cos, sin = (t.unsqueeze(2) for t in angles(f, torch.float32))
    cos = cos.to(q.dtype)
    return tuple((x * cos + half(x) * sin).to(q.dtype) for x in (q, k))


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


def subtracted(q: Tensor, k: Tensor, f: Tensor) -> Any:
    cos, sin = (t.unsqueeze(2) for t in angles(f, q.dtype))
    return q * cos - half(q) * sin, k * cos - half(k) * sin


@pytest.mark.parametrize(
    ("fn", "sites", "reason"),
    [
        (one_sided, 1, "no other rotation by the same angles follows"),
        (read_early, 2, "sum_1 reads it before k is rotated"),
        (
            pairs_by_angles_of_halves,
            2,
            "cat is not known to have each frequency twice in turn",
        ),
        (clockwise, 2, "the parts are not the two halves of the last dimension"),
        (angles_of_all_columns, 2, "cat is not the frequencies twice, side by side"),
        (cosines_twice, 2, "cos is not a sin"),
        (scales_differ, 2, "cosines and sines are not of the same angles"),
        (subtracted, 2, "mul_3 feeds sub, not a sum"),
        (of_one_token, 2, "angles of [1, 1, 8] do not match a tensor of [2, 5, 4, 16]"),
        (
            halves_by_angles_of_pairs,
            2,
            "view is not known to have each frequency twice, side by side",
        ),
        (the_other_way, 2, "the parts are not the two pairs of the last dimension"),
        (pairs_joined_as_halves, 2, "pairs of the last dimension are joined as halves"),
        (every_third, 0, ""),
        (wrong_sign, 2, "add is not the first part times cos less the second times sin"),
        (swapped_parts, 2, "sub is not the first part times cos less the second times sin"),
        (one_part_twice, 2, "add is not the second part times cos plus the first times sin"),
        (sines_for_cosines, 2, "sin is not a cos"),
        (other_angles_below, 2, "add_1 is not the second part times cos plus the first times sin"),
        (conjugated, 2, "no other rotation by the same angles follows"),
        (complex_halves, 2, "view_as_complex is not of the pairs of neighbours of a tensor"),
        (double, 2, "torch.float64 is rotated in torch.float64, the op computes in float32"),
        (double_inside, 2, "the result is torch.float64, the rotated tensor torch.bfloat16"),
        (double_complex, 2, "mul is torch.complex128, the op computes in float32"),
        (never_cast_back, 2, "the result is torch.float32, the rotated tensor torch.bfloat16"),
        (narrowed_on_the_way, 2, "cosines and sines are not of the same angles"),
    ],
    ids=names,
)
def test_near_misses_are_left_alone(fn: Any, sites: int, reason: str) -> None:
    report, ops = raised(fn, **inputs(BF16))
    assert len(report.missed) == sites and not report.matched
    assert "rotary_embedding.default" not in ops
    if sites:
        assert reason in [site.reason for site in report.missed]


LAYOUT = 4
MUTATED: list[tuple[Any, Change]] = [
    (llama, swap(1, 2)),
    (llama, apply(1, operator.neg)),
    (llama, apply(0, "flip", 0)),
    (llama, apply(3, "flip", 1)),
    (llama, apply(3, operator.mul, 1.02)),
    (llama, put(0, 0)),
    *((fn, apply(3, "flip", 1)) for fn in (pairs, looked_up, four_products, complex_numbers)),
    *((fn, apply(3, "roll", 1, -1)) for fn in (wide_angles, pairs_to_halves, complex_table)),
    *((pairs, put(LAYOUT, one)) for one in ("halves", "pairs_to_halves", "halves_to_pairs")),
    *((pairs_to_halves, put(LAYOUT, one)) for one in ("halves", "pairs", "halves_to_pairs")),
    (complex_by_head, put(LAYOUT, "halves")),
    (complex_by_head, apply(1, operator.neg)),
    (complex_table, apply(0, "flip", 0)),
    (wide_tensors, apply(3, operator.mul, 1 + 2**-7)),
]


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("fn", "change"), MUTATED)
def test_wrong_rewrites_are_caught(fn: Any, change: Change, dtype: torch.dtype) -> None:
    wrong = Spoiled(CANONICALIZE[1], Mutation("", "canonicalize_rope", fn, inside=change))
    with pytest.raises((VerificationError, RuntimeError, TypeError)):
        run_passes(aten(fn, **inputs(dtype)), [wrong], verify=True)
