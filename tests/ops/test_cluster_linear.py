"""The kernel of clusters, which multiplies up to 64 rows of bfloat16, beside float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.csrc import csrc_kernels
from tests.ops.replays import check_replays

pytestmark = pytest.mark.gpu

ROWS = (1, 7, 16, 17, 32, 33, 64)
# Shapes of models come first, then tiles of 8, 7, 6, 5, 3 and 2 blocks, and few rows.
SHAPES = [(2048, 4096), (5120, 2048), (6144, 4096), (4096, 14336), (3072, 2048)]
SHAPES += [(1680, 512), (1680, 448), (1800, 2304), (1720, 4032), (4368, 192), (7392, 1024)]
SHAPES += [(8, 128), (136, 256)]


@pytest.fixture
def kernels() -> Any:
    return csrc_kernels()


def draw(rows: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    """x, a slice of wider rows, and a weight."""
    x = torch.randn(rows, k + 24, device="cuda").bfloat16()[:, 8 : k + 8]
    return x, (torch.randn(n, k, device="cuda") * k**-0.5).bfloat16()


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_it_is_near_float64(n: int, k: int, kernels: Any, fw_seed: int) -> None:
    torch.manual_seed(fw_seed)
    for rows in ROWS:
        x, weight = draw(rows, n, k)
        bias = torch.randn(n, device="cuda").bfloat16() if rows % 2 else None
        exact = x.double() @ weight.double().T
        exact = exact if bias is None else exact + bias.double()
        got = kernels.cluster_linear(x, weight, bias)
        assert got.dtype == torch.bfloat16 and got.shape == (rows, n)
        # Half a unit in the last place, of the least number of a binade; sums add to it.
        error = float(((got.double() - exact).abs() - exact.abs() * 2.0**-8).max().nan_to_num(9.0))
        assert error <= 1e-4, f"{rows} rows: {error} too much, --fw-seed={fw_seed}"
        again = kernels.cluster_linear(x, weight, bias)
        assert torch.equal(got, again), f"{rows} rows: another result when repeated"


@pytest.mark.parametrize(("n", "k"), SHAPES[:5])
def test_a_row_has_one_result_in_every_batch(n: int, k: int, kernels: Any) -> None:
    x, weight = draw(64, n, k)
    whole = kernels.cluster_linear(x, weight, None)
    for rows in ROWS[:-1]:
        assert torch.equal(kernels.cluster_linear(x[:rows], weight, None), whole[:rows])


def test_overlapping_in_a_graph_it_gives_the_bits_of_single_launches(
    kernels: Any, fw_seed: int
) -> None:
    """Each reads what the kernel ahead of it, which may still run, writes."""
    torch.manual_seed(fw_seed)
    layers = [(draw(1, 5120, 2048)[1], draw(1, 2048, 4096)[1]) for _ in range(4)]

    def run(x: Tensor) -> list[Tensor]:
        results = []
        for qkv, o in layers:
            y = kernels.cluster_linear(x, qkv, None)
            results.append(y)
            x = kernels.cluster_linear(y[:, :4096], o, None)
            if x.shape[0] <= 32:
                x = kernels.skinny_linear(x, qkv, None)[:, :2048]
            results.append(x)
        return results

    for rows in ROWS:
        x = torch.randn(rows, 2048, device="cuda").bfloat16()
        check_replays(run, x, f"{rows} rows, --fw-seed={fw_seed}")


def test_it_refuses_what_it_cannot_run(kernels: Any) -> None:
    x, weight = draw(65, 256, 128)
    with pytest.raises(RuntimeError, match="has 65 rows, expected 64 or fewer"):
        kernels.cluster_linear(x, weight, None)
    with pytest.raises(RuntimeError, match="expected a multiple of 8 rows up to 7392"):
        kernels.cluster_linear(x[:9], weight[:100], None)
    with pytest.raises(RuntimeError, match="expected a multiple of 8 rows up to 7392"):
        kernels.cluster_linear(x[:9], weight.repeat(29, 1), None)
    with pytest.raises(RuntimeError, match="and 128 in_features or more"):
        kernels.cluster_linear(x[:9, :64], weight[:, :64].contiguous(), None)
    with pytest.raises(RuntimeError, match=r"bias has shape \[2\], expected a contiguous \[256\]"):
        kernels.cluster_linear(x[:9], weight, weight[0, :2])
    with pytest.raises(RuntimeError, match="bias is not on an address that is a multiple of 16"):
        kernels.cluster_linear(x[:9], weight, weight.flatten()[1:257])
