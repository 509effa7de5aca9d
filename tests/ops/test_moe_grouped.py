"""csrc's grouped GEMM against float32: routings that fill no tile, or one expert alone; sizes
around those of tiles; the layouts that the two layers of a mixture need.

An index that left a row out would go unseen if memory had the right values from a call before, so
what the allocator hands out for a result is full of NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright.ops import BY_NAME
from fusewright.ops.core.desc import Draw
from fusewright.ops.experts.fused_moe import moe_args
from tests.ops.csrc import csrc_kernels

# Rows of x are of tokens or of places, rows of y of places or of slots.
LAYOUTS = {"up": (False, True), "down": (True, False), "as expert_linear": (False, False)}


@dataclass(frozen=True)
class Sizes:
    experts: int
    in_features: int
    out_features: int
    top_k: int
    tokens: int


FP8 = torch.float8_e4m3fn
SMALL = Sizes(8, 1024, 1024, 2, 700)
ODD = Sizes(5, 192, 320, 2, 333)


@pytest.fixture
def grouped() -> Any:
    torch.manual_seed(0)
    return csrc_kernels().moe_grouped_linear


def draw_edges(experts: int, slots: int) -> Tensor:
    """Numbers of slots around those of a tile's rows, and none; the last expert has the rest."""
    counts = [128, 0, 129, 64, 65, 1, 127, 0, 63]
    sizes = torch.tensor([counts[e % len(counts)] for e in range(experts)], device="cuda")
    ids = torch.arange(experts, device="cuda").repeat_interleave(sizes)[:slots]
    ids = F.pad(ids, (0, slots - ids.numel()), value=experts - 1)
    return ids[torch.randperm(slots, device="cuda")]


def draw_power(experts: int, slots: int) -> Tensor:
    return torch.multinomial(1.0 / torch.arange(1, experts + 1, device="cuda"), slots, True)


def draw_even(experts: int, slots: int) -> Tensor:
    return torch.randint(experts, (slots,), device="cuda") // 2 * 2


ROUTINGS: dict[str, Callable[[int, int], Tensor]] = {
    "uniform": lambda experts, slots: torch.randint(experts, (slots,), device="cuda"),
    "first": lambda experts, slots: torch.zeros(slots, dtype=torch.long, device="cuda"),
    "last": lambda experts, slots: torch.full((slots,), experts - 1, device="cuda"),
    "even": draw_even,
    "edges": draw_edges,
    "power": draw_power,
}


@dataclass
class Drawn:
    """The arguments of a call, and its result in float32."""

    args: tuple[Any, ...]
    expected: Tensor


def quantized(values: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes to FP8 with a scale for each block of so many rows and columns.  Returns the FP8
    numbers, the scales, and the numbers that both stand for."""
    *outer, n, k = values.shape
    blocks = values.reshape(*outer, n // rows, rows, k // columns, columns)
    scales = blocks.abs().amax((-3, -1), keepdim=True) / 448
    rounded = (blocks / scales).to(FP8)
    meant = (rounded.float() * scales).reshape(values.shape)
    return rounded.reshape(values.shape), scales.squeeze((-3, -1)), meant


def draw(
    sizes: Sizes, routing: str, layout: str, activation: str, padding: int = 0, fp8: str = ""
) -> Drawn:
    slots, x_sorted, y_sorted = sizes.tokens * sizes.top_k, *LAYOUTS[layout]
    ids = ROUTINGS[routing](sizes.experts, slots)
    order = ids.argsort(stable=True)
    ends = torch.bincount(ids, minlength=sizes.experts).cumsum(0)
    offsets = F.pad(ends, (1, 0)).to(torch.int32)
    a_row = 1 if x_sorted else sizes.top_k
    k, rows = sizes.in_features, sizes.out_features * (2 if activation else 1)
    x = torch.randn(slots // a_row, k + padding, device="cuda").bfloat16()[:, :k]
    weight = torch.randn(sizes.experts, rows, k, device="cuda").mul_(k**-0.5).bfloat16()
    meant, scales = (x.float(), weight.float()), []
    if fp8:
        # Scales of the weight differ by up to a factor of two, so a wrong one shows.
        columns, shared = (128, 128) if fp8 == "block" else (k, 1)
        spread = torch.rand(sizes.experts, rows // shared, 1, k // columns, 1, device="cuda").exp2()
        weight = (weight.view(*spread.shape[:2], shared, k // columns, columns) * spread).flatten(3)
        weight, weight_scale, of_weight = quantized(weight.flatten(1, 2), shared, columns)
        x, x_scale, of_x = quantized(x.float(), 1, columns)
        # Scales of blocks are column-major, as our kernels make them.
        scales, meant = [x_scale.t().contiguous().t(), weight_scale], (of_x, of_weight)
    places = meant[0] if x_sorted else meant[0][order // a_row]
    by_place = multiply_in_float32(places, meant[1], offsets.tolist(), activation)
    expected = by_place if y_sorted else torch.empty_like(by_place).index_copy_(0, order, by_place)
    given = (a_row, activation, x_sorted, y_sorted, *scales)
    return Drawn((x, weight, order.to(torch.int32), offsets, *given), expected)


def multiply_in_float32(x: Tensor, weight: Tensor, ends: list[int], activation: str) -> Tensor:
    parts = []
    for expert in range(len(weight)):
        y = x[ends[expert] : ends[expert + 1]] @ weight[expert].T
        if activation:
            gate, up = y.bfloat16().float().chunk(2, -1)
            y = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
        parts.append(y)
    return torch.cat(parts)


def check_call(grouped: Any, drawn: Drawn) -> None:
    torch.full_like(drawn.expected, float("nan"), dtype=torch.bfloat16)
    y = grouped(*drawn.args)
    distance = (y.float() - drawn.expected).norm() / drawn.expected.norm()
    assert distance < 6e-3
    torch.testing.assert_close(y.float(), drawn.expected, atol=6e-2, rtol=6e-2)
    for _ in range(4):
        torch.full_like(drawn.expected, float("nan"), dtype=torch.bfloat16)
        assert torch.equal(y, grouped(*drawn.args))


@pytest.fixture(autouse=True)
def exact_references() -> Any:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.gpu
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("layout", "activation"), [("up", "silu"), ("down", ""), ("as expert_linear", "gelu_tanh")]
)
def test_any_routing(grouped: Any, routing: str, layout: str, activation: str) -> None:
    check_call(grouped, draw(SMALL, routing, layout, activation))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(1, 64, 64, 1, 1),
        Sizes(1, 64, 64, 1, 300),
        ODD,
        Sizes(1024, 128, 192, 4, 700),
        Sizes(128, 2048, 768, 8, 600),
        Sizes(8, 4096, 1024, 2, 600),
    ],
    ids=str,
)
@pytest.mark.parametrize(("layout", "activation"), [("up", "silu"), ("down", "")])
def test_any_sizes(grouped: Any, sizes: Sizes, layout: str, activation: str) -> None:
    check_call(grouped, draw(sizes, "uniform", layout, activation))


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", ["token", "block"])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("layout", "activation"), [("up", "silu"), ("down", "")])
@pytest.mark.parametrize("experts", [8, 32], ids=["wide tile", "tile"])
def test_any_routing_of_fp8(
    grouped: Any, routing: str, layout: str, activation: str, experts: int, fp8: str
) -> None:
    sizes = replace(SMALL, experts=experts)
    check_call(grouped, draw(sizes, routing, layout, activation, fp8=fp8))


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", ["token", "block"])
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(1, 128, 128, 1, 1),
        Sizes(1, 128, 128, 1, 300),
        Sizes(5, 384, 640, 2, 333),
        Sizes(1024, 128, 256, 4, 700),
        Sizes(128, 2048, 768, 8, 600),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("layout", "activation"), [("up", "silu"), ("down", ""), ("as expert_linear", "gelu_tanh")]
)
def test_any_sizes_of_fp8(
    grouped: Any, sizes: Sizes, layout: str, activation: str, fp8: str
) -> None:
    check_call(grouped, draw(sizes, "uniform", layout, activation, fp8=fp8))


@pytest.mark.gpu
def test_outputs_of_rows_may_be_half_a_tile(grouped: Any) -> None:
    for experts, layout in product((5, 32), (("down", ""), ("up", "silu"))):
        for outputs in (192, 320):
            sizes = Sizes(experts, 128, outputs, 2, 333)
            check_call(grouped, draw(sizes, "uniform", *layout, fp8="token"))


@pytest.mark.gpu
def test_rows_of_x_may_lie_apart(grouped: Any) -> None:
    check_call(grouped, draw(ODD, "uniform", "as expert_linear", "", padding=64))
    check_call(grouped, draw(ODD, "uniform", "down", "", padding=8))


@pytest.mark.gpu
def test_one_graph_serves_any_routing(grouped: Any) -> None:
    first, other = (draw(SMALL, routing, "up", "silu") for routing in ("edges", "last"))
    held = [t.clone() if isinstance(t, Tensor) else t for t in first.args]
    grouped(*held)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = grouped(*held)
    for drawn in (other, first):
        for to, value in zip(held, drawn.args, strict=True):
            if isinstance(to, Tensor):
                to.copy_(value)
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, grouped(*drawn.args))
        torch.testing.assert_close(y.float(), drawn.expected, atol=6e-2, rtol=6e-2)


@pytest.mark.gpu
def test_no_slots(grouped: Any) -> None:
    args = draw(ODD, "uniform", "up", "silu").args
    assert grouped(args[0][:0], args[1], args[2][:0], args[3] * 0, *args[4:]).shape == (0, 320)


REFUSED: dict[str, tuple[int, Callable[[Any], Any], str]] = {
    "float32 rows": (0, Tensor.float, "x has shape"),
    "too few columns": (0, lambda x: x[:, :128], "in_features"),
    "rows on the host": (0, Tensor.cpu, "x is not on a CUDA device"),
    "one expert": (1, lambda weight: weight[0], "weight has shape"),
    "float16 weights": (1, Tensor.half, "weight has shape"),
    "half a line of outputs": (1, lambda w: w[:, :192].contiguous(), "multiples of 64"),
    "int64 order": (2, Tensor.long, "order has shape"),
    "a slot too few": (2, lambda order: order[:-1], "slots a row"),
    "an offset too few": (3, lambda offsets: offsets[:-1], "offsets has shape"),
    "a slot a row too many": (4, lambda _: 3, "3 slots a row"),
    "an unknown activation": (5, lambda _: "relu", "activation is 'relu'"),
    "places of many slots": (6, lambda _: True, "with x_sorted"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_argument(grouped: Any, name: str) -> None:
    index, change, expected = REFUSED[name]
    args = [*draw(ODD, "uniform", "up", "silu").args]
    args[index] = change(args[index])
    with pytest.raises((RuntimeError, NotImplementedError), match=expected):
        grouped(*args)


REFUSED_FP8: dict[str, tuple[int, Callable[[Any], Any], str]] = {
    "scales of the weight alone": (8, lambda _: None, "expected both or none"),
    "a scale a row too few": (8, lambda scale: scale[:, :1], "x_scale has shape"),
    "a row of scales too few": (9, lambda scale: scale[:, 1:].contiguous(), "has weight_scale"),
    "scales of float16": (9, Tensor.half, "weight_scale is not of float32"),
    "weights of bfloat16": (1, Tensor.bfloat16, "weight has shape"),
    "rows of bfloat16": (0, Tensor.bfloat16, "x has shape"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", REFUSED_FP8)
def test_refusals_name_the_scale(grouped: Any, name: str) -> None:
    index, change, expected = REFUSED_FP8[name]
    sizes = Sizes(5, 256, 256, 2, 333)
    args = [*draw(sizes, "uniform", "up", "silu", fp8="block").args]
    args[index] = change(args[index])
    with pytest.raises(RuntimeError, match=expected):
        grouped(*args)


def described(experts: int, tokens: int, inner: int, fp8: str = "") -> list[Any]:
    """The arguments of a mixture of two experts a token, as tensors without data."""
    draw = Draw(torch.bfloat16, torch.device("cpu"), torch.Generator())
    args = moe_args(draw, 16, experts, 2, 256, inner, fp8=fp8)
    on_meta = [t.to("meta") if isinstance(t, Tensor) else t for t in args]
    on_meta[0] = torch.empty(tokens, 256, dtype=torch.bfloat16, device="meta")
    return on_meta


def kernels_of(args: list[Any]) -> tuple[str, ...]:
    runs = BY_NAME["fused_moe"].implementation("cuda").runs
    assert runs is not None
    return runs(*args)


@pytest.mark.parametrize(
    ("experts", "tokens", "times"),
    [
        (8, 9, 0),
        (8, 64, 0),
        (8, 65, 2),
        (8, 512, 2),
        (32, 65, 0),
        (32, 256, 0),
        (32, 257, 2),
        (256, 4096, 2),
    ],
)
def test_mixtures_of_many_rows_an_expert_run_it(experts: int, tokens: int, times: int) -> None:
    """And some tokens run csrc's router before Triton's layers."""
    on_meta = described(experts, tokens, 64)
    names = kernels_of(on_meta)
    assert names.count("moe_grouped_linear") == times
    assert names.count("_expert_linear_kernel") == 2 - times
    assert ("moe_route" in names) is (tokens <= 64)
    assert ("cuBLAS" in names) is ("_route_kernel" in names) is (tokens > 64)
    on_meta[3] = on_meta[3][:, :-32]
    on_meta[4] = on_meta[4][:, :, :-16]
    assert "moe_grouped_linear" not in kernels_of(on_meta), "48 features are no whole lines"


@pytest.mark.parametrize("fp8", ["token", "block"])
@pytest.mark.parametrize(
    ("experts", "tokens", "times"),
    [(32, 128, 0), (32, 129, 2), (32, 4096, 2), (8, 32, 0), (8, 33, 2), (8, 64, 2)],
)
def test_mixtures_of_fp8_run_it_from_fewer_rows_an_expert_on(
    experts: int, tokens: int, times: int, fp8: str
) -> None:
    """Whoever chooses the experts."""
    names = kernels_of(described(experts, tokens, 128, fp8))
    assert names.count("moe_grouped_linear") == times
    assert names.count("_quant_kernel") == 2, "both layers' inputs are quantized"
    assert ("moe_route" in names) is (tokens <= 64)


def test_mixtures_with_static_scales_do_not_run_it() -> None:
    assert "moe_grouped_linear" not in kernels_of(described(4, 4096, 128, "tensor"))
