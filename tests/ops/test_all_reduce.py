"""The sum over ranks, alone and before each norm: conformance in real ranks, and refusals."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map_only

from fusewright import ops
from fusewright.ops.collective.all_reduce import CASES_GROUP
from fusewright.ops.conformance import check_case
from fusewright.ops.norm.norm import NORMS as ALL_NORMS
from tests.ops.test_conformance import tolerance_of
from tests.ranks import in_ranks, name_world

NORMS = [
    op
    for axes, op in ALL_NORMS.items()
    if not (axes.reduce or axes.center or axes.quant.startswith("int8"))
]
"""Those that the sum over ranks is joined with."""
COLLECTIVES = [op for op in ops.ALL_OPS if op.collective]
CPU = torch.device("cpu")


def without_csrc(op: ops.SemanticOp) -> list[ops.Implementation]:
    return [impl for impl in op.implementations if impl.name != "cuda"]


def conformance(rank: int, world: int) -> dict[str, int]:
    """Every implementation but csrc's on every case, each rank with data of its own; returns how
    many of each op."""
    name_world(CASES_GROUP)
    first, every = map(int, os.environ["INTERPRETED"].split())
    checked: dict[str, int] = {}
    for op in COLLECTIVES:
        for dtype in op.dtypes:
            generator = torch.Generator().manual_seed(100 * rank + 7)
            for index, case in enumerate(op.cases(dtype, CPU, generator)):
                for impl in without_csrc(op):
                    if impl.launches is not None and (index - first) % every:
                        continue
                    tolerance = tolerance_of(op, impl, case, dtype, CPU)
                    check_case(op, op.overload(impl.name), case, tolerance)
                    checked[op.name] = checked.get(op.name, 0) + 1
    case = next(OP.cases(torch.float32, CPU, torch.Generator()))
    for impl in without_csrc(OP):
        torch.library.opcheck(OP.overload(impl.name), case.args)
    return checked


OP = ops.BY_NAME["all_reduce"]


def sums(rank: int, world: int) -> Any:
    """By the name that torch.distributed gives, over all ranks and over every other one."""
    evens = dist.new_group(range(0, world, 2))
    world_group = dist.group.WORLD
    assert world_group is not None
    x = torch.arange(6.0).view(2, 3) + 10**rank
    every = ops.all_reduce(x, world_group.group_name)
    some = ops.all_reduce(x, evens.group_name) if rank % 2 == 0 else None
    side_by_side = ops.all_gather(x, world, world_group.group_name)
    refused = {}
    try:
        ops.all_gather(x, world + 1, world_group.group_name)
    except ValueError as error:
        refused["size"] = str(error)
    for dtype in (torch.float8_e4m3fn, torch.int32):
        try:
            ops.all_reduce(x.to(dtype), world_group.group_name)
        except ValueError as error:
            refused[str(dtype)] = str(error)
    return every, some, side_by_side, x, refused


def test_every_implementation_conforms_in_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fw_seed: int, fw_cases: int
) -> None:
    """Interpreting takes seconds: kernels of Triton have one case in 12, by the seed."""
    every = 12 if fw_cases == 1 else 5
    monkeypatch.setenv("INTERPRETED", f"{fw_seed % every} {every}")
    counts = in_ranks(conformance, 2, tmp_path)
    assert counts == [counts[0]] * 2
    assert set(counts[0]) == {op.name for op in COLLECTIVES} and min(counts[0].values()) > 10


def test_a_sum_is_over_the_ranks_of_the_named_group(tmp_path: Path) -> None:
    results = in_ranks(sums, 4, tmp_path)
    base = torch.arange(6.0).view(2, 3)
    columns = torch.cat([base + 10**rank for rank in range(4)], dim=1)
    for rank, (every, some, side_by_side, x, refused) in enumerate(results):
        assert torch.equal(every, 4 * base + 1111)
        assert torch.equal(side_by_side, columns)
        assert "has 4 ranks, expected world_size=5" in refused.pop("size")
        assert torch.equal(x, base + 10**rank), "the argument was changed"
        if rank % 2 == 0:
            assert torch.equal(some, 2 * base + 101)
        assert set(refused) == {"torch.float8_e4m3fn", "torch.int32"}
        assert all("expected one of torch.float32" in text for text in refused.values())


def test_a_group_that_nobody_made_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"no process group 'tp'; call .*init_process_group"):
        ops.all_reduce(torch.zeros(2), "tp")


@pytest.mark.parametrize("name", [op.name for op in COLLECTIVES])
def test_a_group_of_one_rank_is_refused(name: str) -> None:
    from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    group._set_group_name(CASES_GROUP)
    _register_process_group(CASES_GROUP, group)
    op = ops.BY_NAME[name]
    case = next(op.cases(torch.float32, CPU, torch.Generator()))
    try:
        with pytest.raises(ValueError, match=f"'{CASES_GROUP}' has 1 rank, expected 2 or more"):
            op.overload()(*case.args)
    finally:
        _unregister_process_group(CASES_GROUP)


def test_every_combination_of_norms_is_there() -> None:
    expected = {
        f"all_reduce_{add}rms_norm{quant}"
        for add in ("", "add_")
        for quant in ("", "_quant_static", "_quant_dynamic")
    }
    assert {op.name for op in COLLECTIVES} == {
        *expected,
        *("all_reduce", "all_gather", "chain_over_ranks"),
    }


@pytest.mark.parametrize("op", COLLECTIVES, ids=lambda op: op.name)
def test_inductor_sees_one_op(op: ops.SemanticOp) -> None:
    case = next(op.cases(torch.float32, CPU, torch.Generator()))
    tensors = [arg for arg in tree_leaves(case.args) if isinstance(arg, Tensor)]

    def call(*given: Tensor) -> Any:
        rest = iter(given)
        args = tree_map_only(Tensor, lambda _: next(rest), case.args)
        return op.overload("native")(*args)

    traced = make_fx(call, tracing_mode="symbolic")(*tensors)
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert op.overload("native") in called


@pytest.mark.parametrize("norm", NORMS, ids=lambda op: op.name)
def test_a_fused_op_costs_its_parts_less_a_read_and_a_write_of_the_sum(
    norm: ops.SemanticOp,
) -> None:
    fused = ops.BY_NAME[f"all_reduce_{norm.name}"]
    for case in fused.cases(torch.bfloat16, CPU, torch.Generator()):
        x = case.args[0]
        alone = norm.cost(norm.describe(case.args[:-1]))
        reduce = OP.cost(OP.describe((x, CASES_GROUP)))
        cost = fused.cost(fused.describe(case.args))
        kept = 0 if "residual" in dict(fused.describe(case.args).args) else x.nbytes
        assert sympy.simplify(cost.bytes - alone.bytes - reduce.bytes + 2 * x.nbytes - kept) == 0
        assert sympy.simplify(cost.flops - alone.flops - reduce.flops) == 0


def test_the_wire_is_counted() -> None:
    x = torch.zeros(4, 8)
    cost = OP.cost(OP.describe((x, "tp")))
    for world, sent in [(1, 0), (2, x.nbytes), (4, x.nbytes * 3 // 2)]:
        assert cost.bytes.subs({"world_size": world}) == 2 * x.nbytes + sent


@pytest.mark.parametrize("norm", NORMS, ids=lambda op: op.name)
def test_it_runs_on_the_gpus_on_which_its_norm_does(norm: ops.SemanticOp) -> None:
    fused = ops.BY_NAME[f"all_reduce_{norm.name}"]
    found = fused.describe(next(fused.cases(torch.bfloat16, CPU, torch.Generator())).args)
    for sm in (80, 89, 90):
        desc = ops.OpDesc(found.op, found.args, "cuda", sm, csrc=True)
        if sm == 80 and "quant" in fused.name:
            with pytest.raises(ValueError, match=f"{fused.name}: FP8 came with SM 8.9"):
                ops.choose(fused, desc, inline_first=False)
        else:
            expected = "cuda" if sm == 90 else "triton"
            assert ops.choose(fused, desc, inline_first=False).name == expected
