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
from tests.passes.graphs import aten, in_turn, targets
from tests.passes.spelled_rotations import (
    BATCH,
    BF16,
    DIM,
    EXACT,
    HALVES,
    PAIRS,
    TOKENS,
    angles,
    complex_by_head,
    complex_numbers,
    complex_table,
    four_products,
    half,
    heads_last,
    inputs,
    llama,
    looked_up,
    pairs,
    pairs_to_halves,
    turned,
    wide_angles,
    wide_tensors,
)
from tests.passes.test_mutations import Change, Mutation, Spoiled, apply, put, swap


def raised(fn: Callable[..., Any], **given: Tensor) -> tuple[PassReport, list[str]]:
    gm = aten(fn, **given)
    (report,) = run_passes(gm, [CANONICALIZE[1]], verify=True)
    return report, targets(gm)


def names(fn: Any) -> Any:
    return getattr(fn, "__name__", None)


@pytest.mark.product
@pytest.mark.parametrize(
    ("fn", "dtype", "batch"),
    in_turn([*HALVES, *PAIRS, pairs_to_halves], [torch.float32, BF16, torch.float16], [1, BATCH]),
    ids=names,
)
def test_every_spelling_is_raised(fn: Any, dtype: torch.dtype, batch: int) -> None:
    gm = aten(fn, **inputs(dtype, batch))
    (report,) = run_passes(gm, [CANONICALIZE[1]], verify=True)
    ops = targets(gm)
    assert report.matched == 2 and not report.missed
    (call,) = (n for n in gm.graph.nodes if "rotary" in str(n.target))
    layout = "pairs_to_halves" if fn is pairs_to_halves else "pairs" if fn in PAIRS else "halves"
    assert (*call.args[4:], "halves")[0] == layout
    assert ("neg.default" in ops) == ("back" in fn.__name__)
    assert ops.count("repeat.default") == (batch == 1)
    if fn in EXACT or (dtype == torch.float32 and "complex" not in fn.__name__):
        assert [check.max_abs for check in report.checks] == [0.0]


@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_what_a_decode_step_rotates_is_raised(tokens: int) -> None:
    """With one token, heads and tokens can be told apart by the tensor alone."""
    for fn in (llama, heads_last, pairs, looked_up, complex_by_head):
        given = {name: value[:, :tokens] for name, value in inputs(BF16).items()}
        report, _ = raised(fn, **given)
        assert report.matched == 2, fn.__name__


def test_cosines_and_sines_of_other_ranks_are_raised() -> None:
    def ranks(q: Tensor, k: Tensor, c: Tensor, s: Tensor) -> Any:
        cos, sin = torch.cat((c, c), -1), torch.cat((s, s), -1).unsqueeze(1)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        return q * cos + half(q) * sin, k * cos + half(k) * sin

    given = inputs(BF16, BATCH)
    f = given.pop("f").bfloat16()
    report, _ = raised(ranks, **given, c=f.cos()[:, None], s=f.sin())
    assert report.matched == 2 and not report.missed


def test_no_tokens_of_a_static_shape_are_rotated() -> None:
    given = {name: value[:, :0] for name, value in inputs(BF16, BATCH).items()}
    report, _ = raised(llama, **given)
    assert report.matched == 2


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


def pairs_by_angles_of_halves(q: Tensor, k: Tensor, f: Tensor) -> Any:
    cos, sin = (t.unsqueeze(2) for t in angles(f, q.dtype))
    return q * cos + turned(q) * sin, k * cos + turned(k) * sin


def halves_by_angles_of_pairs(q: Tensor, k: Tensor, f: Tensor) -> Any:
    emb = torch.repeat_interleave(f, 2, dim=-1)
    cos, sin = emb.cos().to(q.dtype).unsqueeze(2), emb.sin().to(q.dtype).unsqueeze(2)
    return q * cos + half(q) * sin, k * cos + half(k) * sin


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


def double_throughout(q: Tensor, k: Tensor, f: Tensor) -> Any:
    return llama(q.double(), k.double(), f)


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
        (
            pairs_by_angles_of_halves,
            2,
            "cat is not known to have each frequency twice in turn",
        ),
        (clockwise, 2, "the parts are not the two halves of the last dimension"),
        (angles_of_all_columns, 2, "cat is not the frequencies twice, side by side"),
        (cosines_twice, 2, "cos is not a sin"),
        (scales_differ, 2, "cosines and sines are not of the same angles"),
        (subtracted, 2, "mul feeds sub, not a sum"),
        (of_one_token, 2, "angles of [1, 1, 8] do not match a tensor of [2, 5, 4, 16]"),
        (
            halves_by_angles_of_pairs,
            2,
            "view is not known to have each frequency twice, side by side",
        ),
        (pairs_joined_as_halves, 2, "pairs of the last dimension are joined as halves"),
        (every_third, 0, ""),
        (wrong_sign, 2, "add is not the first part times cos less the second times sin"),
        (swapped_parts, 2, "sub is not the first part times cos less the second times sin"),
        (one_part_twice, 2, "add is not the second part times cos plus the first times sin"),
        (sines_for_cosines, 2, "sin is not a cos"),
        (other_angles_below, 2, "add is not the second part times cos plus the first times sin"),
        (complex_halves, 2, "view_as_complex is not of the pairs of neighbours of a tensor"),
        (double, 2, "torch.float64 is rotated in torch.float64, the op computes in float32"),
        (
            double_throughout,
            2,
            "torch.float64 is rotated in torch.float64, the op computes in float32",
        ),
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


@pytest.mark.product
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("fn", "change"), MUTATED)
def test_wrong_rewrites_are_caught(fn: Any, change: Change, dtype: torch.dtype) -> None:
    wrong = Spoiled(CANONICALIZE[1], Mutation("", "canonicalize_rope", fn, inside=change))
    with pytest.raises((VerificationError, RuntimeError, TypeError)):
        run_passes(aten(fn, **inputs(dtype)), [wrong], verify=True)
