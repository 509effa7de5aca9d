"""Computes what each op means a second time: in float64 numpy, from the definition in a paper or
docstring, by another route than the op's reference.

A reference that is wrong is otherwise invisible: kernels and rewrites are compared with it, and a
model that calls the op directly has nothing else.  ``--verify`` and the tests compare every
reference with its oracle here, and the implementations that run in its place on a CPU.  Nothing of
it is imported before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..conformance import ConformanceError
from ..core.desc import Case, Tolerance
from ..core.float8 import E4M3
from ..core.op import Implementation, SemanticOp
from ..norm.gated_act import GATED_ACTS
from ..norm.norm import NORMS
from ..norm.quantize import QUANTIZE
from . import attention, chain, drafts, experts, linear, norms, tokens
from ._call import Array, Call, Expected, Oracle, decode

ORACLES: dict[str, Oracle] = {
    **{op.name: norms.norm for axes, op in NORMS.items() if not axes.reduce},
    **{op.name: norms.gated_act(activation) for (activation, _), op in GATED_ACTS.items()},
    **{op.name: norms.quantize for op in QUANTIZE.values()},
    "rotary_embedding": attention.rotary_embedding,
    "kv_store": attention.kv_store,
    "rope_kv_store": attention.rope_kv_store,
    "paged_attention": attention.paged_attention,
    "linear": linear.linear,
    "chain": chain.chain,
    "route": experts.route,
    "expert_linear": experts.expert_linear,
    "combine_experts": experts.combine_experts,
    "fused_moe": experts.fused_moe,
    "embedding": tokens.embedding,
    "gather_last_token": tokens.gather_last_token,
    "argmax": tokens.argmax,
    "sample": tokens.sample,
    "token_logprobs": tokens.token_logprobs,
    "apply_penalties": tokens.apply_penalties,
    "count_tokens": tokens.count_tokens,
    "keep_tokens": tokens.keep_tokens,
    "accept_tokens": drafts.accept_tokens,
    "place_rows": drafts.place_rows,
    "propose_ngrams": drafts.propose_ngrams,
    "propose_suffix": drafts.propose_suffix,
    "write_inputs": tokens.write_inputs,
}

_FEW = 1 << 18
"""Elements of the arguments of a case that is checked at ``--verify``."""
_FLIPPED, _MANY = 0.05, 64
"""An output of more than ``_MANY`` FP8 values may have at most the share ``_FLIPPED`` rounded to a
neighbour.  The oracle makes the same roundings before that one, so float32 changes few of them."""


def check_case(
    op: SemanticOp, case: Case, dtype: torch.dtype, run: Callable[..., Any] | None = None
) -> None:
    """Compare the op's reference, or ``run`` in its place, with the oracle on one case of a dtype.

    Raises:
        ConformanceError: names op, case, tensor and both values.
    """
    _compare_run(op, case, dtype, run or op.overload(), ORACLES[op.name](Call.of(op, case.args)))


def _compare_run(
    op: SemanticOp, case: Case, dtype: torch.dtype, run: Callable[..., Any], expected: Expected
) -> None:
    tolerance = op.tolerance(case, dtype)
    args = tree_map_only(Tensor, Tensor.clone, case.args)
    results = run(*args)
    outputs = [results] if isinstance(results, Tensor) else [*(results or ())]
    names = [argument.name for argument in op.overload()._schema.arguments]
    found: dict[int | str, Tensor] = {**dict(enumerate(outputs))}
    found |= {name: arg for name, arg in zip(names, args, strict=False) if name in op.mutates}
    if found.keys() != expected.keys():
        raise ConformanceError(f"{op.name} gives {[*found]}, its oracle {[*expected]}")
    for name, want in expected.items():
        got = found[name]
        bound = tolerance
        if got.dtype == E4M3:
            bound = (case.tolerances or op.tolerances).get(E4M3, tolerance)
        elif not got.dtype.is_floating_point:
            bound = Tolerance(0.0, 0.0)
            if got.dtype == torch.int8:
                bound = (case.tolerances or op.tolerances).get(torch.int8, bound)
        place = f"output {name}" if isinstance(name, int) else f"argument {name}"
        where = f"{op.name}, case {case.label!r}, {place}"
        _compare(decode(got), want, bound, where, fp8=got.dtype == E4M3)


def _compare(got: Array, want: Array, bound: Tolerance, where: str, *, fp8: bool) -> None:
    if got.shape != want.shape:
        raise ConformanceError(f"{where} is {list(got.shape)}, by its oracle {list(want.shape)}")
    got, want = got.astype(np.float64), want.astype(np.float64)
    with np.errstate(invalid="ignore"):
        near = np.abs(got - want) <= bound.atol + bound.rtol * np.abs(want)
    bad = ~((near & np.isfinite(want)) | (got == want) | np.isnan(want))
    if not bad.any() and fp8 and want.size > _MANY:
        differ = got != want
        bad = differ if differ.mean() > _FLIPPED else bad
    if bad.any():
        index = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ConformanceError(
            f"{where} differs in {int(bad.sum())} of {bad.size} elements from its oracle; first at "
            f"{list(index)}: {got[index]!s}, by the definition {want[index]!s} "
            f"(atol {bound.atol}, rtol {bound.rtol})"
        )


def few_cases(op: SemanticOp, dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """The small ones of the op's cases, on a CPU."""
    for case in op.cases(dtype, torch.device("cpu"), torch.Generator().manual_seed(seed)):
        tensors = [arg for arg in tree_leaves(case.args) if isinstance(arg, Tensor)]
        if sum(tensor.numel() for tensor in tensors) <= _FEW:
            yield case


def in_its_place(op: SemanticOp) -> list[Implementation]:
    """What may run on a CPU in place of the op's reference: implementations of other code."""
    return [i for i in op.implementations if "cpu" in i.devices and i.fn is not op.reference]


def check_reference(op: SemanticOp, dtype: torch.dtype, seed: int) -> int:
    """Compare the op's reference, and what may run on a CPU in its place, with its oracle on small
    cases.

    Returns:
        Number of cases.

    Raises:
        ConformanceError: names op, implementation, case, tensor and both values.
    """
    count = 0
    for case in few_cases(op, dtype, seed):
        expected = ORACLES[op.name](Call.of(op, case.args))
        _compare_run(op, case, dtype, op.overload(), expected)
        desc = op.describe(case.args)
        for impl in in_its_place(op):
            if impl.supports(desc):
                continue
            try:
                _compare_run(op, case, dtype, op.overload(impl.name), expected)
            except ConformanceError as error:
                raise ConformanceError(f"implementation {impl.name} of {error}") from error
        count += 1
    return count
