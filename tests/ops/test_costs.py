"""Costs are symbolic, and their bytes are those of the tensors that a call reads and writes."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves, tree_map_only

from fusewright.ops import ALL_OPS, BY_NAME, Case, SemanticOp

CPU = torch.device("cpu")


def cases(op: SemanticOp, dtype: torch.dtype | None = None) -> list[Case]:
    generator = torch.Generator().manual_seed(0)
    return list(op.cases(dtype or op.dtypes[0], CPU, generator))


@pytest.mark.product
@pytest.mark.parametrize("op", ALL_OPS, ids=lambda op: op.name)
def test_symbolic_cost_evaluates_to_the_concrete_one(op: SemanticOp) -> None:
    symbolic_seen = False
    for case in cases(op):
        env = ShapeEnv()
        with FakeTensorMode(shape_env=env) as mode:
            fakes = tree_map_only(Tensor, mode.from_tensor, list(case.args))
        # Only the first dimension of each tensor is dynamic in a model; here every one is.
        symbolic = op.cost(op.describe(fakes))
        concrete = op.cost(op.describe(case.args))
        values = {sympy.sympify(d.node.expr): d.node.hint for d in dynamic_dims(fakes)}
        for name in ("bytes", "flops"):
            formula, number = getattr(symbolic, name), getattr(concrete, name)
            symbolic_seen |= bool(getattr(formula, "free_symbols", set()) & set(values))
            evaluated = sympy.sympify(formula).subs(values)
            assert sympy.simplify(evaluated - number) == 0, f"{case.label}: {formula} != {number}"
    assert symbolic_seen, f"the cost of {op.name} does not depend on any shape"


def dynamic_dims(args: list[Any]) -> list[torch.SymInt]:
    tensors = [arg for arg in tree_leaves(args) if isinstance(arg, Tensor)]
    return [dim for t in tensors for dim in t.shape if isinstance(dim, torch.SymInt)]


def nbytes(*tensors: Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["rms_norm", "add_rms_norm", "silu_mul", "gelu_tanh_mul", "linear"]
)
def test_dense_ops_count_every_argument_and_result_once(name: str, dtype: torch.dtype) -> None:
    op = BY_NAME[name]
    for case in cases(op, dtype):
        result = op.reference(*case.args)
        outputs = [result] if isinstance(result, Tensor) else list(result)
        inputs = [arg for arg in case.args if isinstance(arg, Tensor)]
        assert op.cost(op.describe(case.args)).bytes == nbytes(*inputs, *outputs), case.label


NORM, SUM, GATE, STATIC, DYNAMIC = 4, 1, 5, 1, 2
"""Operations an element: a square, its sum and two products; a residual's sum; an activation and
its product; and a scaling to FP8, for which the largest element may have to be found."""
OF_AN_ELEMENT = {
    "rms_norm": NORM,
    "add_rms_norm": NORM + SUM,
    "rms_norm_quant_static": NORM + STATIC,
    "rms_norm_quant_dynamic": NORM + DYNAMIC,
    "add_rms_norm_quant_static": NORM + SUM + STATIC,
    "add_rms_norm_quant_dynamic": NORM + SUM + DYNAMIC,
    "silu_mul": GATE,
    "gelu_tanh_mul": GATE,
    "silu_mul_quant_static": GATE + STATIC,
    "silu_mul_quant_dynamic": GATE + DYNAMIC,
    "quant_fp8_static": STATIC,
    "quant_fp8_dynamic": DYNAMIC,
}


@pytest.mark.parametrize("name", OF_AN_ELEMENT)
def test_fused_ops_do_the_work_of_their_parts_for_every_element(name: str) -> None:
    op = BY_NAME[name]
    for case in cases(op):
        with FakeTensorMode() as mode:
            fakes = tree_map_only(Tensor, mode.from_tensor, list(case.args))
            result: Any = op.overload()(*fakes)
        made = result if isinstance(result, Tensor) else result[0]
        assert op.cost(op.describe(case.args)).flops == OF_AN_ELEMENT[name] * made.numel()


def test_indexed_ops_count_the_rows_they_touch() -> None:
    for case in cases(BY_NAME["embedding"]):
        picked = BY_NAME["embedding"].reference(*case.args)
        assert cost_bytes("embedding", case) == nbytes(case.args[0]) + 2 * nbytes(picked)
    for case in cases(BY_NAME["gather_last_token"]):
        _, start = case.args
        picked = BY_NAME["gather_last_token"].reference(*case.args)
        assert cost_bytes("gather_last_token", case) == nbytes(start) + 2 * nbytes(picked)
    for case in cases(BY_NAME["kv_store"]):
        k, v, cache, slots, _ = case.args
        stored = 2 * k.numel() * cache.element_size()
        assert cost_bytes("kv_store", case) == nbytes(k, v) + stored + nbytes(slots)
    for case in cases(BY_NAME["rotary_embedding"]):
        positions, q, k, cache = case.args[:4]
        table = cache[:1].expand(len(positions), -1)
        expected = 2 * nbytes(q, k) + nbytes(positions) + nbytes(table)
        assert cost_bytes("rotary_embedding", case) == expected


def cost_bytes(name: str, case: Case) -> Any:
    op = BY_NAME[name]
    return op.cost(op.describe(case.args)).bytes


def test_flops_of_linear_are_two_a_multiply_add() -> None:
    op = BY_NAME["linear"]
    x, weight = torch.empty(3, 5), torch.empty(7, 5)
    assert op.cost(op.describe((x, weight, None))).flops == 2 * 3 * 5 * 7
