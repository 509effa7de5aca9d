"""``linear`` against float64: conformance compares with a reference that is F.linear itself.

And the streaming kernel by itself: shapes that its op leaves to cuBLAS, repeats, graphs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright.ops import BY_NAME
from fusewright.ops.linear.csrc import stream_rows
from fusewright.ops.linear.desc import LinearDesc
from tests.ops.csrc import csrc_kernels

OP = BY_NAME["linear"]


def sm_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def relative_error(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> float:
    """Relative to the largest element: single ones may cancel.  NaN is an infinite error."""
    exact = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    if not exact.numel():
        return 0.0
    error = (got.double() - exact).abs().max() / exact.abs().max()
    return float(error.nan_to_num(torch.inf))


def of_a_chain(terms: int) -> float:
    """The error that float32 sums of so many terms need.

    A chain of 2,048 multiply-adds, each rounded once, was off by 1.7e-6 in the median and by 2.7e-6
    at most in 60 draws of 33 rows and 2,048 columns; errors grow as the square root of the terms.
    """
    return 1.25 * 2.0**-24 * float(terms) ** 0.5


@pytest.mark.product
@pytest.mark.parametrize("implementation", [impl.name for impl in OP.implementations])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2e-6), (torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-9)],
)
def test_every_case_is_near_float64(
    implementation: str, dtype: torch.dtype, tolerance: float, device: torch.device, fw_seed: int
) -> None:
    generator = torch.Generator(device).manual_seed(fw_seed)
    supports = OP.implementation(implementation).supports
    checked = 0
    for case in OP.cases(dtype, device, generator):
        if supports(OP.describe(case.args, sm=sm_of(device))):
            continue
        if any(arg is not None for arg in case.args[3:]):
            continue  # FP8, or with an epilogue
        error = relative_error(OP.overload(implementation)(*case.args), *case.args[:3])
        bound = max(tolerance, of_a_chain(case.args[0].shape[-1]))
        assert error <= bound, f"{case.label}: {error}, --fw-seed={fw_seed}"
        checked += 1
    if not checked:
        pytest.skip(f"{implementation} runs no case of {dtype} here")


@pytest.mark.parametrize(
    ("shape", "weight_format", "rows"),
    [
        ((6144, 4096), "bfloat16", 16),
        ((2048, 2048), "bfloat16", 16),
        ((1024, 2048), "bfloat16", 0),
        ((8192, 1000), "bfloat16", 0),
        ((8192, 2048), "fp8 token", 8),
        ((8192, 2112), "fp8 tensor", 0),
        ((2048, 2048), "fp8 block", 0),
    ],
)
def test_the_streaming_kernel_is_for_large_weights_of_whole_lines(
    shape: tuple[int, int], weight_format: str, rows: int
) -> None:
    assert stream_rows(LinearDesc(weight_format, torch.bfloat16, *shape)) == rows


@pytest.fixture
def kernel() -> Callable[..., Tensor]:
    kernel: Callable[..., Tensor] = csrc_kernels().skinny_linear.default
    return kernel


def draw(
    rows: int, n: int, k: int, scale: float = 1.0, bias: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """x as a slice of wider rows, so that its stride is not its width."""
    x = (scale * torch.randn(rows, k + 24, device="cuda")).bfloat16()[:, 8 : k + 8]
    weight = (torch.randn(n, k, device="cuda") * k**-0.5).bfloat16()
    return x, weight, torch.randn(n, device="cuda").bfloat16() if bias else None


SHAPES = [(1, 64), (37, 64), (130, 192), (333, 576), (1000, 960), (4096, 4096), (5121, 1088)]
SHAPES += [(6144, 4096), (8200, 512), (28672, 256), (4096, 14336), (2048, 8192)]
SHAPES += [(333, 8192), (70, 16384)]  # four and eight blocks share a tile


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_streaming_kernel_is_near_float64(
    n: int, k: int, kernel: Callable[..., Tensor], fw_seed: int
) -> None:
    torch.manual_seed(fw_seed)
    for rows in (1, 2, 3, 7, 8, 9, 15, 16, 17, 25, 31, 32):
        scale = 1e4 if rows % 5 == 0 else 1.0
        args = draw(rows, n, k, scale, bias=rows % 2 == 1)
        poison = torch.full((rows, n), torch.nan, device="cuda", dtype=torch.bfloat16)
        del poison  # the output takes its place
        got = kernel(*args)
        error = relative_error(got, *args)
        assert error <= 2.0**-8, f"{rows} rows: {error}, --fw-seed={fw_seed}"
        assert torch.equal(got, kernel(*args)), f"{rows} rows: another result when repeated"


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (6144, 4096), (28672, 512)])
def test_a_token_has_one_result_in_every_batch_of_its_class(
    n: int, k: int, kernel: Callable[..., Tensor]
) -> None:
    x, weight, _ = draw(32, n, k)
    for few, many in ((1, 2), (3, 8), (5, 8), (9, 16), (17, 32)):
        assert torch.equal(kernel(x[:few], weight, None), kernel(x[:many], weight, None)[:few])


@pytest.mark.gpu
def test_weights_made_by_the_kernel_just_before_are_read_whole(
    kernel: Callable[..., Tensor],
) -> None:
    x, weight, _ = draw(4, 4096, 4096)
    target = torch.empty_like(weight)
    for _ in range(50):
        source = weight * random.choice([-1.0, 0.5, 2.0])
        expected = kernel(x, source, None)
        target.fill_(torch.nan)
        target.copy_(source)
        assert torch.equal(kernel(x, target, None), expected)


WIDTHS = (64, 1024, 2048, 4096, 6144, 14336)


def run_chain(
    kernel: Callable[..., Tensor],
    x: Tensor,
    weights: list[Tensor],
    side: torch.cuda.Stream,
    seed: int,
) -> list[Tensor]:
    """Each linear reads the one before it; sometimes another kernel or a join comes between."""
    rng = random.Random(seed)
    results = [x]
    for weight in weights:
        x = results[-1]
        between = rng.randrange(4)
        if between == 0:
            x = x * 0.5
        elif between == 1:
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                y = x * 2.0
            main.wait_stream(side)
            x = y
        results.append(kernel(x, weight, None))
    return results[1:]


@pytest.mark.gpu
def test_chains_in_a_graph_give_the_bits_of_single_launches(
    kernel: Callable[..., Tensor], fw_seed: int
) -> None:
    """In a graph kernels overlap: a read too early, or a write too early, changes bits."""
    torch.manual_seed(fw_seed)
    rng = random.Random(fw_seed)
    pool = {(n, k): draw(1, n, k)[1] for n in WIDTHS for k in WIDTHS if n * k <= 6144 * 4096}
    side = torch.cuda.Stream()
    for chain in range(200):
        rows, widths = rng.randint(1, 32), [rng.choice(WIDTHS[:-1])]
        while len(widths) < 10:
            widths.append(rng.choice([n for n in WIDTHS if (n, widths[-1]) in pool]))
        weights = [pool[n, k] for k, n in itertools.pairwise(widths)]
        x = torch.randn(rows, widths[0], device="cuda").bfloat16()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run_chain(kernel, x, weights, side, chain)
        for _ in range(2):
            x.normal_()
            expected = run_chain(kernel, x, weights, side, chain)
            graph.replay()
            for depth, (got, want) in enumerate(zip(results, expected, strict=True)):
                assert torch.equal(got, want), (
                    f"chain {chain}, {rows} rows, widths {widths}: linear {depth} differs, "
                    f"--fw-seed={fw_seed}"
                )


@pytest.mark.gpu
def test_streaming_kernel_refuses_what_it_cannot_run(kernel: Callable[..., Tensor]) -> None:
    x, weight, _ = draw(4, 256, 128)
    with pytest.raises(RuntimeError, match="33 rows, expected 32"):
        kernel(weight.new_zeros(33, 128), weight, None)
    with pytest.raises(RuntimeError, match="multiple of 64"):
        kernel(x[:, :72], weight[:, :72], None)
    with pytest.raises(RuntimeError, match=r"x .* multiple of 16"):
        kernel(weight.new_zeros(4, 132)[:, 4:], weight, None)
    with pytest.raises(RuntimeError, match="differ in in_features"):
        kernel(x[:, :64], weight, None)
    with pytest.raises(RuntimeError, match=r"weight .* bfloat16"):
        kernel(x, weight.float(), None)
    with pytest.raises(RuntimeError, match="bias has shape"):
        kernel(x, weight, weight[0])
    assert kernel(x[:0], weight, None).shape == (0, 256)


@pytest.mark.gpu
def test_rows_that_the_kernel_cannot_read_go_to_cublas(kernel: Callable[..., Tensor]) -> None:
    skinny = OP.overload("skinny")
    wide = torch.randn(65, 2052, device="cuda").bfloat16()
    weight = torch.randn(2048, 2048, device="cuda").bfloat16()
    for x in (wide[:4, 4:], wide[:4, :2048], wide[:, :2048].contiguous()):
        assert torch.equal(skinny(x, weight, None), F.linear(x, weight))
