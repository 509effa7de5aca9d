"""Which sums over ranks go over peer memory, decided without a GPU."""

from __future__ import annotations

import pytest
import torch

from fusewright import ops
from fusewright.ops.chain import overlap as _overlap
from fusewright.ops.chain.kernels import OVERLAPPED
from fusewright.ops.collective import peer_memory as _peer_memory

META = torch.device("meta")
PAIR = "linear(weight) > add_norm(weight, eps=1e-05, reduce=True) > linear(weight)"
ADD_NORM = ops.BY_NAME["all_reduce_add_rms_norm"]


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


@pytest.mark.parametrize(
    ("shape", "pushed"),
    [
        ((1, 4096), True),
        ((8192, 4096), True),
        ((8193, 4096), False),
        ((3, 12), False),
        ((0, 64), True),
    ],
)
def test_the_device_table_and_the_inbox_limit_what_is_pushed(
    shape: tuple[int, int], pushed: bool
) -> None:
    """Each of two ranks sends 64 MiB at most: 8192 rows of 4096."""
    assert _peer_memory.part_bytes(2) == 8192 * 4096 * 2
    x = rows(*shape)
    assert bool(_peer_memory.shots(x, "any")) is pushed
    implementation = ops.BY_NAME["all_reduce"].implementation("cuda")
    assert implementation.runs is not None
    assert implementation.runs(x, "any")[0].startswith("push") is pushed


@pytest.mark.parametrize(
    ("world", "num_rows", "shots"),
    [
        *((2, 256, 1), (2, 257, 2), (2, 8192, 2), (2, 8193, 0)),
        *((4, 16, 1), (4, 17, 2), (4, 4096, 2), (4, 4097, 0), (8, 16, 1), (8, 17, 2)),
    ],
)
def test_larger_sums_are_sent_twice(world: int, num_rows: int, shots: int) -> None:
    names = ("torch.distributed's sum", "push", "push twice")
    assert _peer_memory.choose_over(world, 4096, 2, num_rows, META).name == names[shots]
    odd = num_rows % 2
    assert _peer_memory.choose_over(world, 12, 2, num_rows, META).name == names[not odd and shots]


def test_what_is_not_connected_is_not_pushed() -> None:
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    assert _peer_memory.world_of("nobody") == 0
    assert not _peer_memory.shots(x, "nobody")
    why = "push: the ranks are not connected over peer memory"
    assert _peer_memory.choose_sum(x, "nobody").reason.startswith(why)
    _peer_memory.abort("nobody")  # nothing waits


@pytest.mark.parametrize(
    ("dtype", "columns", "sm", "csrc", "reason"),
    [
        (torch.bfloat16, 4096, 90, True, ""),
        (torch.float16, 16384, 90, True, ""),
        (torch.bfloat16, 4096, 80, True, "built for SM 9.0, not 8.0"),
        (
            torch.float32,
            4096,
            90,
            True,
            "x is torch.float32: the kernels take bfloat16 and float16",
        ),
        (torch.bfloat16, 4096, 90, False, "csrc is not built into this installation"),
        (torch.bfloat16, 12, 90, True, "12 columns: not a multiple of 8 up to 16384"),
    ],
)
def test_a_norm_behind_a_sum_says_why_it_has_no_kernel(
    dtype: torch.dtype, columns: int, sm: int, csrc: bool, reason: str
) -> None:
    x, weight = rows(3, columns, dtype=dtype), rows(columns, dtype=dtype)
    described = ADD_NORM.describe((x, x, weight, 1e-5, None, "any"), sm=sm, csrc=csrc)
    desc = ops.OpDesc(described.op, described.args, "cuda", sm, csrc)
    assert ADD_NORM.implementation("cuda").supports(desc) == reason


def test_launches_are_named_by_the_number_of_rows() -> None:
    runs = ADD_NORM.implementation("cuda").runs
    assert runs is not None

    def names(num_rows: int) -> tuple[str, ...]:
        x = rows(num_rows, 4096)
        return runs(x, x, rows(4096), 1e-5, None, "any")

    assert names(1) == ("push + add_rms_norm",)
    assert names(257) == ("push twice + add_rms_norm",)
    assert names(8193) == ("torch.distributed's sum", "_rms_norm_kernel")


@pytest.mark.parametrize(
    ("num_rows", "next_features", "hidden", "world", "overlapped"),
    [
        (2560, 3072, 4096, 2, False),
        (2561, 3072, 4096, 2, True),
        (8192, 3072, 4096, 2, True),
        (8192, 14336, 4096, 2, False),  # no gain in front of so large a layer
        (8192, 3072, 8192, 2, False),  # more than the window holds
        (8192, 3072, 4096, 4, False),  # not measured
    ],
)
def test_transfers_are_hidden_where_that_was_measured_to_gain(
    num_rows: int, next_features: int, hidden: int, world: int, overlapped: bool
) -> None:
    assert _overlap.overlaps(num_rows, next_features, hidden, world) is overlapped
    runs = ops.BY_NAME["chain_over_ranks"].implementation("cuda").runs
    assert runs is not None
    if world == 2:
        weights = [rows(hidden, 512), rows(hidden), rows(next_features, hidden)]
        named = runs(rows(num_rows, 512), rows(num_rows, hidden), weights, PAIR, "any")
        assert (named == (OVERLAPPED,)) is overlapped


@pytest.mark.parametrize(
    ("num_rows", "inner", "in_layer"),
    [(1, 2048, True), (8, 2048, True), (9, 2048, False), (8, 64, True)],
)
def test_few_rows_are_summed_in_the_layer_that_makes_them(
    num_rows: int, inner: int, in_layer: bool
) -> None:
    """Also if its weight is small: what is joined saves launches."""
    runs = ops.BY_NAME["chain_over_ranks"].implementation("cuda").runs
    assert runs is not None
    weights = [rows(4096, inner), rows(4096), rows(3072, 4096)]
    named = runs(rows(num_rows, inner), rows(num_rows, 4096), weights, PAIR, "any")
    chain = ("skinny_linear, push, add", "norm, skinny_linear")
    assert (named == chain) is in_layer
    assert ("push + add_rms_norm" in named) is not in_layer


@pytest.mark.parametrize("world", [2, 4, 8])
def test_parts_of_the_rows_are_whole_tiles_and_cover_them(world: int) -> None:
    for num_rows in range(2000, 8193, 61):
        part = _overlap.part_rows(num_rows, world)
        assert part % 128 == 0 and (part - 128) * world < num_rows <= part * world


def test_numbers_of_ranks_without_kernels_are_named() -> None:
    assert _peer_memory.why_no_peers([0, 1, 2]) == "3 ranks: the kernels serve 2, 4, 8"
