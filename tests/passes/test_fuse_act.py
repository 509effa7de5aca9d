"""Gated activations become one op, of one tensor with both halves or of two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright import ops
from fusewright.passes import VerificationError, build_passes, run_passes
from tests.passes.changes import Change, apply, put
from tests.passes.graphs import aten, capture, hidden, in_turn, targets
from tests.passes.test_mutations import Mutation, Spoiled


def silu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def other_order(x: Tensor) -> Tensor:
    gate, up = torch.chunk(x, 2, 1)
    return up * F.silu(gate)


def split(x: Tensor) -> Tensor:
    gate, up = x.split(x.shape[-1] // 2, dim=-1)
    return torch.mul(F.silu(gate), up)


def slices(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return F.silu(x[..., :half]) * x[:, half:]


def negative_slices(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return F.silu(x[..., :-half]) * x[..., -half:]


def sigmoid(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def sigmoid_first(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return up * (gate.sigmoid() * gate)


def wide(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return (F.silu(gate.float()) * up.float()).to(x.dtype)


def wide_gate(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate.float()).type_as(up) * up


def gelu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def gelu_slices(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x[..., half:] * F.gelu(x[..., :half], approximate="tanh")


def rows(x: Tensor) -> Tensor:
    """As Moshi: gate and up are rows of a view."""
    both = x.view(*x.shape[:-1], 2, x.shape[-1] // 2)
    return F.silu(both.select(-2, 0)) * both.select(-2, 1)


PACKED = [
    silu, other_order, split, slices, negative_slices, sigmoid, sigmoid_first, wide, wide_gate,
    gelu, gelu_slices, rows,
]  # fmt: skip


def clamped_first(x: Tensor) -> Tensor:
    """``silu_mul`` of the clamped gate: its limit is not up's."""
    gate = x[..., : x.shape[-1] // 2].clamp(max=1.0)
    return gate * torch.sigmoid(gate) * x[..., x.shape[-1] // 2 :]


def swapped(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(up) * gate


def first_of_three(x: Tensor) -> Tensor:
    gate, up, _ = x.chunk(3, dim=-1)
    return F.silu(gate) * up


def two_products(x: Tensor) -> Tensor:
    return F.silu(x @ x.t()) * (x @ x.flip(0).t())


def two_wide_products(x: Tensor) -> Tensor:
    gate, up = x @ x.t(), x @ x.flip(0).t()
    return (up.float() * F.gelu(gate.float(), approximate="tanh")).to(x.dtype)


APART = [clamped_first, swapped, first_of_three, two_products, two_wide_products]


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def names(fn: Any) -> Any:
    return getattr(fn[0] if isinstance(fn, tuple) else fn, "__name__", None)


@pytest.mark.parametrize(
    ("fn", "dtype", "graph"), in_turn(PACKED, DTYPES, [capture, aten]), ids=names
)
def test_halves_of_one_tensor_become_one_op(fn: Any, dtype: torch.dtype, graph: Any) -> None:
    gm = graph(fn, x=hidden(dtype=dtype))
    _, report = run_passes(gm, build_passes(["cleanup", "fuse_act"]), verify=True)
    assert report.matched == 1 and not report.missed
    assert targets(gm) == ["gelu_tanh_mul.default" if "gelu" in fn.__name__ else "silu_mul.default"]


@pytest.mark.product
@pytest.mark.parametrize("graph", [capture, aten], ids=names)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", APART, ids=names)
def test_two_tensors_become_the_arguments(fn: Any, dtype: torch.dtype, graph: Any) -> None:
    gm = graph(fn, x=hidden(dtype=dtype, size=48, tokens=8))
    _, report = run_passes(gm, build_passes(["cleanup", "fuse_act"]), verify=True)
    assert report.matched == 1 and not report.missed
    assert targets(gm)[-1] in ("silu_mul.default", "gelu_tanh_mul.default")
    (call,) = (n for n in gm.graph.nodes if "_mul.default" in str(n.target))
    assert len(call.args) == 2


def test_other_passes_leave_two_tensors_alone() -> None:
    def quantized(x: Tensor, w: Tensor, s: Tensor) -> Any:
        first, second = w.view(2, 32, 32)
        gated = F.silu(ops.linear(x, first)) * ops.linear(x, second)
        return ops.quant_fp8_static(gated, s.view(1, 1))

    gm = capture(quantized, x=hidden(), w=torch.randn(64 * 32), s=torch.ones(1))
    passes = build_passes(["fuse_act", "fuse_gated_linear", "fuse_act_quant"])
    reasons = [
        site.reason for report in run_passes(gm, passes, verify=True) for site in report.missed
    ]
    assert reasons == [
        "gate and up are two linear layers",
        "gate and up are two tensors, for which there is no fused kernel",
    ]


def rows(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=1)
    return F.silu(gate).t() * up.t()


def twice(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    act = F.silu(gate)
    return act * up + act


def one_up(x: Tensor) -> Tensor:
    return F.silu(x[:, :24]) * x[:, 24:25]


def plus(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) + up


def twice_the_gate(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    gated = torch.sigmoid(gate)
    return gate * gated * up + gated


def transposed(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate.t()) * up.t()


def by_a_number(x: Tensor) -> Tensor:
    return F.silu(x) * x[0, 0]


def promoted(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up.double()


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss."""
    gate, up = gate.clamp(min=None, max=7.0), up.clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def clamped_pairs(x: Tensor) -> Tensor:
    return clamped(x[..., ::2], x[..., 1::2])


def clamped_halves(x: Tensor) -> Tensor:
    return clamped(*x.chunk(2, dim=-1))


def clamped_apart(x: Tensor) -> Tensor:
    return clamped(x + 1, x - 1)


def swapped_pairs(x: Tensor) -> Tensor:
    return clamped(x[..., 1::2], x[..., ::2])


def only_limits(x: Tensor) -> Tensor:
    gate, up = torch.clamp(x[:, ::2], max=2), torch.clamp(x[:, 1::2], -2, 2)
    return gate * gate.sigmoid() * up


CLAMPED: list[tuple[Callable[[Tensor], Tensor], tuple[Any, ...]]] = [
    (clamped_pairs, (None, 1.702, 7.0, 1.0, True)),
    (clamped_halves, (None, 1.702, 7.0, 1.0)),
    (clamped_apart, (..., 1.702, 7.0, 1.0)),
    (swapped_pairs, (..., 1.702, 7.0, 1.0)),
    (only_limits, (None, 1.0, 2, 0.0, True)),
]


@pytest.mark.parametrize(
    ("case", "dtype", "graph"), in_turn(CLAMPED, DTYPES, [capture, aten]), ids=names
)
def test_a_clamped_gate_becomes_one_op(
    case: tuple[Any, tuple[Any, ...]], dtype: torch.dtype, graph: Any
) -> None:
    fn, attributes = case
    gm = graph(fn, x=hidden(dtype=dtype, size=64))
    _, report = run_passes(gm, build_passes(["cleanup", "fuse_act"]), verify=True)
    assert report.matched == 1 and not report.missed
    (call,) = (node for node in gm.graph.nodes if "silu_mul" in str(node.target))
    given = call.args[1:]
    assert given[1:] == attributes[1:] and (given[0] is None) == (attributes[0] is None)
    assert "sigmoid.default" not in targets(gm) and "clamp.default" not in targets(gm)


@pytest.mark.parametrize(
    "change",
    [put(2, 1.0), put(3, 5.0), put(3, None), put(4, 0.0), put(5, False), apply(0, "roll", 1, -1)],
)
def test_wrong_attributes_of_a_gate_are_caught(change: Change) -> None:
    (rule,) = build_passes(["fuse_act"])
    for dtype in (torch.float32, torch.bfloat16):
        gm = aten(clamped_pairs, x=hidden(dtype=dtype, size=64, tokens=64))
        spoiled = Spoiled(rule, Mutation("", "fuse_act", clamped_pairs, inside=change))
        with pytest.raises(VerificationError):
            run_passes(gm, [spoiled], verify=True)


def two_limits(x: Tensor) -> Tensor:
    gate = x[:, ::2].clamp(max=7.0)
    return gate * torch.sigmoid(gate * 1.702) * x[:, 1::2].clamp(-6.0, 7.0)


def gate_from_below(x: Tensor) -> Tensor:
    gate = x[:, ::2].clamp(-7.0, 7.0)
    return gate * torch.sigmoid(gate * 1.702) * x[:, 1::2].clamp(-7.0, 7.0)


def cast_on_the_way(x: Tensor) -> Tensor:
    gate = x[:, ::2].clamp(max=7.0)
    glu = (gate * torch.sigmoid(gate * 1.702)).bfloat16()
    return glu * x[:, 1::2].clamp(-7.0, 7.0)


def double_gate(x: Tensor) -> Tensor:
    return clamped_pairs(x.double())


def clamped_then_added(x: Tensor) -> Tensor:
    gate = x[:, ::2].clamp(max=7.0)
    return gate * torch.sigmoid(gate * 1.702) + x[:, 1::2]


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (two_limits, "the gate is clamped to (None, 7.0), up to (-6.0, 7.0): no limit of both"),
        (
            gate_from_below,
            "the gate is clamped to (-7.0, 7.0), up to (-7.0, 7.0): no limit of both",
        ),
        (cast_on_the_way, "the activation feeds _to_copy, not a product"),
        (double_gate, "slice is torch.float64, the op computes in float32"),
        (clamped_then_added, "the activation feeds add, not a product"),
    ],
    ids=names,
)
def test_gates_that_are_near_are_left_and_explained(fn: Any, reason: str) -> None:
    gm = aten(fn, x=hidden(size=48))
    before = targets(gm)
    (report,) = run_passes(gm, build_passes(["fuse_act"]), verify=True)
    assert [site.reason for site in report.missed] == [reason]
    assert targets(gm) == before


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (twice, "the activation has 2 users, not one product"),
        (one_up, "gate and up differ: torch.float32[7, 24], torch.float32[7, 1]"),
        (twice_the_gate, "sigmoid has 2 users, expected one"),
        (transposed, "mul has strides [1, 24], the op's result is dense"),
        (by_a_number, "gate and up differ: torch.float32[7, 48], torch.float32[]"),
        (promoted, "the product is torch.float64, the gate torch.float32"),
    ],
    ids=names,
)
def test_what_cannot_be_fused_is_left_and_explained(
    fn: Callable[[Tensor], Tensor], reason: str
) -> None:
    gm = aten(fn, x=hidden(size=48))
    before = targets(gm)
    (report,) = run_passes(gm, build_passes(["fuse_act"]), verify=True)
    assert [site.reason for site in report.missed] == [reason]
    assert targets(gm) == before


@pytest.mark.parametrize("fn", [rows, plus], ids=names)
def test_an_activation_that_gates_nothing_is_no_site(fn: Callable[[Tensor], Tensor]) -> None:
    (report,) = run_passes(aten(fn, x=hidden(size=48)), build_passes(["fuse_act"]))
    assert report.sites == []


def test_exact_gelu_and_other_sigmoids_are_no_sites() -> None:
    def other(x: Tensor) -> Any:
        gate, up = x.chunk(2, -1)
        return F.gelu(gate) * up, gate * torch.sigmoid(1.7 * gate) * up

    (report,) = run_passes(aten(other, x=hidden()), build_passes(["fuse_act"]))
    assert report.sites == []


def shared(x: Tensor) -> Tensor:
    act = F.silu(x)
    return act * act


def two_casts(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return (gate.float() * gate.float().sigmoid() * up.float()).to(x.dtype)


@pytest.mark.parametrize(
    ("fn", "dtype", "graph"), in_turn([shared, two_casts], DTYPES, [capture, aten]), ids=names
)
def test_verification_takes_values_that_a_spelling_shares(
    fn: Any, dtype: torch.dtype, graph: Any
) -> None:
    gm = graph(fn, x=hidden(dtype=dtype))
    (report,) = run_passes(gm, build_passes(["fuse_act"]), verify=True)
    assert report.matched == 1 and not report.missed


@pytest.mark.parametrize(
    "layout", [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[:1].expand(7, -1)]
)
def test_a_gate_of_other_strides_gives_the_strides_of_eager(layout: Any) -> None:
    def gated(x: Tensor, y: Tensor) -> Tensor:
        return y * F.silu(layout(x))

    x = hidden(size=7)
    y = torch.randn(layout(x).shape)
    gm = aten(gated, x=x, y=y)
    (report,) = run_passes(gm, build_passes(["fuse_act"]), verify=True)
    assert report.matched == 1
    assert gm(x, y).stride() == gated(x, y).stride()
    torch.testing.assert_close(gm(x, y), gated(x, y))
