"""The kernels of FP8 layers for more rows, of clusters and the persistent one, beside float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.ops.core.float8 import E4M3
from tests.ops.csrc import csrc_kernels
from tests.ops.replays import check_replays
from tests.ops.test_persistent_linear import activated
from tests.ops.test_skinny import dequantized, draw_fp8

pytestmark = pytest.mark.gpu

SCHEMES = ("tensor", "token")
CLUSTER_ROWS = (1, 7, 16, 17, 32, 40, 64)
# Shapes of models come first, then edges of tiles and clusters of other sizes.
CLUSTER_SHAPES = [(4096, 4096), (6144, 4096), (4096, 14336)]
CLUSTER_SHAPES += [(1024, 1536), (264, 512), (7392, 1024), (1680, 7168), (8, 256)]
GATED_ROWS = (1, 17, 64, 65, 128, 129, 200, 256, 700)
# Tiles of 256, 224, 192 and 128 rows of the weight, then their edges.
GATED_SHAPES = [(32768, 512), (28672, 512), (24576, 1024), (8192, 1024), (4096, 4096)]
GATED_SHAPES += [(1008, 512), (16, 128), (272, 256)]


@pytest.fixture
def kernels() -> Any:
    return csrc_kernels()


def sums_of(operands: tuple[Any, ...], bias: Tensor | None) -> Tensor:
    x, weight, _, x_scale, weight_scale = operands
    exact = dequantized(x, x_scale) @ dequantized(weight, weight_scale).T
    return exact if bias is None else exact + bias.double()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("n", "k"), CLUSTER_SHAPES)
def test_clusters_are_near_float64(n: int, k: int, scheme: str, kernels: Any, fw_seed: int) -> None:
    torch.manual_seed(fw_seed)
    for rows in CLUSTER_ROWS:
        operands = draw_fp8(rows, n, k, scheme)
        x, weight, _, *scales = operands
        bias = torch.randn(n, device="cuda").bfloat16() if rows % 2 else None
        exact = sums_of(operands, bias)
        got = kernels.cluster_linear(x, weight, bias, *scales)
        assert got.dtype == torch.bfloat16 and got.shape == (rows, n)
        # Half a unit in the last place, of the least number of a binade; sums of 128 products,
        # which tensor cores round to 14 bits, add to it.
        near = (got.double() - exact).abs() - exact.abs() * 2.0**-8
        error = float((near.max() / exact.abs().max()).nan_to_num(9.0))
        assert error <= 1e-3, f"{rows} rows: {error} too much, --fw-seed={fw_seed}"
        again = kernels.cluster_linear(x, weight, bias, *scales)
        assert torch.equal(got, again), f"{rows} rows: another result when repeated"


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("n", "k"), GATED_SHAPES)
def test_gated_layers_are_near_float64(
    n: int, k: int, scheme: str, activation: str, kernels: Any, fw_seed: int
) -> None:
    torch.manual_seed(fw_seed)
    for rows in GATED_ROWS:
        x, weight, _, x_scale, weight_scale = draw_fp8(rows, n, k, scheme)
        x_scale = x_scale * k**-0.5  # gates within the bend of the activation
        bias = torch.randn(n, device="cuda").bfloat16() if rows % 2 else None
        exact = activated(sums_of((x, weight, None, x_scale, weight_scale), bias), activation)
        got = kernels.persistent_linear(x, weight, bias, activation, x_scale, weight_scale)
        assert got.dtype == torch.bfloat16 and got.shape == exact.shape
        # The bound is that of bfloat16: gates and ups may be rounded to their other neighbours.
        error = float(((got.double() - exact).abs() - exact.abs() * 2.0**-6).max().nan_to_num(9.0))
        assert error <= 4e-2, f"{rows} rows: {error} too much, --fw-seed={fw_seed}"
        again = kernels.persistent_linear(x, weight, bias, activation, x_scale, weight_scale)
        assert torch.equal(got, again), f"{rows} rows: another result when repeated"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_row_has_one_result_in_every_batch(scheme: str, kernels: Any) -> None:
    x, weight, _, x_scale, weight_scale = draw_fp8(700, 4096, 1024, scheme)

    def operands(rows: int) -> tuple[Tensor, Tensor, Tensor]:
        own = x_scale if scheme == "tensor" else x_scale[:rows].t().contiguous().t()
        return x[:rows], own, weight_scale

    def gated(rows: int) -> Tensor:
        part, *scales = operands(rows)
        y: Tensor = kernels.persistent_linear(part, weight, None, "silu", *scales)
        return y

    def by_clusters(rows: int) -> Tensor:
        part, *scales = operands(rows)
        y: Tensor = kernels.cluster_linear(part, weight, None, *scales)
        return y

    for run, most in ((gated, 700), (by_clusters, 64)):
        whole = run(most)
        for rows in CLUSTER_ROWS:
            assert torch.equal(run(rows), whole[:rows])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_overlapping_in_a_graph_they_give_the_bits_of_single_launches(
    scheme: str, kernels: Any, fw_seed: int
) -> None:
    """Each reads what the kernel ahead of it, which may still run, writes."""
    torch.manual_seed(fw_seed)
    for rows in (9, 64):
        up, down = (draw_fp8(rows, n, k, scheme) for n, k in ((4096, 1024), (1024, 2048)))

        def layers_of(x: Tensor, up: Any = up, down: Any = down) -> list[Tensor]:
            results = []
            for _ in range(4):
                q = (x * 100).clamp(-448, 448).to(E4M3)
                y = kernels.persistent_linear(q, up[1], None, "silu", *up[3:])
                again = kernels.persistent_linear(q, up[1], None, "silu", *up[3:])
                q = (y * 1e-2).clamp(-448, 448).to(E4M3)
                x = kernels.cluster_linear(q, down[1], None, *down[3:]) * 1e-3
                results += [y, again, x]
            return results

        x = torch.randn(rows, 1024, device="cuda").bfloat16()
        check_replays(layers_of, x, f"{rows} rows, --fw-seed={fw_seed}")


def test_they_refuse_what_they_cannot_run(kernels: Any) -> None:
    x, weight, _, x_scale, weight_scale = draw_fp8(65, 256, 512, "token")
    with pytest.raises(RuntimeError, match="has 65 rows, expected 64 or fewer"):
        kernels.cluster_linear(x, weight, None, x_scale, weight_scale)
    with pytest.raises(RuntimeError, match="one of x_scale and weight_scale is given"):
        kernels.cluster_linear(x[:9], weight, None, x_scale[:9])
    with pytest.raises(RuntimeError, match="and 256 in_features or more"):
        narrow = x[:9, :128], weight[:, :128].contiguous()
        kernels.cluster_linear(*narrow, None, x_scale[:9], weight_scale)
    x, weight, _, x_scale, weight_scale = draw_fp8(9, 384, 512, "block")
    with pytest.raises(RuntimeError, match="scales of blocks, expected one for all"):
        kernels.cluster_linear(x, weight, None, x_scale, weight_scale)
    with pytest.raises(RuntimeError, match="scales of blocks, expected one for all"):
        kernels.persistent_linear(x, weight, None, "silu", x_scale, weight_scale)
