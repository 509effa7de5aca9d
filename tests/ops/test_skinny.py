"""The streaming kernels beside the plain one: FP8 with scales, gated activations, two
linear layers with the add and the norm between them.

Each against float64 or against the plain kernel, which ``test_linear.py`` compares with float64.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright.ops import BY_NAME
from fusewright.ops.core.float8 import E4M3
from fusewright.ops.norm.norm import RMS_NORM
from tests.ops.csrc import csrc_kernels
from tests.ops.replays import check_replays

ROWS = (1, 2, 3, 8, 9, 16, 17, 32)


@pytest.fixture
def kernels() -> Any:
    return csrc_kernels()


def draw_fp8(rows: int, n: int, k: int, scheme: str) -> tuple[Any, ...]:
    """x, a slice of wider rows, weight, no bias, and the scales: as ``linear`` takes them."""

    def values(count: int, width: int) -> Tensor:
        return (100 * torch.randn(count, width, device="cuda")).clamp(-448, 448).to(E4M3)

    def scales(count: int, columns: int) -> Tensor:
        return 0.01 * (0.5 + torch.rand(count, columns, device="cuda"))

    groups, blocks = k // 128, -(-n // 128)
    x_scale, weight_scale = {
        "tensor": (scales(1, 1), scales(1, 1)),
        "token": (scales(rows, 1), scales(n, 1)),
        "block": (scales(groups, rows).t(), scales(blocks, groups)),
    }[scheme]
    return values(rows, k + 48)[:, 16 : k + 16], values(n, k), None, x_scale, weight_scale


def dequantized(q: Tensor, scale: Tensor) -> Tensor:
    for dim in (0, 1):
        if 1 < scale.shape[dim] < q.shape[dim]:
            scale = scale.repeat_interleave(128, dim).narrow(dim, 0, q.shape[dim])
    return q.double() * scale.double()


def gated_linear(x: Tensor, weight: Tensor, activation: str, bias: Any = None) -> Tensor:
    rest = (None, None, None, activation)
    return torch.ops.fw_cuda.skinny_linear(x, weight, bias, *rest)  # type: ignore[no-any-return]


def draw_bf16(rows: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, k + 24, device="cuda").bfloat16()[:, 8 : k + 8]
    return x, (torch.randn(n, k, device="cuda") * k**-0.5).bfloat16()


FP8_SHAPES = [(1, 128), (37, 128), (130, 640), (333, 512), (4096, 4096), (1000, 7168)]
FP8_SHAPES += [(6144, 4096), (20000, 1024), (4096, 14336)]
FP8_SHAPES += [(300, 16384), (70, 32768)]  # four and eight blocks share a tile


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["tensor", "token", "block"])
@pytest.mark.parametrize(("n", "k"), FP8_SHAPES)
def test_fp8_is_near_float64(n: int, k: int, scheme: str, kernels: Any, fw_seed: int) -> None:
    if scheme == "block" and k % 512:
        pytest.skip("block scales are copied for 512 columns")
    torch.manual_seed(fw_seed)
    dtypes = itertools.cycle([torch.bfloat16, torch.float16, torch.float32])
    for rows, dtype in zip(ROWS, dtypes, strict=False):
        x, weight, _, x_scale, weight_scale = draw_fp8(rows, n, k, scheme)
        bias = torch.randn(n, device="cuda").to(dtype) if rows % 2 else None
        exact = dequantized(x, x_scale) @ dequantized(weight, weight_scale).T
        exact = exact if bias is None else exact + bias.double()
        got = kernels.skinny_linear(x, weight, bias, x_scale, weight_scale, dtype)
        assert got.dtype == dtype and got.shape == (rows, n)
        # Half a unit in the last place, of the least number of a binade; sums add to it.
        bound = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}[dtype] + 1e-5
        error = float(((got.double() - exact).abs().max() / exact.abs().max()).nan_to_num(9.0))
        assert error <= bound, f"{rows} rows, {dtype}: {error}, --fw-seed={fw_seed}"
        again = kernels.skinny_linear(x, weight, bias, x_scale, weight_scale, dtype)
        assert torch.equal(got, again), f"{rows} rows: another result when repeated"


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["tensor", "token", "block"])
@pytest.mark.parametrize(("n", "k"), FP8_SHAPES)
def test_fp8_weights_by_bfloat16_are_near_float64(
    n: int, k: int, scheme: str, kernels: Any, fw_seed: int
) -> None:
    if scheme == "block" and k % 512:
        pytest.skip("block scales are copied for 512 columns")
    torch.manual_seed(fw_seed)
    for rows in range(1, 9):
        _, weight, _, _, weight_scale = draw_fp8(rows, n, k, scheme)
        x, _ = draw_bf16(rows, 1, k)
        bias = torch.randn(n, device="cuda").bfloat16() if rows % 2 else None
        exact = x.double() @ dequantized(weight, weight_scale).T
        exact = exact if bias is None else exact + bias.double()
        call = (x, weight, bias, None, weight_scale, torch.bfloat16)
        got = kernels.skinny_linear(*call)
        error = float(((got.double() - exact).abs().max() / exact.abs().max()).nan_to_num(9.0))
        assert error <= 2.0**-8 + 1e-5, f"{rows} rows: {error}, --fw-seed={fw_seed}"
        assert torch.equal(got, kernels.skinny_linear(*call)), f"{rows} rows: another result"


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("n", "k"), [(1, 64), (37, 192), (1000, 960), (14336, 4096), (8192, 2048), (8200, 512)]
)
def test_gate_and_up_are_rounded_as_the_plain_kernel_rounds_them(
    n: int, k: int, activation: str, kernels: Any, fw_seed: int
) -> None:
    torch.manual_seed(fw_seed)
    for rows in ROWS:
        x, weight = draw_bf16(rows, 2 * n, k)
        bias = torch.randn(2 * n, device="cuda").bfloat16() if rows % 2 else None
        gate, up = kernels.skinny_linear(x, weight, bias).float().chunk(2, dim=1)
        acted = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        expected = (acted * up).bfloat16().float()
        got = gated_linear(x, weight, activation, bias).float()
        # One unit in the last place: the last bits of exp and tanh may turn a rounding.
        off = (got - expected).abs() > expected.abs() * 2.0**-7 + 2e-6
        assert not off.any(), f"{rows} rows: {int(off.sum())} differ, --fw-seed={fw_seed}"


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("n", "k"), [(1, 128), (37, 128), (1000, 640), (14336, 4096), (8192, 2048), (12288, 4096)]
)
def test_fp8_gates_are_quantized_as_the_activations_kernel_does(
    n: int, k: int, activation: str, kernels: Any, fw_seed: int
) -> None:
    torch.manual_seed(fw_seed)
    name = "silu" if activation == "silu" else "gelu_tanh"
    quantize = BY_NAME[f"{name}_mul_quant_static"].overload("triton")
    for rows, scheme in itertools.product(ROWS, ("tensor", "token")):
        operands = draw_fp8(rows, 2 * n, k, scheme)
        gate_up = kernels.skinny_linear(*operands, torch.bfloat16)
        out_scale = gate_up.abs().amax().float().square().view(1, 1) / 448 + 1e-3
        expected = quantize(gate_up, out_scale).float()
        got = kernels.skinny_linear(*operands, torch.bfloat16, activation, out_scale).float()
        # To the next FP8 value, and seldom: the last bits of exp and tanh may turn a rounding.
        off = (got - expected).abs() > expected.abs() * 2.0**-3 + 2.0**-9
        assert not off.any(), f"{rows} rows, {scheme}: {int(off.sum())}, --fw-seed={fw_seed}"
        assert (got != expected).float().mean() <= 1e-3 + 1 / got.numel()


BETWEEN = [(64, 64, 2), (960, 1088, 1001), (128, 8192, 66), (256, 20480, 128), (2048, 2048, 16384)]
BETWEEN += [(8192, 2048, 3072), (4096, 4096, 28672), (14336, 4096, 6144), (12288, 4096, 6144)]
BETWEEN += [(4096, 2048, 5120)]


@pytest.mark.gpu
@pytest.mark.parametrize(("k", "hidden", "n"), BETWEEN)
def test_two_linears_with_the_add_and_the_norm_between_them(
    k: int, hidden: int, n: int, kernels: Any, fw_seed: int
) -> None:
    """The sum to the bit; every output within its roundings of the linear of the weighted sums;
    rows no further from float64 than by the kernels one by one, but for one rounding of what is
    summed, of which an outlier's moves the whole row."""
    torch.manual_seed(fw_seed)
    _, first = draw_bf16(1, hidden, k)
    _, second = draw_bf16(1, n, hidden)
    norm_weight = torch.randn(hidden, device="cuda").bfloat16()
    for rows in range(1, 17):
        x, _ = draw_bf16(rows, 1, k)
        residual = torch.randn(rows, hidden, device="cuda").bfloat16()
        residual[torch.rand(rows, hidden, device="cuda") < 1e-3] *= 50
        x[1:2] *= 2.0**-20  # a token so small that eps decides
        residual[1:2] *= 2.0**-20
        bias = torch.randn(n, device="cuda").bfloat16() if rows % 2 else None
        first_bias = torch.randn(hidden, device="cuda").bfloat16() if rows % 3 == 1 else None
        acts = (None, "silu", "gelu_tanh") if n % 2 == 0 else (None,)
        for activation in acts:
            args = (x, first, first_bias, residual, norm_weight, 1e-5, second, bias, activation)
            y, total = kernels.skinny_linear_add_norm_linear(*args)
            where = f"{rows} rows, {activation}, --fw-seed={fw_seed}"
            assert torch.equal(total, kernels.skinny_linear(x, first, first_bias) + residual), where
            scale = torch.rsqrt(total.double().square().mean(-1, keepdim=True) + 1e-5)
            weighted = (total * norm_weight).double() * scale
            exact, bound = linear_in_float64(weighted, second, bias, activation)
            assert ((y - exact).abs() <= bound).all(), where
            if n >= 1000:  # few outputs have no usual error
                summands = total.double() * scale * norm_weight.double()
                exact, _ = linear_in_float64(summands, second, bias, activation)
                moved = moved_by_rounding(summands, second, bias, activation)
                normed = RMS_NORM.reference(total, norm_weight, 1e-5)
                apart = kernels.skinny_linear(normed, second, bias)
                if activation:
                    apart = gated_linear(normed, second, activation, bias)
                error, usual, allowed = (t.norm(dim=1) for t in (y - exact, apart - exact, moved))
                assert (error <= 1.3 * usual + allowed).all(), where
            again = kernels.skinny_linear_add_norm_linear(*args)
            assert all(map(torch.equal, again, (y, total))), f"{where}: another result"


def linear_in_float64(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> tuple[Tensor, Tensor]:
    """The linear of ``x``, with the bias or the activation; and how far roundings to bfloat16 of
    the sums and of the result, and float32 sums, may move each output."""
    y, ulp = x @ weight.double().T, 2.0**-8
    sums = 2.0**-14 * (x.square() @ weight.double().T.square()).sqrt()
    y = y if bias is None else y + bias.double()
    if activation is None:
        return y, ulp * y.abs() + sums
    (gate, up), (by_gate, by_up) = y.chunk(2, dim=1), (ulp * y.abs() + sums).chunk(2, dim=1)
    result = acted(gate, activation) * up
    bound = STEEPEST * by_gate * (up.abs() + by_up) + acted(gate, activation).abs() * by_up
    return result, bound + ulp * (result.abs() + bound)


def moved_by_rounding(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """How far a rounding of each summand to bfloat16, half a unit in the last place, moves the
    linear of ``x``, as independent errors add."""
    weight = weight.double()
    moved = 2.0**-8 * (x.square() @ weight.T.square()).sqrt()
    if activation is None:
        return moved
    gate, up = (x @ weight.T + (0.0 if bias is None else bias.double())).chunk(2, dim=1)
    by_gate, by_up = moved.chunk(2, dim=1)
    return STEEPEST * by_gate * up.abs() + acted(gate, activation).abs() * by_up


STEEPEST = 1.13
"""Slope of SiLU and of GELU, at most."""


def acted(gate: Tensor, activation: str) -> Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "scheme"), [(1, ""), (7, ""), (16, ""), (1, "token"), (2, "block"), (8, "block")]
)
def test_the_halves_of_the_joined_kernels_make_its_bits(
    rows: int, scheme: str, kernels: Any
) -> None:
    """Experts lie between them; the layers are the same."""
    x, weight, residual = (
        torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        for shape in ((rows, 2048), (2048, 2048), (rows, 2048))
    )
    norm, bias = (torch.randn(2048, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    scale = None
    if scheme:
        _, weight, _, _, scale = draw_fp8(rows, 2048, 2048, scheme)
    then = weight.view(torch.uint8).flip(0).contiguous().view(weight.dtype)
    behind = (then, bias, None if scheme == "block" else "silu")
    head = (x, weight, bias, residual, norm)
    joined = kernels.skinny_linear_add_norm_linear(*head, 1e-6, *behind, scale, scale)
    weighted, total, squares = kernels.skinny_linear_add(*head, scale)
    y = kernels.skinny_norm_linear(weighted, squares, 1e-6, *behind, scale)
    assert torch.equal(y, joined[0]) and torch.equal(total, joined[1])
    assert torch.equal(
        total, kernels.skinny_linear(x, weight, bias, None, scale, x.dtype) + residual
    )
    with pytest.raises(RuntimeError, match=r"skinny_norm_linear: squares have shape"):
        kernels.skinny_norm_linear(weighted, squares[:, 1:], 1e-6, *behind, scale)


@pytest.mark.gpu
def test_a_token_has_one_result_between_linears_in_every_batch_of_its_class(kernels: Any) -> None:
    x, first = draw_bf16(16, 2048, 2048)
    residual, second = draw_bf16(16, 4096, 2048)
    residual, norm_weight = residual.contiguous(), torch.randn(2048, device="cuda").bfloat16()
    for few, many in ((1, 2), (3, 8), (5, 8), (9, 16)):
        got, want = (
            kernels.skinny_linear_add_norm_linear(
                x[:rows], first, None, residual[:rows], norm_weight, 1e-5, second, None, "silu"
            )
            for rows in (few, many)
        )
        assert all(torch.equal(a, b[:few]) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
def test_all_kernels_overlapping_in_a_graph_give_the_bits_of_single_launches(
    kernels: Any, fw_seed: int
) -> None:
    torch.manual_seed(fw_seed)
    layers = [
        (draw_bf16(1, 4096, 4096)[1], draw_bf16(1, 8192, 4096)[1], draw_fp8(1, 4096, 4096, scheme))
        for scheme in ("tensor", "token", "block")
    ]
    norm_weight = torch.randn(4096, device="cuda").bfloat16()
    out_scale = torch.full((1, 1), 300.0, device="cuda")

    def run(x: Tensor) -> list[Tensor]:
        results = []
        rows = x.shape[0]
        for o, gate_up, (_, weight, _, x_scale, weight_scale) in layers:
            x = kernels.skinny_linear(x, o, None)
            x = gated_linear(x, gate_up, "silu") * 8
            if rows <= 16:
                for then, activation in ((gate_up, "silu"), (o, None)):
                    between = (x.contiguous(), norm_weight, 1e-5, then, None, activation)
                    x, total = kernels.skinny_linear_add_norm_linear(x, o, None, *between)
                    results.append(total)
            wide = x_scale.expand(rows, -1) if weight_scale.numel() > 1 else x_scale
            wide = wide.t().contiguous().t()
            q = (x * 100).clamp(-448, 448).to(E4M3)
            call = (q, weight, None, wide, weight_scale, torch.bfloat16)
            x = kernels.skinny_linear(*call)
            results.append(x)
            if weight_scale.shape[1] == 1:
                results.append(kernels.skinny_linear(*call, "silu", out_scale).float())
        return results

    for rows in ROWS:
        x = torch.randn(rows, 4096, device="cuda").bfloat16()
        check_replays(run, x, f"{rows} rows, --fw-seed={fw_seed}")


@pytest.mark.gpu
def test_kernels_refuse_what_they_cannot_run(kernels: Any) -> None:
    x, weight = draw_bf16(2, 255, 128)
    with pytest.raises(RuntimeError, match="even number of rows"):
        gated_linear(x, weight, "silu")
    with pytest.raises(RuntimeError, match="'tanh', expected 'silu', 'gelu_tanh', 'relu'"):
        gated_linear(x, weight[:254], "tanh")
    q, q_weight, _, x_scale, weight_scale = draw_fp8(2, 256, 640, "block")
    with pytest.raises(RuntimeError, match="in_features a multiple of 512"):
        kernels.skinny_linear(q, q_weight, None, x_scale, weight_scale, torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"expected \[1, 1\] and \[1, 1\]"):
        kernels.skinny_linear(q, q_weight, None, x_scale[:, :1], weight_scale, torch.bfloat16)
    one = x_scale[:1, :1]
    with pytest.raises(RuntimeError, match="out_dtype is none of"):
        kernels.skinny_linear(q, q_weight, None, one, one, torch.float64)
    with pytest.raises(RuntimeError, match="scales of blocks, expected one for all"):
        kernels.skinny_linear(*draw_fp8(2, 256, 512, "block"), torch.bfloat16, "silu", one)
    eps, norm_weight, second = 1e-5, weight[0], weight[:, :64].contiguous()
    between = kernels.skinny_linear_add_norm_linear
    with pytest.raises(RuntimeError, match=r"residual has shape \[2, 128\], expected .*\[2, 255\]"):
        between(x, weight, None, x, norm_weight, eps, second, None, None)
    with pytest.raises(RuntimeError, match=r"norm_weight has shape \[64\], expected .*\[128\]"):
        between(x, weight[:128], None, x.contiguous(), second[0], eps, second, None, None)
    with pytest.raises(RuntimeError, match="differ in in_features"):
        between(x, weight[:128], None, x.contiguous(), norm_weight, eps, second, None, None)
    wide = x.repeat(9, 1)
    with pytest.raises(RuntimeError, match="has 18 rows, expected 16 or fewer"):
        between(wide, weight[:128], None, wide, norm_weight, eps, weight, None, None)
    with pytest.raises(RuntimeError, match=r"bias has shape \[2\], expected a contiguous \[254\]"):
        gated_linear(x, weight[:254], "silu", weight[0, :2])
    with pytest.raises(RuntimeError, match="float8_e4m3fn"):
        kernels.skinny_linear(x, q_weight, None, one, one, torch.bfloat16)
    with pytest.raises(RuntimeError, match="x_scale is given, expected weight_scale too"):
        kernels.skinny_linear(q, q_weight, None, one)
    rows = torch.ones(256, 1, device="cuda")
    unquantized = torch.randn(9, 640, device="cuda").bfloat16()
    with pytest.raises(RuntimeError, match="has 9 rows, expected 8 or fewer"):
        kernels.skinny_linear(unquantized, q_weight, None, None, rows, torch.bfloat16)
    with pytest.raises(RuntimeError, match="in_features a multiple of 512"):
        kernels.skinny_linear(unquantized[:2], q_weight, None, None, weight_scale, torch.bfloat16)
    with pytest.raises(
        RuntimeError, match=r"weight_scale has shape \[9, 1\], expected \[1, 1\], \[256, 1\] or"
    ):
        kernels.skinny_linear(unquantized[:2], q_weight, None, None, rows[:9], torch.bfloat16)
