"""``linear`` by weights of 4 bits in csrc: which layers and rows its kernels serve, and their
results beside float64, the plain kernels of their parts, and themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright.config.weight_format import STORED_FORMATS, Packing, StoredTensor
from fusewright.ops import BY_NAME
from fusewright.ops.chain.chain import CUDA
from fusewright.ops.chain.kernels import lay
from fusewright.ops.chain.lowbit import LOW_BIT as JOINED_OF_TRITON, PACKED as JOINED
from fusewright.ops.chain.stages import Call
from fusewright.ops.core.desc import TensorDesc
from fusewright.ops.core.target import Target
from fusewright.ops.linear import packed
from fusewright.ops.linear.desc import LinearDesc
from fusewright.ops.linear.formats import dequantize, quantize
from fusewright.ops.linear.kernels import LOW_BIT, LOW_BIT_ONCE, PACKED, select
from tests.ops.csrc import csrc_kernels
from tests.ops.replays import check_replays

OP = BY_NAME["linear"]
H200 = Target(torch.device("meta"), 90, csrc=True)
FORMATS = ["int4_g128", "int4_zero_g128", "int4_g64", "int4_g32", "int4_channel", "mxfp4", "nvfp4"]
FOR_MANY_ROWS = ("int4_g128", "int4_zero_g128", "mxfp4")
LEFT_TO_TRITON = ["int4_zero_g64", "int4_zero_channel", "int8_g128", "int8_channel"]
# Either side of the bounds of each kernel's tiles.
ROWS = (1, 2, 3, 8, 9, 16, 17, 33, 64, 65, 129, 256)
# Shapes of models; then one line, depths that are no whole steps, tiles that rows do not fill.
SHAPES = [(6144, 4096), (4096, 4096), (4096, 14336), (16, 256), (176, 768), (1040, 1280)]
DESC = LinearDesc("int4_g128", torch.bfloat16, 4096, 4096, activation="silu", bias=True)


@pytest.fixture
def kernels() -> Any:
    return csrc_kernels()


def weight_of(name: str, n: int, k: int) -> dict[str, Tensor]:
    """The tensors of a random weight, whose rows differ in scale by up to 100."""
    sizes = 10 ** (2 * torch.rand(n, 1, device="cuda") - 1)
    return quantize(STORED_FORMATS[name], torch.randn(n, k, device="cuda") * sizes * k**-0.5)


def numbers_of(name: str, tensors: dict[str, Tensor]) -> Tensor:
    optional = tensors.get("weight_zero"), tensors.get("weight_row_scale")
    held = tensors["weight"], tensors["weight_scale"], *optional
    return dequantize(STORED_FORMATS[name], *held).double()


def operands_of(name: str, tensors: dict[str, Tensor], bias: Tensor | None = None) -> list[Any]:
    optional = tensors.get("weight_zero"), tensors.get("weight_row_scale")
    is_float = bool(STORED_FORMATS[name].values)
    return [tensors["weight"], tensors["weight_scale"], *optional, bias, is_float]


def draw_x(rows: int, k: int) -> Tensor:
    """A slice of wider rows."""
    return torch.randn(rows, k + 24, device="cuda").bfloat16()[:, 8 : k + 8]


def worst(got: Tensor, x: Tensor, numbers: Tensor, bias: Tensor | None) -> float:
    """The largest error beyond half a unit in the last place, relative to the products' norm."""
    exact = x.double() @ numbers.T
    exact = exact if bias is None else exact + bias.double()
    norm = x.double().norm(dim=1)[:, None] * numbers.norm(dim=1)[None, :] + 1e-30
    beyond = (got.double() - exact).abs() - exact.abs() * 2.0**-8
    return float((beyond / norm).max().nan_to_num(9.0))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_it_is_near_float64(n: int, k: int, name: str, kernels: Any, fw_seed: int) -> None:
    torch.manual_seed(fw_seed)
    tensors = weight_of(name, n, k)
    numbers = numbers_of(name, tensors)
    for rows in ROWS if name in FOR_MANY_ROWS else ROWS[:4]:
        x = draw_x(rows, k)
        bias = torch.randn(n, device="cuda").bfloat16() if rows % 2 else None
        call = (x, *operands_of(name, tensors, bias))
        got = kernels.packed_linear(*call)
        assert got.dtype == torch.bfloat16 and got.shape == (rows, n)
        # Scales of groups and products with them may be rounded to bfloat16; sums average that.
        error = worst(got, x, numbers, bias)
        assert error <= 2.0**-8, f"{rows} rows: {error}, --fw-seed={fw_seed}"
        assert torch.equal(got, kernels.packed_linear(*call)), f"{rows} rows: another result"


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu", "relu2", "gelu", "gelu_new"])
@pytest.mark.parametrize("name", ["int4_zero_g128", "mxfp4"])
def test_sums_are_activated_as_by_definition(name: str, activation: str, kernels: Any) -> None:
    n, k = 2 * 1056, 1024
    tensors = weight_of(name, n, k)
    for rows in (1, 5, 20, 70, 200):
        x, bias = draw_x(rows, k), torch.randn(n, device="cuda").bfloat16()
        held = operands_of(name, tensors, bias)
        sums = kernels.packed_linear(x, *held)
        got = kernels.packed_linear(x, *held, activation).float()
        acts = {"silu": F.silu, "gelu_tanh": lambda v: F.gelu(v, approximate="tanh")}
        if activation in acts:
            gate, up = sums.float().chunk(2, dim=1)
            want = acts[activation](gate) * up
        else:
            plain = {
                "relu": F.relu,
                "relu2": lambda v: F.relu(v) ** 2,
                "gelu": F.gelu,
                "gelu_new": lambda v: F.gelu(v, approximate="tanh"),
            }
            want = plain[activation](sums.float())
        torch.testing.assert_close(got, want.bfloat16().float(), rtol=2.0**-7, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("names", [("int4_g128", "int4_zero_g128"), ("mxfp4", "nvfp4")])
def test_layers_that_share_a_norm_have_the_results_of_each(
    names: tuple[str, str], kernels: Any, fw_seed: int
) -> None:
    torch.manual_seed(fw_seed)
    hidden, width, k = 1024, 2 * 1040, 2048
    first, second = weight_of(names[0], hidden, k), weight_of(names[1], width, hidden)
    norm_weight = torch.rand(hidden, device="cuda").bfloat16() + 0.5
    for rows in (1, 2, 5, 8):
        x, residual = draw_x(rows, k), torch.randn(rows, hidden, device="cuda").bfloat16()
        call = (x, *operands_of(names[0], first), residual, norm_weight, 1e-6, 0.0)
        call += (*operands_of(names[1], second), "silu")
        y, total = kernels.packed_linear_add_norm_linear(*call)
        sums = kernels.packed_linear(x, *operands_of(names[0], first))
        assert torch.equal(total, sums + residual), rows
        wide = total.double()
        scale = (wide.square().mean(1, keepdim=True) + 1e-6).rsqrt()
        normed = (wide * norm_weight.double() * scale).bfloat16()
        want = kernels.packed_linear(normed, *operands_of(names[1], second), "silu")
        torch.testing.assert_close(y, want, rtol=2.0**-5, atol=2.0**-5 * float(want.abs().max()))
        again = kernels.packed_linear_add_norm_linear(*call)
        assert torch.equal(y, again[0]) and torch.equal(total, again[1])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 40, 256])
def test_overlapping_in_a_graph_it_gives_the_bits_of_single_launches(
    rows: int, kernels: Any
) -> None:
    up = operands_of("int4_g128", weight_of("int4_g128", 4096, 2048))
    down = operands_of("mxfp4", weight_of("mxfp4", 2048, 4096))

    def run(x: Tensor) -> list[Tensor]:
        results = []
        for _ in range(6):
            x = kernels.packed_linear(kernels.packed_linear(x, *up), *down)
            results.append(x)
        return results

    check_replays(run, torch.randn(rows, 2048, device="cuda").bfloat16(), f"{rows} rows")


@pytest.mark.gpu
def test_what_it_cannot_read_is_named(kernels: Any) -> None:
    tensors = weight_of("int4_g128", 64, 256)
    weight, scale, *rest = operands_of("int4_g128", tensors)
    x = draw_x(3, 256)
    with pytest.raises(RuntimeError, match="257 rows, expected 256 or fewer"):
        kernels.packed_linear(draw_x(257, 256), weight, scale, *rest)
    of_rows = operands_of("nvfp4", weight_of("nvfp4", 64, 256))
    with pytest.raises(RuntimeError, match="9 rows, expected 8 or fewer"):
        kernels.packed_linear(draw_x(9, 256), *of_rows)
    with pytest.raises(RuntimeError, match="expected a weight of half as many columns"):
        kernels.packed_linear(draw_x(3, 512), weight, scale, *rest)
    with pytest.raises(RuntimeError, match=r"expected a contiguous \[64, groups\]"):
        kernels.packed_linear(x, weight, scale[:60], *rest)
    with pytest.raises(RuntimeError, match="expected float16 for 128 columns"):
        kernels.packed_linear(x, weight, scale.float(), *rest)
    with pytest.raises(RuntimeError, match="weight_zero has shape"):
        kernels.packed_linear(x, weight, scale, scale[:, :1], *rest[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_the_op_computes_as_its_definition(name: str, kernels: Any) -> None:
    tensors = weight_of(name, 512, 1024)
    rest = (None, None, tensors.get("weight_zero"), name, tensors.get("weight_row_scale"))
    for rows in (1, 40) if name in FOR_MANY_ROWS else (1, 8):
        x = draw_x(rows, 1024)
        args = (x, tensors["weight"], None, None, tensors["weight_scale"], None, *rest)
        got = OP.overload("low_bit")(*args)
        assert worst(got, x, numbers_of(name, tensors), None) <= 2.0**-8
        assert torch.equal(got, kernels.packed_linear(x, *operands_of(name, tensors)))


def test_rows_choose_the_kernel() -> None:
    chosen = {rows: select(DESC, rows, H200).kernel for rows in (1, 8, 9, 16, 17, 256, 257)}
    by_csrc = {1: PACKED, 8: PACKED, 17: PACKED, 256: PACKED}
    assert chosen == by_csrc | {9: LOW_BIT, 16: LOW_BIT, 257: LOW_BIT_ONCE}
    floats = replace(DESC, weight_format="mxfp4")
    assert [select(floats, rows, H200).kernel for rows in (8, 9, 256)] == [PACKED] * 3
    small = replace(DESC, weight_format="int4_g32")
    assert [select(small, rows, H200).kernel for rows in (8, 9)] == [PACKED, LOW_BIT]
    assert select(DESC, 1, replace(H200, csrc=False)).kernel is LOW_BIT
    joined = replace(DESC, add=True, activation="")
    assert PACKED.refuses(joined, 8, H200) == ""
    assert PACKED.refuses(joined, 9, H200) == "9 rows: reads words for 1 to 8"


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_read_by_what_they_are(name: str) -> None:
    assert packed.why_not_read(replace(DESC, weight_format=name)) == ""


@pytest.mark.parametrize("name", LEFT_TO_TRITON)
def test_other_formats_are_left_to_triton(name: str) -> None:
    desc = replace(DESC, weight_format=name)
    assert packed.why_not_read(desc)
    assert select(desc, 1, H200).kernel is LOW_BIT


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"offset": 7}, "7 is taken from its integers"),
        ({"x_dtype": "float8_e4m3fn"}, "x is quantized"),
        ({"weight": StoredTensor(("w",), "uint8", packing=Packing(4, signed=True))}, "signed"),
        ({"weight": StoredTensor(("w",), "int32", packing=Packing(4))}, "4 bits in int32"),
        (
            {"weight": StoredTensor(("w",), "uint8", packing=Packing(4, order=(1, 0)))},
            "do not follow one another",
        ),
        ({"scale": StoredTensor(("s",), "bfloat16", (1, 128))}, "no kernel for scales of bfloat16"),
        (
            {"zero": StoredTensor(("z",), "int8", (1, 128)), "offset": 0},
            "zero points of int8",
        ),
    ],
)
def test_what_is_not_read_has_a_reason(changes: dict[str, Any], reason: str) -> None:
    plain = replace(STORED_FORMATS["int4_g128"], name="changed")
    assert next(packed._reasons(plain), "") == ""
    assert reason in next(packed._reasons(replace(plain, **changes)), "")


@pytest.mark.parametrize("columns", [4096 + 128, 28672 + 256])
def test_depths_that_are_no_whole_lines_or_too_large_are_left_to_triton(columns: int) -> None:
    desc = replace(DESC, in_features=columns)
    assert "expected multiples of 16 and of 256 up to 28672" in packed.why_not_read(desc)


@pytest.mark.parametrize(
    ("rows", "kernel"),
    [(1, JOINED), (8, JOINED), (9, JOINED_OF_TRITON), (33, None), (256, None), (300, None)],
)
def test_few_rows_are_joined_and_more_run_in_turn(rows: int, kernel: Any) -> None:
    """Triton joins no rows that csrc multiplies."""
    stored = STORED_FORMATS["int4_g128"]

    def of_shape(dtype: torch.dtype, *shape: int) -> TensorDesc:
        return TensorDesc(dtype, torch.Size(shape))

    def layer(n: int, k: int) -> list[TensorDesc]:
        tensors = stored.tensors.values()
        return [of_shape(getattr(torch, t.dtype), *t.shape(n, k)) for t in tensors]

    text = (
        "linear(weight, weight_scale, weight_format='int4_g128') > add_norm(weight, eps=1e-05) > "
        "linear(weight, weight_scale, weight_format='int4_g128', activation='silu')"
    )
    bf16 = torch.bfloat16
    operands = [*layer(1024, 2048), of_shape(bf16, 1024), *layer(4096, 1024)]
    x, residual = of_shape(bf16, rows, 2048), of_shape(bf16, rows, 1024)
    steps = lay(Call.of((x, residual, operands, text, None)), H200, CUDA.kernels)
    assert steps[0].kernel is kernel
    of_triton = lay(
        Call.of((x, residual, operands, text, None)), replace(H200, csrc=False), CUDA.kernels
    )
    assert of_triton[0].kernel is (JOINED_OF_TRITON if rows <= 256 else None)
