"""The persistent kernel of gated layers of many rows of bfloat16 beside float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.csrc import csrc_kernels
from tests.ops.replays import check_replays

pytestmark = pytest.mark.gpu

ROWS = (1, 17, 64, 65, 128, 129, 200, 256, 300, 700)
# Tiles of 256, 224, 192 and 128 rows of the weight, then their edges.
SHAPES = [
    (32768, 256),
    (28672, 512),
    (24576, 256),
    (8192, 1024),
    (4096, 4096),
    (1008, 320),
    (16, 64),
    (272, 128),
]


@pytest.fixture
def kernels() -> Any:
    return csrc_kernels()


def draw(rows: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    """x, a slice of wider rows, and a weight."""
    x = torch.randn(rows, k + 24, device="cuda").bfloat16()[:, 8 : k + 8]
    return x, (torch.randn(n, k, device="cuda") * k**-0.5).bfloat16()


def activated(sums: Tensor, activation: str) -> Tensor:
    """The result in float64 of sums in float64, which are rounded before they are activated."""
    gate, up = sums.bfloat16().double().chunk(2, -1)
    gelu = activation == "gelu_tanh"
    act = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else gate * gate.sigmoid()
    return act * up


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_it_is_near_float64(n: int, k: int, activation: str, kernels: Any, fw_seed: int) -> None:
    torch.manual_seed(fw_seed)
    for rows in ROWS:
        x, weight = draw(rows, n, k)
        bias = torch.randn(n, device="cuda").bfloat16() if rows % 2 else None
        exact = x.double() @ weight.double().T
        exact = activated(exact if bias is None else exact + bias.double(), activation)
        got = kernels.persistent_linear(x, weight, bias, activation)
        assert got.dtype == torch.bfloat16 and got.shape == exact.shape
        # Half a unit in the last place, of the least number of a binade; sums add to it, and a gate
        # or an up that is rounded to its other neighbour.
        error = float(((got.double() - exact).abs() - exact.abs() * 2.0**-6).max().nan_to_num(9.0))
        assert error <= 1e-2, f"{rows} rows: {error} too much, --fw-seed={fw_seed}"
        again = kernels.persistent_linear(x, weight, bias, activation)
        assert torch.equal(got, again), f"{rows} rows: another result when repeated"


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_row_has_one_result_in_every_batch(activation: str, kernels: Any) -> None:
    x, weight = draw(700, 4096, 1024)
    whole = kernels.persistent_linear(x, weight, None, activation)
    for rows in ROWS[:-1]:
        part = kernels.persistent_linear(x[:rows], weight, None, activation)
        assert torch.equal(part, whole[:rows])


def test_overlapping_in_a_graph_it_gives_the_bits_of_single_launches(
    kernels: Any, fw_seed: int
) -> None:
    """Each reads what the kernel ahead of it, which may still run, writes."""
    torch.manual_seed(fw_seed)
    layers = [(draw(1, 4096, 1024)[1], draw(1, 2048, 2048)[1]) for _ in range(4)]

    def layers_of(x: Tensor) -> list[Tensor]:
        results = []
        for first, second in layers:
            y = kernels.persistent_linear(x, first, None, "silu")
            x = kernels.persistent_linear(y, second, None, "gelu_tanh")
            results += [y, x]
        return results

    for rows in ROWS[:-1]:
        x = torch.randn(rows, 1024, device="cuda").bfloat16()
        check_replays(layers_of, x, f"{rows} rows, --fw-seed={fw_seed}")


def test_it_refuses_what_it_cannot_run(kernels: Any) -> None:
    x, weight = draw(65, 256, 128)
    with pytest.raises(RuntimeError, match="expected a multiple of 8 outputs"):
        kernels.persistent_linear(x, weight[:100], None, "silu")
    with pytest.raises(RuntimeError, match="expected a multiple of 8 outputs"):
        kernels.persistent_linear(x, weight[:24], None, "silu")
    with pytest.raises(RuntimeError, match="activation is 'relu'"):
        kernels.persistent_linear(x, weight, None, "relu")
    with pytest.raises(RuntimeError, match="expected in_features a multiple of 64"):
        kernels.persistent_linear(x[:, :32], weight[:, :32].contiguous(), None, "silu")
