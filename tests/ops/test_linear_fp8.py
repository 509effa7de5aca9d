"""``linear`` of FP8 operands against float64, for every scheme; what is refused, and why."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.ops import BY_NAME, OpDesc
from fusewright.ops.core.counters import MAX_COUNTERS, counters
from fusewright.ops.core.float8 import E4M3
from fusewright.ops.launches import linear_fp8 as kernels

OP = BY_NAME["linear"]
SCHEMES = ("tensor", "token", "block")


def sm_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def draw(m: int, n: int, k: int, scheme: str, device: torch.device) -> tuple[Tensor, ...]:
    """x, x_scale, weight, weight_scale; scales differ by factors of up to 100."""

    def scales(rows: int, columns: int) -> Tensor:
        return 10 ** (2 * torch.rand(rows, columns, device=device) - 1)

    x = torch.randn(m, k, device=device).to(E4M3)
    weight = torch.randn(n, k, device=device).to(E4M3)
    if scheme == "tensor":
        return x, scales(1, 1), weight, scales(1, 1)
    if scheme == "token":
        return x, scales(m, 1), weight, scales(n, 1)
    groups = -(-k // 128)
    return x, scales(groups, m).t(), weight, scales(-(-n // 128), groups)


def call_of(args: tuple[Any, ...], bias: Tensor | None, dtype: torch.dtype) -> tuple[Any, ...]:
    """The arguments of ``linear``."""
    x, x_scale, weight, weight_scale = args
    return x, weight, bias, x_scale, weight_scale, dtype


def spread(scale: Tensor, like: Tensor) -> Tensor:
    """The scale of each element, by the indices of blocks: not as the reference does it."""
    sizes = zip(like.shape, scale.shape, strict=True)
    row, col = (torch.arange(n) // (n if s == 1 else 1 if s == n else 128) for n, s in sizes)
    return scale.double()[row.to(scale.device)[:, None], col.to(scale.device)[None, :]]


def relative_error(got: Tensor, args: tuple[Any, ...], bias: Tensor | None) -> float:
    """The largest error relative to the largest element of its row: rows have scales of their
    own."""
    x, x_scale, weight, weight_scale = args
    exact = (x.double() * spread(x_scale, x)) @ (weight.double() * spread(weight_scale, weight)).T
    exact += 0.0 if bias is None else bias.double()
    if not exact.numel():
        return 0.0
    error = (got.double() - exact).abs() / exact.abs().amax(1, keepdim=True)
    return float(error.max().nan_to_num(torch.inf))


@pytest.mark.product
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("implementation", ["", *(impl.name for impl in OP.implementations)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2.0**-9), (torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-8)],
)
def test_every_scheme_is_near_float64(
    scheme: str,
    implementation: str,
    dtype: torch.dtype,
    tolerance: float,
    device: torch.device,
    fw_seed: int,
) -> None:
    torch.manual_seed(fw_seed)
    shapes = [(1, 96, 512), (4, 96, 1024), (6, 40, 200), (17, 130, 300), (3, 256, 640), (0, 32, 16)]
    shapes += [(5, 40, 2048), (70, 40, 3584)]  # depth that programs share
    if device.type == "cuda":
        shapes += [(m, 512, 4096) for m in (1, 2, 3, 5, 16, 65, 130)] + [(33, 128, 14336)]
    checked = 0
    for m, n, k in shapes:
        args = draw(m, n, k, scheme, device)
        bias = None if m % 2 else torch.randn(n, device=device).to(dtype)
        call = call_of(args, bias, dtype)
        if implementation:
            desc = OP.describe(call, sm=sm_of(device))
            if OP.implementation(implementation).supports(desc):
                continue
            if implementation == "skinny" and device.type == "cpu":
                continue
        y = OP.overload(implementation)(*call)
        assert y.dtype == dtype and y.is_contiguous()
        error = relative_error(y, args, bias)
        assert error <= tolerance, f"{m} x {n} x {k}: {error}, --fw-seed={fw_seed}"
        checked += 1
    if not checked:
        pytest.skip(f"{implementation} runs no case of {dtype} here")


def test_tiles_fit_every_gpu_that_has_fp8() -> None:
    for tiles in (kernels._TILES, kernels._TILES_OF_BLOCKS):
        for tile in (tile for by_columns in tiles.values() for _, tile in by_columns):
            # SM 8.9 has 99 KiB of shared memory for a block.
            assert (tile.rows + tile.columns) * tile.depth * tile.stages <= 96 << 10, tile
            assert tiles is kernels._TILES or (tile.depth == 128 and tile.columns <= 128), tile


def test_splits_give_each_program_work_and_each_tile_a_counter() -> None:
    for scheme in SCHEMES:
        for m, n, k in itertools.product((1, 9, 33, 64, 200, 5000), (16, 4096, 128256), (16, 8192)):
            tile = kernels.tile_of(scheme, m, n)
            splits = kernels.splits_of(tile, m, n, k)
            assert 1 <= splits <= max(k // tile.depth, 1)
            assert splits == 1 or -(-m // tile.rows) * -(-n // tile.columns) <= MAX_COUNTERS


LLAMA = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("n", "k"), LLAMA)
def test_tiles_of_a_models_linears_are_near_float64_and_repeat(
    n: int, k: int, scheme: str, fw_seed: int
) -> None:
    device = torch.device("cuda")
    torch.manual_seed(fw_seed)
    tiled = OP.overload("triton")
    for m in (1, 9, 16, 17, 32, 33, 64, 65, 100, 128, 129, 256, 257):
        args = draw(m, n, k, scheme, device)
        bias = torch.randn(n, device=device).bfloat16() if m % 4 == 0 else None
        call = call_of(args, bias, torch.bfloat16)
        got = tiled(*call)
        for result in (got, OP.overload("library")(*call)):
            error = relative_error(result, args, bias)
            assert error <= 2.0**-7, f"{m} rows: {error}, --fw-seed={fw_seed}"
        for _ in range(3):
            assert torch.equal(got, tiled(*call)), f"{m} rows: another result when repeated"
    assert not counters(device).any()


@pytest.mark.gpu
def test_linears_that_start_early_in_a_graph_give_the_bits_of_single_launches(
    fw_seed: int,
) -> None:
    """Behind quantization, which lets them fetch weights before it has written x."""
    torch.manual_seed(fw_seed)
    device = torch.device("cuda")
    layers = [draw(1, 4096, 4096, scheme, device)[2:] for scheme in ("token", "block") * 3]
    quantize = BY_NAME["quant_fp8_dynamic"].overload("triton")
    for m in (9, 32, 64, 200):
        x = torch.randn(m, 4096, device=device).bfloat16()

        def run(x: Tensor = x) -> list[Tensor]:
            found = [x]
            for weight, weight_scale in layers:
                group = 0 if weight_scale.shape[1] == 1 else 128
                given = (*quantize(found[-1], group), weight, weight_scale * 1e-3)
                found.append(OP.overload("triton")(*call_of(given, None, torch.bfloat16)))
            return found[1:]

        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        for _ in range(3):
            x.normal_()
            graph.replay()
            for got, want in zip(captured, run(), strict=True):
                assert torch.equal(got, want), f"{m} rows, --fw-seed={fw_seed}"


def on_gpu(args: tuple[Any, ...], sm: int = 90) -> OpDesc:
    found = OP.describe(args)
    return OpDesc(found.op, found.args, "cuda", sm)


NATIVE_REFUSES = [
    ((4, 40, 512), "tensor", None, 90, r"weight \[40, 512\]: cuBLASLt takes multiples of 16"),
    ((4, 48, 200), "token", None, 90, r"weight \[48, 200\]: cuBLASLt takes multiples of 16"),
    ((4, 48, 640), "block", None, 90, "in_features 640: .* of 512"),
    ((4, 48, 512), "block", None, 100, "blocks of scales are in cuBLASLt for SM 9.0, not 10.0"),
    ((4, 48, 512), "token", torch.float32, 90, "no bias to a float32 result"),
    ((4, 48, 512), "tensor", None, 80, "FP8 came with SM 8.9 .* this GPU is SM 8.0"),
]


@pytest.mark.parametrize(("shape", "scheme", "bias", "sm", "reason"), NATIVE_REFUSES)
def test_cublaslt_is_not_chosen_for_what_it_refuses_or_gets_wrong(
    shape: tuple[int, int, int], scheme: str, bias: torch.dtype | None, sm: int, reason: str
) -> None:
    args = draw(*shape, scheme, torch.device("cpu"))
    added = None if bias is None else torch.zeros(shape[1], dtype=bias)
    desc = on_gpu(call_of(args, added, bias or torch.bfloat16), sm)
    found = OP.implementation("scaled_mm").supports(desc)
    assert re.search(reason, found) and "linear" in found


def test_the_portable_kernel_takes_what_cublaslt_refuses() -> None:
    for shape, scheme, bias, sm, _ in NATIVE_REFUSES[:5]:
        args = draw(*shape, scheme, torch.device("cpu"))
        desc = on_gpu(call_of(args, None, bias or torch.bfloat16), sm)
        assert not OP.implementation("triton").supports(desc)


REFUSED = [
    ("other features", lambda a: (a[0], a[1], a[2][:, :-2], a[3], None), "expected \\[M, K\\]"),
    ("x in bfloat16", lambda a: (a[0].bfloat16(), *a[1:], None), "torch.bfloat16, torch.float32"),
    ("scale in half", lambda a: (a[0], a[1].half(), *a[2:], None), "torch.float16"),
    ("a scale a token alone", lambda a: (a[0], a[1], a[2], a[3][:2], None), "scales \\[1, 1\\]"),
    ("short x_scale", lambda a: (a[0], a[1][1:], *a[2:], None), "scales \\[1, 1\\]"),
    ("short bias", lambda a: (*a, torch.zeros(3).bfloat16()), "bias is torch.bfloat16 \\[3\\]"),
    ("float bias", lambda a: (*a, torch.zeros(48)), "bias is torch.float32 \\[48\\]"),
]


@pytest.mark.parametrize(("what", "change", "message"), REFUSED, ids=[r[0] for r in REFUSED])
def test_disagreeing_operands_are_refused_by_every_implementation(
    what: str, change: Any, message: str, device: torch.device
) -> None:
    args = change(draw(4, 48, 64, "token", device))
    *operands, bias = [arg.to(device) if isinstance(arg, Tensor) else arg for arg in args]
    call = call_of(tuple(operands), bias, torch.bfloat16)
    for implementation in ("", "scaled_mm", "triton"):
        with pytest.raises(ValueError, match=message):
            OP.overload(implementation)(*call)
    with pytest.raises(ValueError, match=message):
        OP.fake(*call)


def test_a_result_in_an_unknown_dtype_is_refused() -> None:
    args = draw(4, 48, 64, "token", torch.device("cpu"))
    with pytest.raises(ValueError, match=r"to torch\.float64, expected"):
        OP.overload()(*call_of(args, None, torch.float64))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_cost_counts_every_argument_and_the_result_once(scheme: str) -> None:
    operands = draw(5, 48, 640, scheme, torch.device("cpu"))
    args = call_of(operands, torch.zeros(48).half(), torch.float16)
    cost = OP.cost(OP.describe(args))
    tensors = [t for t in args if isinstance(t, Tensor)]
    assert cost.bytes == sum(t.numel() * t.element_size() for t in tensors) + 5 * 48 * 2
    assert cost.flops == 2 * 5 * 48 * 640
