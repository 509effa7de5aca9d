"""csrc's collectives over peer memory, between processes; where GPUs are few, ranks share one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fusewright import ops
from fusewright.ops.chain.kernels import OVERLAP, part_at
from fusewright.ops.chain.stages import Call
from fusewright.ops.collective import peer_memory as _peer_memory
from fusewright.ops.collective.all_reduce import CASES_GROUP
from fusewright.ops.conformance import check_case
from fusewright.ops.core.cuda import load_cuda_library
from tests.ranks import in_ranks, name_world

pytestmark = [pytest.mark.gpu, pytest.mark.whole_gpu]

REDUCING = [op for op in ops.ALL_OPS if op.collective and op.name != "all_gather"]
SHAPES = [(1, 4096), (3, 8), (7, 2048), (33, 4096), (5, 16384), (260, 1024), (64, 4096)]

# Rows, sizes of the layers, activation, biases, and of FP8 whether scales are of blocks; with tiles
# of few and many rows, whole and split.
CHAINS = [
    (1, 2048, 4096, 3072, None, False, None),
    (2, 7168, 4096, 6144, None, True, None),
    (5, 2048, 4096, 2 * 3584, "silu", False, None),
    (8, 1024, 8192, 2048, None, True, None),
    (16, 4096, 4096, 2 * 2048, "gelu_tanh", True, None),
    (13, 2048, 3072, 2048, None, False, None),
    (1, 2048, 4096, 3072, None, True, False),
    (8, 7168, 4096, 2 * 3584, "silu", False, False),
    (2, 2048, 4096, 3072, None, False, True),
    (7, 7168, 8192, 2048, None, True, True),
]


@contextmanager
def connected(rank: int, world: int) -> Iterator[torch.device]:
    """This rank's GPU, connected with the others' under the name of the cases' group."""
    name_world(CASES_GROUP)
    devices = [each % torch.cuda.device_count() for each in range(world)]
    torch.cuda.set_device(devices[rank])
    assert not _peer_memory.why_no_peers(devices)
    store = dist.PrefixStore("memory", dist.distributed_c10d._get_default_store())
    with _peer_memory.peer_memory(CASES_GROUP, store, rank, devices):
        yield torch.device("cuda", devices[rank])
        torch.cuda.synchronize()
        dist.barrier()


def of_rank(rank: int, shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    """The rows that a rank sends, with negative zeros: the same wherever they are made."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(shape, generator=generator)
    x[x.abs() < 0.1] = -0.0
    return x.to(dtype)


def total_of(world: int, shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    """The sum in float32, in the order of the ranks, rounded once."""
    total = of_rank(0, shape, seed, dtype).float()
    for rank in range(1, world):
        total += of_rank(rank, shape, seed, dtype).float()
    return total.to(dtype)


def conformance(rank: int, world: int) -> dict[str, int]:
    """Every case of every op that sums, against the reference over gloo, which gathers no tensors
    of a GPU."""
    checked: dict[str, int] = {}
    with connected(rank, world) as device:
        for op in REDUCING:
            for dtype in _peer_memory.DTYPES:
                generator = torch.Generator(device).manual_seed(100 * rank + 7)
                for case in op.cases(dtype, device, generator):
                    described = op.describe(case.args, sm=90, csrc=True)
                    if op.implementation("cuda").supports(described):
                        continue
                    check_case(op, op.overload("cuda"), case, op.tolerance(case, dtype))
                    served = _peer_memory.shots(case.args[0], CASES_GROUP) > 0
                    checked[op.name] = checked.get(op.name, 0) + served
    return checked


def sums(rank: int, world: int) -> list[bool]:
    """Sums, by one shot and by two, and gathers have the bits that the order of the ranks gives."""
    right = []
    with connected(rank, world) as device:
        for seed, shape in enumerate(SHAPES):
            for dtype in _peer_memory.DTYPES:
                x = of_rank(rank, shape, seed, dtype).to(device)
                for two_shots in (False, True):
                    summed = torch.ops.fw_cuda.peer_all_reduce.default(x, CASES_GROUP, two_shots)
                    right.append(torch.equal(summed.cpu(), total_of(world, shape, seed, dtype)))
                gathered = torch.ops.fw_cuda.peer_all_gather.default(x, CASES_GROUP)
                parts = [of_rank(each, shape, seed, dtype) for each in range(world)]
                right.append(torch.equal(gathered.cpu(), torch.cat(parts, dim=1)))
    return right


def norm_of(given: tuple[Tensor, ...], rows: int, two_shots: bool) -> tuple[Tensor, Tensor]:
    """The norm of the first rows, and the sum that it is of."""
    x, residual, weight = given
    more = (None, None, -1, CASES_GROUP, two_shots)
    run = torch.ops.fw_cuda.peer_all_reduce_norm.default
    y, _, total = run(x[:rows], residual[:rows], weight, 1e-5, *more)
    return y, total


def normed(rank: int, world: int) -> list[bool]:
    """Sums with add and norm have the same bits in a step of few rows, a row a block, in one of
    many, and by two shots."""
    right = []
    with connected(rank, world) as device:
        for seed, hidden in enumerate((256, 1024 + 64, 4096, 8192)):
            for dtype in _peer_memory.DTYPES:
                x = of_rank(rank, (300, hidden), seed, dtype).to(device)
                residual = of_rank(7, (300, hidden), seed, dtype).to(device)
                given = (x, residual, residual[0] + 1)
                whole = norm_of(given, 300, False)
                for rows, two_shots in ((1, False), (17, False), (264, False), (265, True)):
                    pairs = zip(norm_of(given, rows, two_shots), whole, strict=True)
                    right.append(all(torch.equal(few, all_[:rows]) for few, all_ in pairs))
    return right


def replays(rank: int, world: int) -> int:
    """Graphs of several sizes, replayed an odd number of times each and interleaved with eager
    calls; returns how many results differed from the first."""
    differing = 0
    with connected(rank, world) as device:
        weight = torch.ones(4096, dtype=torch.bfloat16, device=device)

        def norm(x: Tensor) -> Any:
            return torch.ops.fw_cuda.peer_all_reduce_norm.default(
                x, x, weight, 1e-5, None, None, -1, CASES_GROUP, len(x) in (17, 64)
            )

        captured = []
        for rows in (1, 3, 64, 17):
            x = of_rank(rank, (rows, 4096), rows, torch.bfloat16).to(device)
            first = norm(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = norm(x)
            captured.append((graph, results, [t.clone() for t in first], x))
        for turn in range(15 if world > torch.cuda.device_count() else 5000):
            graph, results, first, x = captured[turn * 7 % len(captured)]
            for _ in range(1 + turn % 3):
                graph.replay()
            made = norm(x) if turn % 5 == 0 else results
            pairs = zip((made[0], made[2]), (first[0], first[2]), strict=True)
            differing += sum(not torch.equal(a, b) for a, b in pairs)
    return differing


def overlapped(rank: int, world: int) -> list[str]:
    """Two layers with hidden transfers, many times with changing sizes, eager and replayed, against
    the layers in turn; returns what differed."""
    wrong = []
    with connected(rank, world) as device:
        generator = torch.Generator().manual_seed(5)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).bfloat16().to(device)

        def visit(op: ops.SemanticOp, *args: Any) -> Any:
            if op.collective:
                summed = torch.ops.fw_cuda.peer_all_reduce.default(args[0], CASES_GROUP)
                return ops.BY_NAME["add_rms_norm"].reference(summed, *args[1:5])
            return op.reference(*args)

        def run(call: Call) -> tuple[Tensor, Tensor]:
            state = OVERLAP.run(part_at(call, 0, 3, call.state))
            assert state is not None
            return state.x, state.total

        def check(name: str, call: Call, found: tuple[Tensor, Tensor]) -> None:
            state = call.fold(visit)
            wanted = (state.x, state.total)
            for which, got, want in zip(("y", "sum"), found, wanted, strict=True):
                if not torch.allclose(got.float(), want.float(), atol=6e-2, rtol=5e-2):
                    wrong.append(f"{name}: {which} by {(got - want).abs().max().item()}")

        for turn, (rows, activation, biased) in enumerate(
            [(2688, None, True), (3001, "silu", False), (2690, "silu", True), (4096, None, False)]
        ):
            residual, norm = randn(rows, 512), 1 + randn(512) / 4
            biases = [[randn(512)], [randn(256)]] if biased else [[], []]
            weight, then = randn(512, 384) / 20, randn(256, 512) / 20
            weights = "weight, bias" if biased else "weight"
            gate = f", activation={activation!r}" if activation else ""
            text = f"linear({weights}) > add_norm(weight, eps=1e-05, reduce=True) > "
            text += f"linear({weights}{gate})"
            x = of_rank(rank, (rows, 384), turn, torch.bfloat16).to(device)
            operands = [weight, *biases[0], norm, then, *biases[1]]
            call = Call.of((x, residual, operands, text, CASES_GROUP))
            for again in range(5):
                found = run(call)
                check(f"{rows} rows, call {again}", call, found)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = run(call)
            for _ in range(3):
                graph.replay()
            check(f"{rows} rows, replayed", call, found)
    return wrong


def chained(rank: int, world: int) -> tuple[list[str], list[Tensor]]:
    """Two layers of few rows whose kernels sum over the ranks, eager and in graphs that other
    collectives are launched between; returns what was wrong, and the sums."""
    wrong, totals = [], []
    with connected(rank, world) as device:
        pushed = torch.ops.fw_cuda.skinny_linear_add_norm_linear.default
        generator = torch.Generator().manual_seed(9)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).bfloat16().to(device)

        captured = []
        for rows, inner, hidden, then, activation, biased, of_blocks in CHAINS:
            residual, norm_weight = randn(rows, hidden), 1 + randn(hidden) / 4
            next_weight, next_bias = randn(then, hidden) / hidden**0.5, randn(then)
            x = of_rank(rank, (rows, inner), rows, torch.bfloat16).to(device)
            weight = of_rank(rank, (hidden, inner), hidden, torch.bfloat16).to(device) / inner**0.5
            scale = None
            if of_blocks is not None:
                shape = (hidden // 128, inner // 128) if of_blocks else (hidden, 1)
                drawn = of_rank(rank, shape, rows, torch.float32).to(device)
                scale = 0.5 + drawn.abs() / inner**0.5
                weight = (weight * inner**0.5).to(torch.float8_e4m3fn)
            bias = of_rank(rank, (hidden,), rows, torch.bfloat16).to(device) if biased else None
            then_args = (next_weight, next_bias if biased else None, activation)
            args = (x, weight, bias, residual, norm_weight, 1e-5, *then_args, scale)
            found = pushed(*args, group_name=CASES_GROUP)
            dtype = None if scale is None else x.dtype
            part = torch.ops.fw_cuda.skinny_linear.default(x, weight, bias, None, scale, dtype)
            total = torch.ops.fw_cuda.peer_all_reduce.default(part, CASES_GROUP) + residual
            normed = ops.BY_NAME["rms_norm"].reference(total, norm_weight, 1e-5)
            y = ops.BY_NAME["linear"].reference(normed, *then_args[:2], activation=activation)
            if not torch.equal(found[1], total):
                wrong.append(f"{rows} rows: sum by {(found[1] - total).abs().max().item()}")
            if not torch.allclose(found[0].float(), y.float(), atol=6e-2, rtol=5e-2):
                wrong.append(f"{rows} rows: y by {(found[0] - y).abs().max().item()}")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                once = pushed(*args, group_name=CASES_GROUP)
                twice = pushed(x, weight, bias, once[1], *args[4:], group_name=CASES_GROUP)
            again = pushed(x, weight, bias, total, *args[4:], group_name=CASES_GROUP)
            captured.append((graph, (*once, *twice), [t.clone() for t in (*found, *again)], args))
            totals += [found[1].cpu(), again[1].cpu()]
        for turn in range(15 if world > torch.cuda.device_count() else 5000):
            graph, results, first, args = captured[turn * 5 % len(captured)]
            for _ in range(1 + turn % 3):
                graph.replay()
            if turn % 4 == 0:
                torch.ops.fw_cuda.peer_all_reduce.default(args[0], CASES_GROUP)
            if not all(map(torch.equal, results, first)):
                wrong.append(f"turn {turn} differs")
    return wrong, totals


def abandoned(rank: int, world: int) -> bool:
    """Rank 0 waits for a rank that does not come, until the abort; returns whether it waited."""
    waited = False
    with connected(rank, world) as device:
        if rank == 0:
            x = torch.ones((4, 4096), dtype=torch.bfloat16, device=device)
            torch.ops.fw_cuda.peer_all_reduce.default(x, CASES_GROUP)
            event = torch.cuda.Event()
            event.record()
            time.sleep(0.2)
            waited = not event.query()
            _peer_memory.abort(CASES_GROUP)
            torch.cuda.synchronize()
    return waited


def test_kernels_conform_in_every_rank(tmp_path: Path) -> None:
    """With two ranks; of more, gloo rounds every partial sum."""
    counts = in_ranks(conformance, 2, tmp_path)
    assert counts == [counts[0]] * 2
    assert {name for name, served in counts[0].items() if served} == {op.name for op in REDUCING}


@pytest.mark.parametrize("world", [2, 4])
def test_sums_have_the_bits_of_the_order_of_the_ranks(world: int, tmp_path: Path) -> None:
    results = in_ranks(sums, world, tmp_path)
    assert len(results[0]) == 6 * len(SHAPES)
    assert all(map(all, results)), results


@pytest.mark.parametrize("world", [2, 4])
def test_norms_have_the_same_bits_by_any_kernel(world: int, tmp_path: Path) -> None:
    results = in_ranks(normed, world, tmp_path)
    assert results == [[True] * (4 * 4 * len(_peer_memory.DTYPES))] * world


@pytest.mark.parametrize("world", [2, 4])
def test_layers_that_sum_over_ranks_give_the_bits_of_a_sum(world: int, tmp_path: Path) -> None:
    """Every rank has the sum that a kernel of its own makes, in any replay of any graph."""
    results = in_ranks(chained, world, tmp_path)
    assert [wrong for wrong, _ in results] == [[]] * world
    first = results[0][1]
    assert len(first) == 2 * len(CHAINS)
    for _, totals in results:
        assert all(map(torch.equal, totals, first))


@pytest.mark.parametrize("world", [2, 4])
def test_hidden_transfers_change_no_result(world: int, tmp_path: Path) -> None:
    """Ranks that share a GPU too: the rows are then cut into four parts."""
    assert in_ranks(overlapped, world, tmp_path) == [[]] * world


@pytest.mark.parametrize("function", [replays, abandoned], ids=lambda function: function.__name__)
def test_replays_are_equal_and_waits_can_be_ended(
    function: Callable[[int, int], Any], tmp_path: Path
) -> None:
    """Replayed and interleaved graphs give equal bits; an abort ends a kernel that waits."""
    results = in_ranks(function, 2, tmp_path)
    assert results == ([0, 0] if function is replays else [True, False])


def test_what_cannot_be_sent_is_refused() -> None:
    assert load_cuda_library()
    x = torch.ones((2, 64), dtype=torch.bfloat16, device="cuda")
    with pytest.raises(RuntimeError, match="no group 'nobody' is open in this process"):
        torch.ops.fw_cuda.peer_all_reduce.default(x, "nobody")
    with pytest.raises(RuntimeError, match="expected a multiple of 8 elements"):
        torch.ops.fw_cuda.peer_all_reduce.default(x[:1, :12].contiguous(), "nobody")
    with pytest.raises(RuntimeError, match="expected bfloat16 or float16"):
        torch.ops.fw_cuda.peer_all_reduce.default(x.float(), "nobody")
    assert _peer_memory.why_no_peers([0, 0, 0]).startswith("3 ranks: the kernels serve 2, 4, 8")
