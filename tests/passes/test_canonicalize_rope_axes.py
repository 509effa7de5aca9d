"""Rotations by angles of other dimensions or several axes are raised, and those of one tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.passes import CANONICALIZE, run_passes
from fusewright.passes.canonicalize import tensor
from tests.passes.graphs import aten, targets
from tests.passes.spelled_rotations import (
    AXES,
    BF16,
    DIM,
    HEADS,
    angles,
    complex_numbers,
    half,
    inputs,
    of_two_axes,
    turned,
)


def names(fn: Any) -> Any:
    return getattr(fn, "__name__", None)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("fn", AXES, ids=names)
def test_angles_of_several_axes_are_raised(fn: Any, dtype: torch.dtype) -> None:
    gm = aten(fn, **inputs(dtype))
    (report,) = run_passes(gm, [CANONICALIZE[1]], verify=True)
    parts = 2 if fn is of_two_axes else 1
    assert report.matched == 2 * parts and not report.missed
    assert targets(gm).count("rotary_embedding.default") == parts


def one_sided(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """As a layer that reads another one's keys."""
    cos, sin = (t.unsqueeze(2) for t in angles(f, q.dtype))
    return q * cos + half(q) * sin, k


def read_early(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """k follows from the rotated q."""
    cos, sin = (t.unsqueeze(2) for t in angles(f, q.dtype))
    q = q * cos + half(q) * sin
    k = k + q.sum()
    return q, k * cos + half(k) * sin


def conjugated(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """The conjugate is resolved once for q and once for k: these are two tables."""
    return complex_numbers(q, k, f, conj=True)


def of_other_layouts(q: Tensor, k: Tensor, f: Tensor) -> Any:
    cos, sin = (t.unsqueeze(1) for t in angles(f, q.dtype))
    other_cos, other_sin = (t.unsqueeze(2) for t in angles(f, q.dtype))
    q = q.transpose(1, 2)
    return q * cos + half(q) * sin, k * other_cos + half(k) * other_sin


@pytest.mark.parametrize("fn", [one_sided, read_early, conjugated, of_other_layouts], ids=names)
def test_what_has_no_partner_is_rotated_alone(fn: Any) -> None:
    given = inputs(torch.float32)
    gm = aten(fn, **given)
    want = gm(*given.values())
    (report,) = run_passes(gm, [CANONICALIZE[1]], verify=True)
    sites = 1 if fn is one_sided else 2
    assert report.matched == sites and not report.missed
    calls = gm.graph.find_nodes(op="call_function", target=torch.ops.fw.rotary_embedding.default)
    assert [tensor(call.args[2]).shape[1] for call in calls] == [0] * sites
    torch.testing.assert_close(gm(*given.values()), want, atol=1e-4, rtol=1e-5)


def of_one_angle_each(q: Tensor, k: Tensor, f: Tensor, emb: Any) -> Any:
    cos, sin = (t.unsqueeze(2).to(q.dtype) for t in (emb(f).cos(), emb(f).sin()))
    return q * cos + half(q) * sin, k * cos + half(k) * sin


def axes_of_other_halves(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """A part rotates by the angles of both axes."""
    rows, columns = f[..., : DIM // 4], f[..., DIM // 4 :]
    emb = torch.cat((rows, columns, rows, columns), dim=-1)
    cos, sin = (t.to(q.dtype).split([DIM // 2] * 2, dim=-1) for t in (emb.cos(), emb.sin()))
    c, s = cos[0].unsqueeze(2), sin[0].unsqueeze(2)
    q, k = q[..., : DIM // 2], k[..., : DIM // 2]
    return q * c + half(q) * s, k * c + half(k) * s


def sections_of_other_axes(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """Four sections a half, of three axes: none has the axis of its counterpart."""
    many = torch.stack((f, f + 1, f * 2))

    def emb(_: Tensor) -> Tensor:
        sections = torch.cat((many, many), dim=-1).split([2] * 8, -1)
        return torch.cat([m[i % 3] for i, m in enumerate(sections)], -1)

    return of_one_angle_each(q, k, f, emb)


def one_section_scaled(q: Tensor, k: Tensor, f: Tensor) -> Any:
    def emb(f: Tensor) -> Tensor:
        a, b = f.chunk(2, -1)
        return torch.cat((a, b, a, b * 2), -1)

    return of_one_angle_each(q, k, f, emb)


def angles_of_each_head(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """Three dimensions, of which the first is the heads'."""
    cos, sin = angles(torch.cat([f * i for i in range(HEADS)]), q.dtype)
    q, k = q.transpose(1, 2), torch.cat((k, k), 2).transpose(1, 2)
    return q * cos + half(q) * sin, k * cos + half(k) * sin


def joined_in_other_bits(q: Tensor, k: Tensor, f: Tensor) -> Any:
    """bfloat16 is turned and cast to float16, which does not hold it."""
    cos, sin = (t.unsqueeze(2) for t in angles(f, torch.float16))
    cos, sin = (t[..., : DIM // 2].repeat_interleave(2, dim=-1) for t in (cos, sin))
    return tuple((x.half() * cos + turned(x).half() * sin).to(x.dtype) for x in (q, k))


def one_token(q: Tensor, k: Tensor, f: Tensor) -> Any:
    cos, sin = angles(f[0, :1], q.dtype)
    return tuple(x * cos + half(x) * sin for x in (q[0], k[0]))


TWICE = "is not known to have each frequency twice, side by side"


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (axes_of_other_halves, f"split_with_sizes {TWICE}"),
        (sections_of_other_axes, f"cat {TWICE}"),
        (one_section_scaled, f"cat {TWICE}"),
        (angles_of_each_head, "angles of [4, 5, 8] do not match a tensor of [2, 4, 5, 16]"),
        (joined_in_other_bits, "view feeds _to_copy, not a product with the sines"),
        (one_token, "angles of [1, 8] do not match a tensor of [5, 4, 16]"),
    ],
    ids=names,
)
def test_near_misses_are_left_alone(fn: Any, reason: str) -> None:
    gm = aten(fn, **inputs(BF16))
    before = targets(gm)
    (report,) = run_passes(gm, [CANONICALIZE[1]], verify=True)
    assert len(report.missed) == 2 and not report.matched
    assert reason in [site.reason for site in report.missed]
    assert targets(gm) == before
