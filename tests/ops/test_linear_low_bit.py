"""``linear`` by weights of 4 and 8 bits: Triton's kernels against float64, for every format of the
package, and for one from outside; which rows they serve, what they refuse, what they read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.config.weight_format import (
    STORED_FORMATS,
    Packing,
    StoredFormat,
    StoredTensor,
    why_not_words,
)
from fusewright.ops import BY_NAME
from fusewright.ops.chain.chain import CHAIN, CUDA, KERNELS
from fusewright.ops.chain.kernels import covered, lay, part_at
from fusewright.ops.chain.lowbit import LOW_BIT as JOINED
from fusewright.ops.chain.stages import Call, parse
from fusewright.ops.core.launch import run_all
from fusewright.ops.core.target import Target
from fusewright.ops.launches import linear_lowbit as launches
from fusewright.ops.linear import lowbit
from fusewright.ops.linear.desc import LinearDesc
from fusewright.ops.linear.formats import WEIGHT_FORMATS, WeightFormat, dequantize, pack, quantize
from fusewright.ops.linear.kernels import DEQUANTIZING, INT8, LOW_BIT, LOW_BIT_ONCE, select

# The interpreter's numpy says aloud what hardware does in silence.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

OP = BY_NAME["linear"]
H200 = Target(torch.device("meta"), 90, csrc=True)
FORMATS = [name for name, form in STORED_FORMATS.items() if not form.x_dtype]
CPU = torch.device("cpu")
# Rows on either side of each tile's bound, odd sizes, depths that are no whole steps, one group.
SHAPES = [(1, 40, 128), (3, 70, 384), (16, 64, 256), (17, 66, 640), (33, 130, 128), (70, 64, 192)]


def weight_of(name: str, n: int, k: int, device: torch.device = CPU) -> dict[str, Tensor]:
    """The tensors of a random weight, whose rows differ in scale by up to 100."""
    sizes = 10 ** (2 * torch.rand(n, 1) - 1)
    tensors = quantize(STORED_FORMATS[name], torch.randn(n, k) * sizes * k**-0.5)
    return {argument: tensor.to(device) for argument, tensor in tensors.items()}


def call_of(
    name: str, x: Tensor, tensors: dict[str, Tensor], bias: Tensor | None = None, **how: Any
) -> tuple[Any, ...]:
    """The arguments of ``linear``."""
    scale, zero = tensors["weight_scale"], tensors.get("weight_zero")
    rest = (how.get("activation"), how.get("out_scale"), zero, name)
    return x, tensors["weight"], bias, None, scale, None, *rest, tensors.get("weight_row_scale")


def error(got: Tensor, name: str, x: Tensor, tensors: dict[str, Tensor]) -> float:
    """The largest error, relative to the sum of the products' sizes."""
    names = ("weight", "weight_scale", "weight_zero", "weight_row_scale")
    numbers = dequantize(STORED_FORMATS[name], *(tensors.get(each) for each in names)).double()  # type: ignore[arg-type]
    off = (got.double() - x.double() @ numbers.T).abs() / (x.double().abs() @ numbers.abs().T)
    return float(off.max().nan_to_num(torch.inf))


def cells() -> Iterator[Any]:
    """Every format, and every shape, with each dtype: formats by shapes in turn."""
    for index, (name, dtype) in enumerate(product(FORMATS, ("bfloat16", "float32"))):
        unit = STORED_FORMATS[name].scale.unit[1] or 1
        fitting = [shape for shape in SHAPES if shape[2] % unit == 0]
        for m, n, k in {fitting[index % len(fitting)], fitting[index // 2 % len(fitting)]}:
            yield pytest.param(name, dtype, m, n, k, id=f"{name}-{dtype}-{m}-{n}-{k}")


@pytest.mark.parametrize(("name", "dtype", "m", "n", "k"), [*cells()])
def test_every_format_is_near_float64(
    name: str, dtype: str, m: int, n: int, k: int, device: torch.device
) -> None:
    tensors = weight_of(name, n, k, device)
    x = torch.randn(m, k, device=device).to(getattr(torch, dtype))
    got = OP.overload("triton")(*call_of(name, x, tensors))
    assert error(got, name, x, tensors) < (2.0**-7 if dtype == "bfloat16" else 2.0**-20)


@pytest.mark.parametrize("name", ["int4_g128", "int4_zero_g32", "int8_channel", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(name: str, bad: float, device: torch.device) -> None:
    """A row with it has what the reference has there; other rows have what they had without."""
    tensors = weight_of(name, 32, 256, device)
    x = torch.randn(5, 256, device=device)
    run = OP.overload("triton")
    before = run(*call_of(name, x, tensors))
    x[3, 100] = bad
    got = run(*call_of(name, x, tensors))
    others = [0, 1, 2, 4]
    assert torch.equal(got[others], before[others])
    want = OP.overload()(*call_of(name, x, tensors))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("name", ["int4_zero_g64", "mxfp4"])
def test_programs_that_share_a_tile_sum_it_once(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "splits_of", lambda tile, m, n, k: 3)
    tensors = weight_of(name, 48, 768, device)
    x = torch.randn(4, 768, device=device).bfloat16()
    (launch,), _ = lowbit.plan_tiled(*call_of(name, x, tensors))
    assert launch.args["splits"] == 3 and launch.grid == (3,)
    for _ in range(2):  # the second call finds the counters as the first did
        got = OP.overload("triton")(*call_of(name, x, tensors))
        assert error(got, name, x, tensors) < 2.0**-6


def test_a_row_has_the_same_bits_beside_any_others(device: torch.device) -> None:
    tensors = weight_of("int4_g128", 64, 384, device)
    x = torch.randn(70, 384, device=device).bfloat16()
    run = OP.overload("invariant")
    every = run(*call_of("int4_g128", x, tensors))
    for rows in (slice(0, 1), slice(3, 20), slice(65, 70)):
        assert torch.equal(run(*call_of("int4_g128", x[rows], tensors)), every[rows])


def test_a_result_is_activated_and_quantized_as_by_definition(device: torch.device) -> None:
    tensors = weight_of("int4_zero_g32", 64, 96, device)
    x, scale = torch.randn(5, 96, device=device), torch.full((1, 1), 0.01, device=device)
    call = call_of("int4_zero_g32", x, tensors, activation="silu", out_scale=scale)
    got, want = (op(*call).float() for op in (OP.overload("triton"), OP.overload()))
    assert got.shape == (5, 32)
    torch.testing.assert_close(got, want, rtol=2.0**-3, atol=0.5)


@pytest.mark.parametrize("name", ["int4_zero_g32", "int8_channel", "mxfp4", "nvfp4"])
def test_the_numbers_of_a_weight_are_those_of_its_definition(
    name: str, device: torch.device
) -> None:
    tensors = weight_of(name, 37, 160, device)
    optional = tensors.get("weight_zero"), tensors.get("weight_row_scale")
    stored, weight = STORED_FORMATS[name], (tensors["weight"], tensors["weight_scale"])
    made, numbers = launches.dequantize(launches.LowBit(stored, *weight, *optional), torch.float32)
    run_all(made)
    torch.testing.assert_close(numbers, dequantize(stored, *weight, *optional), rtol=2e-7, atol=0)


@pytest.fixture
def words_of_32() -> Iterator[StoredFormat]:
    """As some checkpoints have them: signed fields of int32 in another order, scales by columns."""
    packing = Packing(4, signed=True, order=(0, 2, 4, 6, 1, 3, 5, 7))
    stored = StoredFormat(
        name="words of 32",
        weight=StoredTensor(("w",), "int32", packing=packing),
        scale=StoredTensor(("s",), "bfloat16", (1, 32), transposed=True),
        zero=StoredTensor(("z",), "int8", (1, 32), transposed=True),
        zero_offset=1,
    )
    STORED_FORMATS[stored.name], WEIGHT_FORMATS[stored.name] = stored, WeightFormat.of(stored)
    yield stored
    del STORED_FORMATS[stored.name], WEIGHT_FORMATS[stored.name]


def test_a_format_is_known_by_its_data(words_of_32: StoredFormat, device: torch.device) -> None:
    name, form = words_of_32.name, words_of_32
    assert form.zero is not None
    tensors = {
        "weight": pack(form.weight, torch.randint(-8, 8, (40, 192))),
        "weight_scale": pack(form.scale, torch.rand(40, 6)),
        "weight_zero": pack(form.zero, torch.randint(-4, 4, (40, 6))),
    }
    tensors = {argument: tensor.to(device) for argument, tensor in tensors.items()}
    for m in (3, 40):
        x = torch.randn(m, 192, device=device)
        got = OP.overload("triton")(*call_of(name, x, tensors))
        assert error(got, name, x, tensors) < 2.0**-20


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"x_dtype": "float8_e4m3fn"}, "x is quantized to float8_e4m3fn"),
        ({"values": tuple(map(float, range(16)))}, "the values of its integers"),
        (
            {"weight": StoredTensor(("w",), "uint8", packing=Packing(2))},
            "2 bits in uint8: reads 4 or 8",
        ),
        (
            {"weight": StoredTensor(("w",), "int64", packing=Packing(4))},
            "4 bits in int64: reads 4 or 8",
        ),
        ({"weight": StoredTensor(("w",), "uint8", transposed=True)}, "not side by side"),
        ({"weight": StoredTensor(("w",), "int32", packing=Packing(4, "rows"))}, "not side by side"),
        ({"scale": StoredTensor(("s",), "float32", (1, 4))}, "in groups of 4: expected multiples"),
        ({"scale": StoredTensor(("s",), "float32", (2, 32))}, "2 rows share a scale"),
        (
            {"zero": StoredTensor(("z",), "int32", (1, 32), Packing(4, "rows"))},
            "zero points are packed",
        ),
    ],
)
def test_what_is_not_read_has_a_reason(changes: dict[str, Any], reason: str) -> None:
    plain = replace(STORED_FORMATS["int4_g32"], name="changed")
    assert why_not_words(plain, 256) == ""
    assert reason in why_not_words(replace(plain, **changes), 256)


def test_rows_choose_the_kernel() -> None:
    desc = LinearDesc("int4_g128", torch.bfloat16, 4096, 4096, activation="silu", bias=True)
    of_triton = replace(H200, csrc=False)
    chosen = {rows: select(desc, rows, of_triton).kernel for rows in (1, 16, 256, 257)}
    assert chosen == {1: LOW_BIT, 16: LOW_BIT, 256: LOW_BIT, 257: LOW_BIT_ONCE}
    refused = dict(select(desc, 257, H200).refused)
    assert refused[LOW_BIT.name] == "257 rows: read as words up to 256"
    assert select(desc, 1, Target(CPU)).kernel is DEQUANTIZING
    odd = replace(desc, weight_format="int4_channel", in_features=4094)
    assert "expected multiples of 8" in dict(select(odd, 1, H200).refused)[LOW_BIT.name]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("m", [1, 8, 40])
def test_sums_of_int8_are_exact(m: int, static: bool, device: torch.device) -> None:
    """Also those of programs that share the depth of a tile; scales are powers of two."""
    n, k = 72, 2 * 14 * 256
    x = torch.randint(-15, 16, (m, k), device=device, dtype=torch.int8)
    weight = torch.randint(-15, 16, (n, k), device=device, dtype=torch.int8)
    x_scale = 2.0 ** -torch.randint(4, 8, (1 if static else m, 1), device=device).float()
    scale = 2.0 ** -torch.randint(4, 8, (n, 1), device=device).float()
    name = "w8a8_int8_static" if static else "w8a8_int8"
    how = (torch.float32, None, None, None, name)
    got = OP.overload("triton")(x, weight, None, x_scale, scale, *how)
    assert torch.equal(got.double(), x.double() @ weight.double().T * x_scale * scale.T)


def test_int8_is_multiplied_by_one_kernel_at_any_rows() -> None:
    desc = LinearDesc("w8a8_int8", torch.bfloat16, 4096, 4096, activation="silu", bias=True)
    assert {select(desc, rows, H200).kernel for rows in (1, 256, 8192)} == {INT8}
    assert select(desc, 1, Target(CPU)).kernel is DEQUANTIZING
    refused = dict(select(replace(desc, weight_format="int8_channel"), 1, H200).refused)
    assert "x is not int8" in refused[INT8.name]


def test_words_that_are_not_aligned_are_left_to_others() -> None:
    tensors = weight_of("int4_g32", 16, 64)
    shifted = torch.empty(16 * 32 + 1, dtype=torch.uint8)[1:].view(16, 32)
    args = call_of("int4_g32", torch.randn(2, 64), {**tensors, "weight": shifted})
    assert LOW_BIT.run(*args) is None and LOW_BIT_ONCE.run(*args) is None


def test_a_weight_of_4_bits_costs_half_a_byte_and_its_scales() -> None:
    x = torch.empty(1, 4096, dtype=torch.bfloat16, device="meta")
    stored = STORED_FORMATS["int4_g128"]
    tensors = {
        argument: torch.empty(
            tensor.shape(4096, 4096), dtype=getattr(torch, tensor.dtype), device="meta"
        )
        for argument, tensor in stored.tensors.items()
    }
    cost = OP.cost(OP.describe(call_of(stored.name, x, tensors), sm=90))
    rows_in_and_out = 2 * 2 * 4096
    assert cost.bytes == 4096 * 4096 // 2 + 4096 * 32 * 2 + rows_in_and_out
    assert cost.flops == 2 * 4096 * 4096


def few_bits() -> dict[str, Any]:
    drawn = CHAIN.cases(torch.bfloat16, CPU, torch.Generator().manual_seed(3))
    cases = {case.label: case for case in drawn if case.label.startswith("whole layer, ")}
    assert len(cases) == 3
    return cases


@pytest.mark.parametrize(("label", "case"), few_bits().items())
def test_layers_of_few_bits_are_joined_by_their_norm(label: str, case: Any) -> None:
    """Both halves of a layer run as two launches each, with the sums that the reference has."""
    call = Call.of(case.args)
    steps = lay(call, H200, CUDA.kernels)
    assert [(step.kernel, step.start, step.stop) for step in steps] == [
        (JOINED, 0, 3),
        (JOINED, 3, 6),
    ]
    state = call.state
    for step in steps:
        part = part_at(call, step.start, step.stop, state)
        launches, _ = JOINED.launches(part)  # type: ignore[misc]
        assert len(launches) == 2
        made = JOINED.run(part)
        assert made is not None
        state = made
    y, total = CHAIN.overload()(*case.args)
    torch.testing.assert_close(state.x, y, rtol=6e-2, atol=6e-2)
    torch.testing.assert_close(state.total, total, rtol=6e-2, atol=6e-2)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (("", ", center=True", ", weight_format='int4_g32'"), "reads no weights in int4_g32"),
        ((", weight_format='int4_g32'", ", center=True", ""), "reads no weights in int4_g32"),
        ((", activation='relu'", "", ""), "the layer before the norm has an activation"),
    ],
)
def test_layers_that_are_not_joined_have_a_reason(text: tuple[str, str, str], reason: str) -> None:
    first, norm, second = text
    chain = parse(
        f"linear(weight{first}) > add_norm(weight, eps=1e-05{norm}) > linear(weight{second})"
    )
    assert covered(chain.stages, KERNELS) == ([], reason)
