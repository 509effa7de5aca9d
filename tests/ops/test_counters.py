"""What kernels keep between launches: each stream its own, graphs one more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusewright.ops import BY_NAME
from fusewright.ops.core.counters import counters, zeros_between_launches
from fusewright.ops.launches import linear_fp8 as kernels
from tests.ops.replays import on_two_streams

ROWS, OUT, IN = 8, 512, 14336


def test_what_is_kept_is_kept_by_device_size_and_type() -> None:
    device = torch.device("cpu")
    kept = zeros_between_launches(device, 8, torch.int64)
    assert kept.shape == (8,) and not kept.any()
    kept[3] = 5
    assert zeros_between_launches(device, 8, torch.int64).tolist() == [0, 0, 0, 5, 0, 0, 0, 0]
    kept[3] = 0
    for numel, dtype in ((9, torch.int64), (8, torch.int32)):
        other = zeros_between_launches(device, numel, dtype)
        assert other.data_ptr() != kept.data_ptr() and other.dtype == dtype


@pytest.mark.gpu
def test_streams_and_graphs_keep_their_own() -> None:
    device = torch.device("cuda")
    of_default = counters(device)
    assert counters(torch.device("cuda", torch.cuda.current_device())) is of_default
    with torch.cuda.stream(torch.cuda.Stream()):
        assert counters(device).data_ptr() != of_default.data_ptr()
    found: list[Tensor] = []
    graph = torch.cuda.CUDAGraph()
    for _ in range(2):
        with torch.cuda.graph(graph):
            found.append(counters(device))
            if len(found) == 1:
                with pytest.raises(RuntimeError, match="first asked for inside a CUDA graph"):
                    zeros_between_launches(device, 12_347, torch.int32)
            torch.zeros(1, device=device)
        graph.reset()
    assert found[0] is found[1] and found[0].data_ptr() != of_default.data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "a graph beside"])
def test_split_linears_of_two_streams_at_the_same_time(captured: bool) -> None:
    tile = kernels.tile_of("tensor", ROWS, OUT)
    assert kernels.splits_of(tile, ROWS, OUT, IN) > 1
    count, one = 200, torch.full((1, 1), 2.0**-6, device="cuda")
    shapes = ((ROWS, IN), (OUT, IN))
    given = [
        [torch.randn(shape, device="cuda").to(torch.float8_e4m3fn) for shape in shapes]
        for _ in range(2)
    ]
    run = BY_NAME["linear"].overload("triton")

    def linear(which: int) -> Tensor:
        x, weight = given[which]
        y: Tensor = run(x, weight, None, one, one, torch.bfloat16)
        return y

    wanted = [linear(which) for which in (0, 1)]
    assert all(torch.equal(linear(which), wanted[which]) for which in (0, 1))
    ys: list[list[Tensor]] = [[], []]
    graph = torch.cuda.CUDAGraph() if captured else None
    if graph is not None:
        with torch.cuda.graph(graph):
            ys[0] = [linear(0) for _ in range(count)]
    on_two_streams(lambda which, _: ys[which].append(linear(which)), count, graph)
    for which in (0, 1):
        wrong = sum(not torch.equal(y, wanted[which]) for y in ys[which])
        assert not wrong, f"{wrong} of {count} linears of stream {which}"
