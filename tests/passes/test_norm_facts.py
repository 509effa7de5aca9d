"""The numbers and dimensions of a norm's spelling are those of the op that replaces it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.ops.norm.norm import RMS_NORM
from fusewright.passes import CANONICALIZE, run_passes
from fusewright.passes.canonicalize import other_operand, with_number
from fusewright.passes.sites import Miss
from tests.passes.graphs import aten, capture, hidden, targets

BF16 = torch.bfloat16


def norm(
    mean: Callable[[Tensor], Tensor], eps: float = 1e-6, offset: float = 0.0
) -> Callable[[Tensor, Tensor], Tensor]:
    """RMSNorm over the ``mean`` of squares, times ``offset`` + the weight."""

    def of(x: Tensor, w: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(mean(wide.pow(2)) + eps)
        return (normed * (w.float() + offset if offset else w.float())).to(x.dtype)

    return of


def over(*dims: int) -> Callable[[Tensor], Tensor]:
    return lambda squares: squares.mean(list(dims), keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("offset", [0.5, 1.0, 2.0, -1.0])
def test_the_weight_offset_is_the_number_that_is_added(offset: float, dtype: torch.dtype) -> None:
    gm = aten(norm(over(-1), 3e-5, offset), x=hidden(dtype=dtype), w=torch.randn(32).to(dtype))
    (report,) = run_passes(gm, CANONICALIZE[:1], verify=True)
    assert report.matched == 1
    (call,) = gm.graph.find_nodes(op="call_function", target=RMS_NORM.overload())
    assert call.args[2:] == (pytest.approx(3e-5), offset)


SHAPES = {2: (7, 32), 3: (2, 32, 32), 4: (2, 3, 32, 32)}
"""The last two sizes are equal where they can be: then a wrong dimension changes no shape."""


@pytest.mark.parametrize("num_dims", SHAPES)
def test_only_a_mean_over_the_last_dimension_is_a_norm(num_dims: int) -> None:
    x, w = torch.randn(SHAPES[num_dims]), torch.randn(32)
    one = [(dim,) for dim in range(-num_dims, num_dims)]
    several = [(0, -1), (num_dims - 2, num_dims - 1), tuple(range(num_dims))]
    for dims in [*one, *several]:
        gm = aten(norm(over(*dims)), x=x, w=w)
        before = targets(gm)
        (report,) = run_passes(gm, CANONICALIZE[:1], verify=True)
        if dims in [(-1,), (num_dims - 1,)]:
            assert report.matched == 1, dims
            continue
        (miss,) = report.missed
        expected = f"the mean is over dimensions {[*dims]}, expected the last alone, kept"
        assert (miss.reason, targets(gm)) == (expected, before)


WRONG_MEANS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "size over sum": (
        lambda squares: 32 / squares.sum(-1, keepdim=True),
        "the squares are summed and not divided by 32",
    ),
    "sum over another size": (
        lambda squares: squares.sum(-1, keepdim=True) / 31,
        "the squares are summed and not divided by 32",
    ),
    "sum times size": (
        lambda squares: squares.sum(-1, keepdim=True) * 32,
        "the squares are summed and not divided by 32",
    ),
    "floor of the quotient": (
        lambda squares: torch.div(squares.sum(-1, keepdim=True), 32, rounding_mode="floor"),
        "the squares are summed and not divided by 32",
    ),
    "scaled eps": (
        lambda squares: torch.add(squares.mean(-1, keepdim=True), 1e-6, alpha=2),
        "the mean feeds add, not a sum with a number, eps",
    ),
}


@pytest.mark.parametrize("spelling", WRONG_MEANS)
def test_a_mean_that_is_none_is_a_miss(spelling: str) -> None:
    mean, reason = WRONG_MEANS[spelling]
    gm = aten(norm(mean), x=hidden(), w=torch.randn(32))
    before = targets(gm)
    (report,) = run_passes(gm, CANONICALIZE[:1], verify=True)
    assert [miss.reason.replace("add_1", "add") for miss in report.missed] == [reason]
    assert targets(gm) == before


OF_A_NUMBER: list[tuple[Callable[[Tensor], Any], float | None]] = [
    (lambda x: x + 3, 3.0),
    (lambda x: 3 + x, 3.0),
    (lambda x: x * 3, 3.0),
    (lambda x: 3 * x, 3.0),
    (lambda x: x / 3, 3.0),
    (lambda x: 3 / x, None),
    (lambda x: x**3, 3.0),
    (lambda x: 3**x, None),
    (lambda x: x - 3, 3.0),
    (lambda x: 3 - x, None),
    (lambda x: torch.sub(3, x), None),
    (lambda x: torch.div(3, x), None),
    (lambda x: torch.pow(3, x), None),
    (lambda x: torch.add(x, 3, alpha=2), None),
    (lambda x: torch.div(x, 3, rounding_mode="trunc"), None),
    (lambda x: torch.add(input=x, other=3), 3.0),
    (lambda x: torch.pow(x, exponent=3), 3.0),
    (lambda x: x + x, None),
]


@pytest.mark.parametrize("index", range(len(OF_A_NUMBER)))
def test_the_number_of_an_operation_is_its_second_operand_unless_order_is_free(index: int) -> None:
    spelled, number = OF_A_NUMBER[index]
    gm = capture(lambda x: spelled(x), x=hidden())
    operation = [node for node in gm.graph.nodes if node.op.startswith("call_")][-1]
    operand, read = with_number(operation)
    assert read == number
    assert number is None or operand.op == "placeholder"


def test_a_scaled_sum_has_no_other_operand() -> None:
    gm = capture(lambda x, y: torch.add(x, y, alpha=2) + torch.add(x, y), x=hidden(), y=hidden())
    scaled, plain = gm.graph.find_nodes(op="call_function", target=torch.add)
    assert other_operand(plain, plain.args[0]) is plain.args[1]
    assert other_operand(plain, plain.args[1]) is plain.args[0]
    for node, known in ((scaled, scaled.args[0]), (plain, scaled)):
        with pytest.raises(Miss, match="is not of two operands"):
            other_operand(node, known)
