"""RMSNorm is raised in every spelling, and near misses are left alone with their reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor, fx

from fusewright.ops.norm.norm import RMS_NORM
from fusewright.passes import (
    CANONICALIZE,
    PassReport,
    VerificationError,
    build_passes,
    run_passes,
)
from tests.passes.graphs import aten, capture, hidden, targets
from tests.passes.test_mutations import Change, Mutation, Spoiled, apply, put

BF16 = torch.bfloat16


def raised(gm: fx.GraphModule) -> PassReport:
    report, _ = run_passes(gm, [CANONICALIZE[0], *build_passes(["cleanup"])], verify=True)
    return report


def llama(x: Tensor, w: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * normed.to(x.dtype)


def other_orders(x: Tensor, w: Tensor) -> Tensor:
    normed = torch.rsqrt(1e-6 + (x.float() ** 2).mean(dim=-1, keepdim=True)) * x.float()
    return normed.type_as(x) * w


def product(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return (wide * (wide * wide).mean(-1, True).add(1e-6).rsqrt()).to(x.dtype).mul(w)


def square(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return w * (wide * torch.rsqrt(torch.square(wide).mean([-1], keepdim=True) + 1e-6)).to(x.dtype)


def divided(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return (wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def reciprocal(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    root = torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (wide * root.reciprocal()).to(x.dtype) * w


def one_over(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return (wide * (1 / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt())).to(x.dtype) * w


def power(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return (wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6).pow(-0.5)).to(x.dtype) * w


def summed(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    mean = wide.pow(2).sum(-1, keepdim=True) / x.shape[-1]
    return (wide * torch.rsqrt(mean + 1e-6)).to(x.dtype) * w


def weight_before_cast(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * w.float()).to(x.dtype)


def weight_promoted(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return (w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6))).to(x.dtype)


def narrow_times_wide(x: Tensor, w: Tensor) -> Tensor:
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return (x * scale).to(x.dtype) * w


def gemma(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (normed * (1.0 + w.float())).type_as(x)


def call(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), w, 1e-6)


SPELLINGS = [
    llama, other_orders, product, square, divided, reciprocal, one_over, power, summed,
    weight_before_cast, weight_promoted, narrow_times_wide, gemma, call,
]  # fmt: skip


def names(fn: Any) -> Any:
    return getattr(fn, "__name__", None)


@pytest.mark.product
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(
    ("fn", "graph"),
    [(fn, graph) for fn in SPELLINGS for graph in (capture, aten) if (fn, graph) != (call, aten)],
    ids=names,
)
def test_every_spelling_is_raised(fn: Any, dtype: torch.dtype, graph: Any) -> None:
    gm = graph(fn, x=hidden(dtype=dtype), w=torch.randn(32).to(dtype))
    report = raised(gm)
    assert report.matched == 1 and not report.missed
    assert targets(gm) == ["rms_norm.default"]
    (norm,) = gm.graph.find_nodes(op="call_function", target=RMS_NORM.overload())
    assert norm.args[2] == pytest.approx(1e-6)
    wide = fn in (weight_before_cast, weight_promoted) and dtype != torch.float32
    expected = 1.0 if fn is gemma else 0.0 if wide or fn is call else None
    offset = norm.args[3] if len(norm.args) > 3 else None
    assert offset == expected or (offset == 0.0 and dtype == torch.float32)


def test_a_float32_weight_stays_float32() -> None:
    gm = aten(weight_before_cast, x=hidden(dtype=BF16), w=torch.randn(32))
    assert raised(gm).matched == 1
    cast = aten(llama, x=hidden(dtype=BF16), w=torch.randn(32))
    (miss,) = raised(cast).missed
    assert miss.reason == "the weight is torch.float32, x is torch.bfloat16"


def rows(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6) * w


def not_kept(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1) + 1e-6)[:, None] * w


def no_mean(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) * w


def of_another_width(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / 31 + 1e-6) * w


def eps_inside(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt((x + 1e-3).pow(2).mean(-1, keepdim=True) + 1e-6) * w


def eps_after_root(x: Tensor, w: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6) * w


def eps_learned(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + w[:1]) * w


def root_over_tensor(x: Tensor, w: Tensor) -> Tensor:
    return torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) / x * w


def other_tensor(x: Tensor, w: Tensor) -> Tensor:
    return (x + 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def scale_read_twice(x: Tensor, w: Tensor) -> Any:
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return x * scale * w, scale


def normed_read_twice(x: Tensor, w: Tensor) -> Any:
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return normed * w, normed


def of_columns(x: Tensor, w: Tensor) -> Tensor:
    x = x.t()[:, :7]
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w[:7]


NEAR_MISSES = [
    (rows, "the mean is over dimensions [0], expected the last alone, kept"),
    (not_kept, "the mean is over dimensions [-1], expected the last alone, kept"),
    (of_another_width, "the squares are summed and not divided by 32"),
    (eps_inside, "mul scales another tensor than the one that is squared"),
    (eps_after_root, "the mean feeds sqrt, not a sum with a number, eps"),
    (eps_learned, "the mean feeds add, not a sum with a number, eps"),
    (root_over_tensor, "sqrt feeds div, which does not scale the tensor"),
    (other_tensor, "mul scales another tensor than the one that is squared"),
    (scale_read_twice, "rsqrt has 2 users, expected one"),
    (normed_read_twice, "mul has 2 users, expected one"),
    (of_columns, "mul has strides [1, 32], the op's result is dense"),
]


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_heads_normed_behind_their_transposition_keep_their_layout(dtype: torch.dtype) -> None:
    gm = aten(lambda x, w: llama(x.transpose(1, 2), w), x=torch.randn(2, 5, 4, 32).to(dtype),
              w=torch.randn(32).to(dtype))  # fmt: skip
    assert raised(gm).matched == 1
    assert targets(gm) == ["transpose.int", "transpose.int", "rms_norm.default", "transpose.int"]


def mean_square(x: Tensor, w: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True) + w


@pytest.mark.parametrize("fn", [no_mean, mean_square], ids=names)
def test_what_is_no_norm_is_no_site(fn: Any) -> None:
    gm = aten(fn, x=hidden(), w=torch.randn(32))
    before = targets(gm)
    assert raised(gm).sites == [] and targets(gm) == before


@pytest.mark.parametrize(("fn", "reason"), NEAR_MISSES, ids=names)
def test_near_misses_are_left_alone(fn: Any, reason: str) -> None:
    gm = aten(fn, x=hidden(), w=torch.randn(32))
    before = targets(gm)
    assert [site.reason for site in raised(gm).missed] == [reason]
    assert targets(gm) == before


@pytest.mark.parametrize("graph", [capture, aten], ids=names)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_cast_for_each_use_is_verified(dtype: torch.dtype, graph: Any) -> None:
    def often(x: Tensor, w: Tensor) -> Tensor:
        scale = torch.rsqrt((x.float() * x.float()).mean(-1, keepdim=True) + 1e-6)
        return (x.float() * scale).to(x.dtype) * w

    gm = graph(often, x=hidden(dtype=dtype), w=torch.randn(32).to(dtype))
    assert raised(gm).matched == 1


@pytest.mark.parametrize("fn", [llama, call], ids=names)
def test_a_norm_of_doubles_stays_in_doubles(fn: Any) -> None:
    doubles = {"x": hidden(dtype=torch.float64), "w": torch.randn(32, dtype=torch.float64)}
    (miss,) = raised(capture(fn, **doubles)).missed
    assert "float64" in miss.reason


def test_a_norm_of_one_number_is_left_alone() -> None:
    gm = aten(llama, x=torch.tensor(3.0), w=torch.tensor(2.0))
    (miss,) = raised(gm).missed
    assert miss.reason.endswith("has no dimension, expected one or more")


def test_a_norm_in_bfloat16_is_left_alone() -> None:
    def narrow(x: Tensor, w: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w

    (miss,) = raised(aten(narrow, x=hidden(dtype=BF16), w=torch.randn(32).bfloat16())).missed
    expected = "squares of torch.bfloat16 are averaged in torch.bfloat16, the op's in float32"
    assert miss.reason == expected


def by_hand(x: Tensor, w: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def cohere(x: Tensor, w: Tensor) -> Tensor:
    """What is squared and what is scaled are two nodes."""
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).pow(2).mean(-1, keepdim=True)
    normed = (wide - mean) * torch.rsqrt(variance + 1e-6)
    return (w.float() * normed).to(x.dtype)


def with_bias(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x, (32,), w, w - 1)


def without_weight(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x, (32,), eps=1e-6) * 2


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("fn", [by_hand, cohere, with_bias, without_weight])
def test_layer_norms_are_raised(fn: Callable[..., Tensor], dtype: torch.dtype) -> None:
    if fn is by_hand and dtype == BF16:
        return  # it squares bfloat16
    gm = capture(fn, x=hidden(dtype=dtype), w=torch.randn(32).to(dtype))
    assert raised(gm).matched == 1
    (norm,) = gm.graph.find_nodes(op="call_function", target=torch.ops.fw.layer_norm.default)
    assert len(norm.args) == 3 + (fn is with_bias)
    assert "mean" not in targets(gm)


def test_a_mean_over_another_dimension_makes_no_layer_norm() -> None:
    """What is left is an RMSNorm of what differs from that mean."""

    def norm(x: Tensor, w: Tensor) -> Tensor:
        x = x - x.mean(0, keepdim=True)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w

    gm = aten(norm, x=hidden(), w=torch.randn(32))
    assert raised(gm).matched == 1
    assert targets(gm) == ["mean.dim", "sub.Tensor", "rms_norm.default"]


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(
    "change",
    [put(2, 1e-5), put(3, None), put(3, 0.0), apply(0, torch.neg), apply(1, torch.add, 1)],
)
def test_wrong_rewrites_are_caught(change: Change, dtype: torch.dtype) -> None:
    gm = capture(gemma, x=hidden(dtype=dtype), w=torch.randn(32).to(dtype))
    wrong = Spoiled(CANONICALIZE[0], Mutation("", "canonicalize_norm", gemma, inside=change))
    with pytest.raises(VerificationError, match="rewrite canonicalize_norm"):
        run_passes(gm, [wrong], verify=True)


@st.composite
def spelled(draw: st.DrawFn) -> Callable[[Tensor, Tensor], Tensor]:
    """A norm in words of its own."""
    pick = lambda *choices: draw(st.sampled_from(choices))  # noqa: E731
    eps = draw(st.floats(1e-7, 1e-3))
    squares = pick(lambda x: x.pow(2), lambda x: x * x, torch.square, lambda x: x**2.0)
    mean = pick(
        lambda s: s.mean(-1, keepdim=True),
        lambda s: torch.mean(s, dim=s.dim() - 1, keepdim=True),
        lambda s: s.sum(dim=(-1,), keepdim=True) / s.shape[-1],
    )
    add = pick(lambda m: m + eps, lambda m: eps + m, lambda m: torch.add(m, eps))
    scale = pick(
        lambda x, m: x * m.rsqrt(),
        lambda x, m: torch.rsqrt(m) * x,
        lambda x, m: x / m.sqrt(),
        lambda x, m: torch.sqrt(m).reciprocal() * x,
        lambda x, m: x * (1.0 / torch.sqrt(m)),
        lambda x, m: m**-0.5 * x,
    )
    weigh = pick(
        lambda n, w, t: n.to(t) * w,
        lambda n, w, t: w * n.to(t),
        lambda n, w, t: (n * w).to(t),
        lambda n, w, t: (w.float() * n).to(t),
        lambda n, w, t: (n * (1 + w.float())).to(t),
        lambda n, w, t: ((w.float() + 1.0) * n).to(t),
        lambda n, w, t: n.to(t) * (w + 1),
    )

    def norm(x: Tensor, w: Tensor) -> Tensor:
        wide = x.float()
        return weigh(scale(wide, add(mean(squares(wide)))), w, x.dtype)

    return norm


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(fn=spelled(), dtype=st.sampled_from([torch.float32, BF16, torch.float16]))
def test_any_words_for_a_norm_are_raised(fn: Any, dtype: torch.dtype) -> None:
    """Each is run against the op by verification."""
    gm = aten(fn, x=hidden(dtype=dtype, tokens=3), w=torch.randn(32).to(dtype))
    report = raised(gm)
    assert report.matched == 1 and not report.missed
